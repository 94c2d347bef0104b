"""The Serve shim around the preprocessor. Adds to preprocess.py: the object store, metrics, health."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from prometheus_client.metrics_core import Metric

from cache_service.redis_config import RedisTierConfig
from cache_service.redis_link import RedisLink
from cache_service.redis_tier import Client, RedisTier, open_link
from deployments import autoscaling
from deployments.checkpoint import resolve_model
from deployments.errors import ContextLengthError, InternalError, MediaError
from deployments.handles import RayObjectStore
from deployments.messages import MediaItem, PreparedPrompt, PrepareRequest, Ref
from deployments.metrics import Sample
from deployments.preprocessor.build import build_preprocessor
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.cpu_meter import CpuMeter
from deployments.preprocessor.fetch import FetchStats
from deployments.preprocessor.shared_index import ALIAS_KIND, REFUSED_KIND, UUID_KIND, SharedIndex
from deployments.telemetry import ReplicaTelemetry
from deployments.telemetry_config import TelemetryConfig
from deployments.work_meter import WorkMeter

RECORD_BYTES = 64 * 1024
"""Longest record that replicas share; a longer one is not worth a round trip of bounded time."""
STUCK_S = 120.0
"""Without one decoded item for so long while there are some, the workers count as stuck."""
REFUSED_TTL_S = 30.0
"""How long replicas tell each other that a file is bad; short, since the cause may go away."""

BUDGETS = {
    "context_length_exceeded": "context",
    "image_too_large": "item_pixels",
    "media_too_large": "item_bytes",
}
"""Error codes of what can never fit, and the budget that said so."""


class Preprocessor:
    """One core per replica; its work runs in threads or processes, never on the event loop."""

    def __init__(
        self,
        config: PreprocessorConfig,
        model: str,
        revision: str | None,
        telemetry: TelemetryConfig,
        redis: RedisTierConfig | None = None,
    ) -> None:
        self._telemetry = ReplicaTelemetry(telemetry, self._samples)
        self._lookups: Counter[tuple[str, str]] = Counter({("alias", "hit"): 0, ("alias", "miss"): 0})
        self._media_failures: Counter[str] = Counter()
        self._refused: Counter[str] = Counter(dict.fromkeys(BUDGETS.values(), 0))
        folder = resolve_model(model, revision, config_only=True)
        self._link = None if redis is None else open_link(redis)
        index = None if redis is None or self._link is None else _shared_index(redis, self._link)
        cores = config.decode_threads or os.cpu_count() or 1
        self._pixels, self._cpu = WorkMeter(slots=cores), CpuMeter(cores)
        self._core = build_preprocessor(config, folder, RayObjectStore(), index=index, meter=self._pixels)
        # Redis may be absent: opening connections ahead is no condition for serving.
        self._opening = None if self._link is None else asyncio.ensure_future(self._link.start())

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        with self._telemetry.stage("preprocessor.prepare", request.trace_context) as record:
            try:
                prepared = await self._core.prepare(request)
            except (MediaError, ContextLengthError) as error:
                self._note_refusal(error)
                raise
            record.fields = {"prompt_tokens": len(prepared.token_ids), "media": len(prepared.items)}
            record.stage_seconds = prepared.stage_seconds
        for lookup, count in prepared.cache_results.items():
            tier, _, result = lookup.partition(":")
            if tier != "flight":  # Joins are no look-ups; the core counts them itself.
                self._lookups[tier, result] += count
        return prepared

    def _note_refusal(self, error: MediaError | ContextLengthError) -> None:
        if isinstance(error, MediaError):
            self._media_failures[error.code] += 1
        budget = BUDGETS.get(error.code)
        if budget is not None:
            self._refused[budget] += 1

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> tuple[Ref]:
        """Nested in a tuple, so that the ref itself arrives and not the array."""
        return (await self._core.make_patches(item, deadline_s),)

    async def ready(self) -> None:
        """Answering is being ready."""

    async def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        if self._pixels.stalled_s > STUCK_S:
            raise InternalError(f"no picture has been decoded for {self._pixels.stalled_s:.0f} s, though some wait")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for the autoscaling policy."""
        return {**autoscaling.work_stats(self._pixels.read()), autoscaling.CPU_LOAD: self._cpu.read()}

    async def metrics(self) -> list[Metric]:
        return await self._telemetry.collect()

    async def metrics_target(self) -> dict[str, Any] | None:
        return await self._telemetry.target()

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
        yield from (("budget_rejections_total", (budget, "rejected"), count) for budget, count in self._refused.items())
        for result in ("new", "same", "rebound", "refused"):
            yield "uuid_bindings_total", (result,), getattr(stats.uuids, result)
        yield "media_total", ("video", "seen"), stats.videos
        yield "media_total", ("image", "seen"), stats.pictures
        yield "media_total", ("image", "decoded"), stats.decodes
        yield "media_total", ("image", "remade"), stats.remakes
        yield from _fetch_samples(stats.fetch)
        yield "decode_jobs_total", (), stats.decode.jobs
        yield "decode_worker_losses_total", ("crashed",), stats.decode.crashes
        yield "decode_worker_losses_total", ("hung",), stats.decode.hangs


def _fetch_samples(stats: FetchStats) -> Iterator[Sample]:
    yield "media_fetches_total", ("fetched",), stats.fetched
    yield "media_fetches_total", ("refused",), stats.refused
    yield "media_fetches_total", ("timed_out",), stats.timeouts
    yield "media_fetches_total", ("failed",), stats.failures
    yield "media_fetches_in_flight", (), stats.in_flight
    yield "media_fetch_redirects_total", (), stats.redirects
    yield "media_fetch_bytes_total", (), stats.bytes_read


def _shared_index(redis: RedisTierConfig, link: RedisLink[Client]) -> SharedIndex:
    """Tiers for small records over one link."""
    small = replace(redis, max_value_bytes=RECORD_BYTES, max_bytes=RECORD_BYTES, oversize="skip")
    brief = replace(small, ttl_s=min(REFUSED_TTL_S, redis.ttl_s))
    return SharedIndex(
        aliases=RedisTier(small, kind=ALIAS_KIND, link=link),
        refusals=RedisTier(brief, kind=REFUSED_KIND, link=link),
        names=RedisTier(small, kind=UUID_KIND, link=link),
    )
