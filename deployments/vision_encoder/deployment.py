"""The Serve shim around the vision encoder. Adds to service.py: the object store, the shared tier, metrics, health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from cache_service.circuit_breaker import BreakerState
from cache_service.cluster_flight import ClusterFlight
from cache_service.identity import EncoderFingerprint
from cache_service.read_through import Found, ReadThrough
from cache_service.redis_config import RedisTierConfig
from cache_service.redis_lease import RedisLeases
from cache_service.redis_tier import RedisTier
from cache_service.single_flight import SingleFlight
from cache_service.tier import LookupResult
from cache_service.tiered import TieredCache
from deployments.handles import PreprocessorHandle, RayObjectStore
from deployments.messages import EncodedItem, EncodeRequest
from deployments.metrics import ReplicaMetrics, Sample
from deployments.ports import ObjectStore, Preprocessor
from deployments.replica_log import quiet_callers_faults
from deployments.vision_encoder.batcher import DynamicBatcher
from deployments.vision_encoder.build import load_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.embedding_codec import Embedding, decode_embedding, encode_embedding
from deployments.vision_encoder.service import EncoderService
from deployments.vision_encoder.stats import EncoderStats

REDIS_KIND = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    config: EncoderConfig
    fingerprint: EncoderFingerprint
    redis: RedisTierConfig | None


class EncoderParts:
    """A loaded encoder with its caches, for a deployment of its own or inside an engine's replica.

    Must be made on the event loop that will use it.
    """

    def __init__(
        self, options: EncoderOptions, store: ObjectStore, preprocessor: Preprocessor, *, keep_on_device: bool = False
    ) -> None:
        config = options.config
        self.stats = EncoderStats()
        core = load_core(config, keep_on_device=keep_on_device, stats=self.stats)
        batcher = DynamicBatcher(
            core.encode,
            core.limit,
            max_wait_s=config.max_wait_s,
            max_queued_items=config.max_queued_items,
            stats=self.stats,
            num_threads=config.num_threads,
        )
        self.redis = None if options.redis is None else RedisTier.connect(options.redis, kind=REDIS_KIND)
        self.lower = None if self.redis is None else _shared_cache(self.redis, options.fingerprint.model_id)
        self.service = EncoderService(
            core,
            batcher,
            store,
            fingerprint=options.fingerprint,
            cache_bytes=config.cache_bytes,
            stats=self.stats,
            preprocessor=preprocessor,
            lower=self.lower,
        )
        # Redis may be absent: opening connections ahead is no condition for serving.
        self._opening = None if self.redis is None else asyncio.ensure_future(self.redis.start())

    def samples(self) -> Iterator[Sample]:
        """Counters under their metric names."""
        yield from encoder_samples(self.stats)
        memory = self.service.memory.stats()
        yield "cache_bytes", ("memory",), memory.bytes
        yield "cache_evictions_total", ("memory",), memory.evictions
        if self.redis is not None and self.lower is not None:
            yield from _redis_samples(self.redis, self.lower)


class VisionEncoder:
    """One encoder per replica; its forward passes run in a thread of their own."""

    def __init__(self, options: EncoderOptions, preprocessor: DeploymentHandle) -> None:
        quiet_callers_faults()
        context = serve.get_replica_context()
        self._parts = EncoderParts(options, RayObjectStore(), PreprocessorHandle(preprocessor))
        self._metrics = ReplicaMetrics(context.deployment, context.replica_id.unique_id, self._parts.samples)

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        return await self._parts.service.encode(request)

    async def ready(self) -> None:
        """Answering is being ready: the model is loaded before the replica answers anything."""

    async def metrics(self) -> list[Metric]:
        return self._metrics.collect()


def _shared_cache(redis: RedisTier, model: str) -> ReadThrough[Embedding]:
    flights: SingleFlight[Found[Embedding]] = SingleFlight()
    return ReadThrough(
        TieredCache([redis], decode_embedding),
        partial(encode_embedding, model=model),
        flights=flights,
        shared=redis,
        cluster=ClusterFlight(RedisLeases(redis.link, redis.layout)),
    )


def encoder_samples(stats: EncoderStats) -> Iterator[Sample]:
    yield from (("encoder_invocations_total", key, count) for key, count in stats.invocations.items())
    yield from (("encoder_items_total", (path,), count) for path, count in stats.items.items())
    yield from (("encoder_graph_replays_total", (str(key[1]),), count) for key, count in stats.graph_replays.items())
    yield from (("encoder_padded_tokens_total", (path,), count) for path, count in stats.padded_slots.items())
    yield from (("encoder_tokens_total", (path,), count) for path, count in stats.slots.items())
    yield from (("encoder_eager_fallbacks_total", (why,), count) for why, count in stats.eager_fallbacks.items())
    yield from (("encoder_batch_seconds_total", (path,), seconds) for path, seconds in stats.batch_seconds.items())
    for kind in ("out_of_memory", "error"):
        yield "encoder_batch_failures_total", (kind,), stats.batch_failures[kind]
    yield "encoder_batch_items", (), dict(stats.batch_items)
    for result in ("hit", "miss"):
        yield "cache_lookups_total", ("memory", result), 0
    yield from (("cache_lookups_total", key, count) for key, count in stats.cache_results.items() if key[0] != "lower")
    yield "single_flight_joins_total", ("encoder",), stats.single_flight_joins
    yield "budget_rejections_total", ("encoder", "rejected"), sum(stats.rejected_items.values())


def _redis_samples(redis: RedisTier, lower: ReadThrough[Embedding]) -> Iterator[Sample]:
    stats = redis.stats()
    for result in LookupResult:
        yield "cache_lookups_total", ("redis", result.value), 0
    for (tier, result), count in lower.cache.stats.lookups.items():
        yield "cache_lookups_total", (tier, result.value), count
    yield "cache_transfer_bytes_total", ("redis", "read"), stats.bytes_in
    yield "cache_transfer_bytes_total", ("redis", "write"), stats.bytes_out
    yield "cache_breaker_open", ("redis",), float(stats.breaker.state is not BreakerState.CLOSED)
    if lower.cluster is not None:
        yield "single_flight_joins_total", ("cluster",), lower.cluster.stats.joins
