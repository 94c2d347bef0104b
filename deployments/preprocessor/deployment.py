"""The Serve shim around the preprocessor. Adds to preprocess.py: the object store, metrics, health."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from ray import serve

from deployments.checkpoint import resolve_model
from deployments.handles import RayObjectStore
from deployments.messages import MediaItem, PreparedPrompt, PrepareRequest, Ref
from deployments.metrics import ReplicaMetrics, Sample
from deployments.preprocessor.build import build_preprocessor
from deployments.preprocessor.config import PreprocessorConfig


class Preprocessor:
    """One core per replica; its work runs in threads or processes, never on the event loop."""

    def __init__(self, config: PreprocessorConfig, model: str, revision: str | None) -> None:
        context = serve.get_replica_context()
        self._metrics = ReplicaMetrics(context.deployment, context.replica_id.unique_id, self._samples)
        self._lookups: Counter[tuple[str, str]] = Counter()
        folder = resolve_model(model, revision, config_only=True)
        self._core = build_preprocessor(config, folder, RayObjectStore())

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        prepared = await self._core.prepare(request)
        for lookup, count in prepared.cache_results.items():
            tier, _, result = lookup.partition(":")
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
        yield "single_flight_joins_total", ("preprocessor",), stats.flights.joins
        yield "media_total", ("image", "seen"), stats.pictures
        yield "media_total", ("image", "decoded"), stats.decodes
        yield "media_total", ("image", "remade"), stats.remakes
