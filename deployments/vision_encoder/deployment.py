"""The Serve shim around the vision encoder. Adds to service.py: the object store, the shared tier, metrics, health."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.metrics_core import Metric
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
from deployments import autoscaling
from deployments.direct_store import open_store
from deployments.errors import InternalError
from deployments.handles import PreprocessorHandle, RayObjectStore
from deployments.messages import EncodedItem, EncodeRequest
from deployments.metrics import Sample
from deployments.ports import EmbeddingTransfer, ObjectStore, Preprocessor
from deployments.telemetry import ReplicaTelemetry
from deployments.telemetry_config import TelemetryConfig
from deployments.transfer_meter import MeteredStore
from deployments.vision_encoder.batcher import DynamicBatcher, Neighbour
from deployments.vision_encoder.build import load_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.data_parallel import DataParallelCore
from deployments.vision_encoder.embedding_codec import Embedding, decode_embedding, encode_embedding
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.metered_batcher import MeteredBatcher
from deployments.vision_encoder.pace import Pace
from deployments.vision_encoder.service import EncoderService
from deployments.vision_encoder.stats import EncoderStats, sum_stats
from deployments.work_meter import WorkMeter

REDIS_KIND = "embedding"
STUCK_S = 120.0
"""Without one encoded item for so long while there are some, the encoder counts as stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    config: EncoderConfig
    fingerprint: EncoderFingerprint
    telemetry: TelemetryConfig
    redis: RedisTierConfig | None
    transfer: EmbeddingTransfer = "object_store"


class EncoderParts:
    """A loaded encoder with its caches, for a deployment of its own or inside an engine's replica.

    Must be made on the event loop that will use it.

    Args:
        store: Where patches are, and embeddings go unless `embeddings` says otherwise.
        keep_on_device: Leave embeddings on the encoder's device.
        is_decoding: Whether a language model on the same device makes tokens now; None if there is none.
    """

    def __init__(
        self,
        options: EncoderOptions,
        store: ObjectStore,
        preprocessor: Preprocessor,
        *,
        embeddings: ObjectStore | None = None,
        keep_on_device: bool = False,
        is_decoding: Callable[[], bool] | None = None,
    ) -> None:
        config = options.config
        self.stats = EncoderStats()
        self.patches = WorkMeter()
        """Patches that wait for the encoder and go through it."""
        core = load_core(config, keep_on_device=keep_on_device, stats=self.stats)
        # Cores on several devices count apart, each on its own thread.
        self._part_stats = core.part_stats if isinstance(core, DataParallelCore) else ()
        batcher = DynamicBatcher(
            core.encode,
            core.limit,
            max_wait_s=config.max_wait_s,
            max_queued_items=config.max_queued_items,
            stats=self.stats,
            num_threads=config.num_threads,
            neighbour=_neighbour(config, core, is_decoding),
        )
        self.redis = None if options.redis is None else RedisTier.connect(options.redis, kind=REDIS_KIND)
        self.lower = None if self.redis is None else _shared_cache(self.redis, options.fingerprint.model_id)
        self.service = EncoderService(
            core,
            MeteredBatcher(batcher, self.patches),
            store,
            fingerprint=options.fingerprint,
            cache_bytes=config.cache_bytes,
            stats=self.stats,
            preprocessor=preprocessor,
            lower=self.lower,
            embeddings=embeddings,
        )
        # Redis may be absent: opening connections ahead is no condition for serving.
        self._opening = None if self.redis is None else asyncio.ensure_future(self.redis.start())

    def samples(self) -> Iterator[Sample]:
        """Counters under their metric names."""
        yield from encoder_samples(sum_stats((self.stats, *self._part_stats)))
        memory = self.service.memory.stats()
        yield "cache_bytes", ("memory",), memory.bytes
        yield "cache_evictions_total", ("memory",), memory.evictions
        if self.redis is not None and self.lower is not None:
            yield from _redis_samples(self.redis, self.lower)


class VisionEncoder:
    """One encoder per replica; its forward passes run in a thread of their own."""

    def __init__(self, options: EncoderOptions, preprocessor: DeploymentHandle) -> None:
        self._telemetry = ReplicaTelemetry(options.telemetry, lambda: self._parts.samples())
        self._parts = EncoderParts(
            options,
            RayObjectStore(),
            PreprocessorHandle(preprocessor),
            embeddings=MeteredStore(open_store(options.transfer), options.transfer, self._telemetry.metrics),
            # Several devices' results are gathered on the host.
            keep_on_device=options.transfer != "object_store" and options.config.data_parallel_size == 1,
        )

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        return await encode_recorded(self._parts.service, request, self._telemetry)

    async def ready(self) -> None:
        """Answering is being ready: the model is loaded before the replica answers anything."""

    async def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        if self._parts.patches.stalled_s > STUCK_S:
            raise InternalError(
                f"no picture has been encoded for {self._parts.patches.stalled_s:.0f} s, though some wait"
            )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for the autoscaling policy."""
        return autoscaling.work_stats(self._parts.patches.read())

    async def metrics(self) -> list[Metric]:
        return await self._telemetry.collect()

    async def metrics_target(self) -> dict[str, Any] | None:
        return await self._telemetry.target()


def _neighbour(
    config: EncoderConfig, core: EncoderCore | DataParallelCore, is_decoding: Callable[[], bool] | None
) -> Neighbour | None:
    if is_decoding is None or config.colocated_share is None:
        return None
    pace = Pace(config.colocated_share, config.colocated_pass_s)
    return Neighbour(pace=pace, is_decoding=is_decoding, predict_s=core.predict_seconds)


async def encode_recorded(
    service: EncoderService, request: EncodeRequest, telemetry: ReplicaTelemetry
) -> tuple[EncodedItem, ...]:
    """`service.encode` with its span and its line of the log."""
    with telemetry.stage("vision_encoder.encode", request.trace_context) as record:
        record.fields["items"] = len(request.items)
        encoded = await service.encode(request)
        record.fields.update(Counter(item.origin for item in encoded))
        return encoded


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
    yield "encoder_paced_seconds_total", (), stats.paced_seconds
    yield "encoder_peak_bytes", ("predicted",), stats.predicted_peak_bytes
    yield "encoder_peak_bytes", ("measured",), stats.measured_peak_bytes
    yield "encoder_graph_bytes", (), stats.graph_bytes
    yield "encoder_capture_seconds", (), stats.capture_seconds
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
