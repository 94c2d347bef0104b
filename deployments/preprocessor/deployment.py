"""The Serve shim around the preprocessor. Adds to preprocess.py: the object store, metrics, health."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.metrics_core import Metric
from ray import serve

from cache_service.redis_config import RedisTierConfig
from cache_service.redis_link import RedisLink
from cache_service.redis_tier import Client, RedisTier, open_link
from deployments.checkpoint import resolve_model
from deployments.errors import MediaError
from deployments.handles import RayObjectStore
from deployments.messages import MediaItem, PreparedPrompt, PrepareRequest, Ref
from deployments.metrics import ReplicaMetrics, Sample
from deployments.preprocessor.build import build_preprocessor
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.shared_index import ALIAS_KIND, REFUSED_KIND, UUID_KIND, SharedIndex
from deployments.replica_log import quiet_callers_faults

RECORD_BYTES = 64 * 1024
"""Longest record that replicas share; a longer one is not worth a round trip of bounded time."""
REFUSED_TTL_S = 30.0
"""How long replicas tell each other that a file is bad; short, since the cause may go away."""


class Preprocessor:
    """One core per replica; its work runs in threads or processes, never on the event loop."""

    def __init__(
        self, config: PreprocessorConfig, model: str, revision: str | None, redis: RedisTierConfig | None = None
    ) -> None:
        quiet_callers_faults()
        context = serve.get_replica_context()
        self._metrics = ReplicaMetrics(context.deployment, context.replica_id.unique_id, self._samples)
        self._lookups: Counter[tuple[str, str]] = Counter({("alias", "hit"): 0, ("alias", "miss"): 0})
        self._media_failures: Counter[str] = Counter()
        folder = resolve_model(model, revision, config_only=True)
        self._link = None if redis is None else open_link(redis)
        index = None if redis is None or self._link is None else _shared_index(redis, self._link)
        self._core = build_preprocessor(config, folder, RayObjectStore(), index=index)
        # Redis may be absent: opening connections ahead is no condition for serving.
        self._opening = None if self._link is None else asyncio.ensure_future(self._link.start())

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        try:
            prepared = await self._core.prepare(request)
        except MediaError as error:
            self._media_failures[error.code] += 1
            raise
        for lookup, count in prepared.cache_results.items():
            tier, _, result = lookup.partition(":")
            if tier != "flight":  # Joins are no look-ups; the core counts them itself.
                self._lookups[tier, result] += count
        return prepared

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> tuple[Ref]:
        """Nested in a tuple, so that the ref itself arrives and not the array."""
        return (await self._core.make_patches(item, deadline_s),)

    async def ready(self) -> None:
        """Answering is being ready."""

    async def metrics(self) -> list[Metric]:
        return self._metrics.collect()

    def _samples(self) -> Iterator[Sample]:
        stats = self._core.stats()
        yield from (("cache_lookups_total", key, count) for key, count in self._lookups.items())
        for tier, lru in (("alias", stats.alias), ("sources", stats.sources)):
            yield "cache_bytes", (tier,), lru.bytes
            yield "cache_evictions_total", (tier,), lru.evictions
        for (kind, result), count in stats.shared_lookups.items():
            yield "cache_lookups_total", (f"redis_{kind}", result), count
        for direction, num_bytes in stats.shared_bytes.items():
            yield "cache_transfer_bytes_total", ("redis", direction), num_bytes
        yield "single_flight_joins_total", ("preprocessor",), stats.flights.joins
        yield from (("media_failures_total", (code,), count) for code, count in self._media_failures.items())
        for result in ("new", "same", "rebound", "refused"):
            yield "uuid_bindings_total", (result,), getattr(stats.uuids, result)
        yield "media_total", ("video", "seen"), stats.videos
        yield "media_total", ("image", "seen"), stats.pictures
        yield "media_total", ("image", "decoded"), stats.decodes
        yield "media_total", ("image", "remade"), stats.remakes


def _shared_index(redis: RedisTierConfig, link: RedisLink[Client]) -> SharedIndex:
    """Tiers for small records over one link."""
    small = replace(redis, max_value_bytes=RECORD_BYTES, max_bytes=RECORD_BYTES, oversize="skip")
    brief = replace(small, ttl_s=min(REFUSED_TTL_S, redis.ttl_s))
    return SharedIndex(
        aliases=RedisTier(small, kind=ALIAS_KIND, link=link),
        refusals=RedisTier(brief, kind=REFUSED_KIND, link=link),
        names=RedisTier(small, kind=UUID_KIND, link=link),
    )
