"""The Serve shim around the LM engine. Adds to async_engine.py: refs, a handle to the encoder, health, metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from cache_service.identity import EncoderFingerprint
from deployments import autoscaling
from deployments.checkpoint import resolve_model
from deployments.delta_codec import encode
from deployments.direct_store import open_store
from deployments.errors import NotFoundError, NotReadyError
from deployments.handles import EncoderHandle
from deployments.hedging import OUTCOMES
from deployments.lm_engine.build import build_engine
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_pool import EmbedPoolStats
from deployments.lm_engine.engine_stats import EngineStats
from deployments.lm_engine.gang import Gang
from deployments.lm_engine.load import EngineLoadMeter
from deployments.lm_engine.stats import Budget, Outcome
from deployments.messages import GenerateRequest, GenerationStats
from deployments.metrics import ReplicaMetrics, Sample
from deployments.ports import EmbeddingTransfer, ObjectStore, VisionEncoder
from deployments.telemetry import ReplicaTelemetry, StageRecord
from deployments.telemetry_config import TelemetryConfig
from deployments.transfer_meter import MeteredStore

SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    config: EngineConfig
    fingerprint: EncoderFingerprint
    telemetry: TelemetryConfig
    max_item_slots: int
    max_item_patches: int
    transfer: EmbeddingTransfer = "object_store"


class LMEngine:
    """One engine per replica, on its own thread.

    A request is two calls, `submit` and `stream`, and its deltas come over a third, `read_channel`, which one caller's
    requests share: Serve's work for each item of a stream is worth a large part of a decode step.
    """

    _encoders: EncoderHandle | None = None
    """None with an encoder in this replica."""

    def __init__(self, options: EngineOptions, encoder: DeploymentHandle) -> None:
        self._encoders = EncoderHandle(encoder, options.config.hedging)
        self._setup(options, self._encoders, open_store(options.transfer), metered=True)

    def _setup(
        self, options: EngineOptions, encoder: VisionEncoder, store: ObjectStore, *, metered: bool = False
    ) -> None:
        """Args:
        store: Where embeddings are.
        metered: Whether getting them from there is measured.
        """
        # The event loop must not keep the engine's thread from the interpreter for the default of 5 ms: a step may take
        # less than that.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = options.config
        folder: Path = resolve_model(config.model, config.revision, config_only=config.load_format == "dummy")
        self._replica: str = serve.get_replica_context().replica_id.unique_id
        self._stats: EngineStats | None = None
        self._telemetry = ReplicaTelemetry(options.telemetry, self._samples, self._read_stats)
        self._observations = EngineObservations(self._telemetry.metrics)
        if metered:
            store = MeteredStore(store, options.transfer, self._telemetry.metrics)
        self._load = EngineLoadMeter(config.max_num_seqs)
        self._gang = Gang(config, folder) if config.tensor_parallel_size > 1 else None
        self._engine = build_engine(
            config,
            folder,
            encoder=encoder,
            store=store,
            fingerprint=options.fingerprint,
            max_item_slots=options.max_item_slots,
            max_item_patches=options.max_item_patches,
            leader=None if self._gang is None else self._gang.leader,
        )
        self._engine.start()

    async def submit(self, request: GenerateRequest) -> str:
        """Admit a request; returns which replica this is, for `read_channel`."""
        self._check_ranks()
        await self._engine.submit(request)
        return self._replica

    async def stream(self, request_id: str, channel_id: str) -> AsyncIterator[None]:
        """Send a request's deltas over a channel. Goes on, without an item, for as long as the request does, so that
        Serve counts it, waits for it and cancels it as it does with any other call."""
        with self._telemetry.stage("lm_engine.generate", self._engine.trace_context(request_id)) as record:
            _note_end(record, await self._engine.forward(request_id, channel_id))
        yield None  # gRPC does not promise to tell of a stream that ends without an item

    async def read_channel(self, channel_id: str, replica: str) -> AsyncIterator[bytes]:
        """What a channel's requests gain, encoded by delta_codec; `replica` is what `submit` returned."""
        if replica != self._replica:
            raise NotFoundError("this is another replica")
        # Closed here, not whenever the collector finds it: a cancelled channel must free its requests' blocks at once.
        async with aclosing(self._engine.read_channel(channel_id)) as steps:
            async for batches in steps:
                for message in encode(batches):
                    yield message

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def reset_prefix_cache(self) -> int:
        return await self._engine.reset_prefix_cache()

    async def ready(self) -> None:
        await self.check_health()

    async def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        self._check_ranks()
        self._engine.check_health()

    def _check_ranks(self) -> None:
        """Raise ReplicaLostError if this replica has lost one of its ranks: callers go elsewhere."""
        if self._gang is not None:
            self._gang.leader.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for the autoscaling policy; empty once the engine has ended."""
        try:
            stats = await self._engine.scheduler_stats()
        except NotReadyError:
            return {}
        load = self._load.read(stats, time.monotonic())
        values = {
            autoscaling.WAITING_TOKENS: float(load.waiting_tokens),
            autoscaling.KV_USE: load.kv_use,
            autoscaling.SEAT_USE: load.seat_use,
        }
        if load.prompt_tokens_per_s:
            values[autoscaling.PROMPT_TOKENS_PER_S] = load.prompt_tokens_per_s
        return values

    async def metrics(self) -> list[Metric]:
        return await self._telemetry.collect()

    async def metrics_target(self) -> dict[str, Any] | None:
        return await self._telemetry.target()

    async def _read_stats(self) -> None:
        try:
            self._stats = await self._engine.stats()
        except NotReadyError:
            return  # The engine's thread has ended: the last totals stand until Serve has replaced the replica.
        self._observations.add(self._stats)

    def _samples(self) -> Iterator[Sample]:
        if self._stats is not None:
            yield from engine_samples(self._stats)
        yield from pool_samples(self._engine.embed_pool_stats())
        if self._encoders is not None:
            for outcome in OUTCOMES:
                yield "encoder_hedges_total", (outcome,), self._encoders.hedges.get(outcome, 0)


def _note_end(record: StageRecord, choices: Sequence[GenerationStats]) -> None:
    for stats in choices:
        record.stage_seconds = stats.stage_seconds
        record.fields["prompt_tokens"] = stats.prompt_tokens
        record.fields["cached_tokens"] = stats.cached_tokens
    record.fields["completion_tokens"] = sum(stats.completion_tokens for stats in choices)


class EngineObservations:
    """What the engine observed since the last scrape, into histograms."""

    def __init__(self, metrics: ReplicaMetrics) -> None:
        self._first_token = metrics.histogram("engine_time_to_first_token_seconds")
        self._inter_token = metrics.histogram("engine_inter_token_seconds")
        self._stages = metrics.histogram("engine_stage_seconds")

    def add(self, stats: EngineStats) -> None:
        for seconds in stats.time_to_first_token_s:
            self._first_token.observe(seconds)
        for seconds in stats.inter_token_s:
            self._inter_token.observe(seconds)
        for stage, values in stats.stage_seconds.items():
            observe = self._stages.labels(stage).observe
            for seconds in values:
                observe(seconds)


def pool_samples(stats: EmbedPoolStats) -> Iterator[Sample]:
    yield "embedding_pool_bytes", ("used",), stats.used_bytes
    yield "embedding_pool_bytes", ("free",), stats.total_bytes - stats.used_bytes
    yield "embedding_pool_waiting", (), stats.waiting
    yield "embedding_pool_expired_total", (), stats.expired


def engine_samples(stats: EngineStats) -> Iterator[Sample]:
    """The engine's counters under their metric names."""
    s = stats.scheduler
    for budget in get_args(Budget):
        for outcome in get_args(Outcome):
            yield "budget_rejections_total", (budget, outcome), s.denials.get((budget, outcome), 0)
    yield "scheduler_stalled_seconds", (), s.stalled_s
    yield "encode_retries_total", (), stats.encode_retries
    yield "scheduler_requests", ("running",), s.running
    yield "scheduler_requests", ("waiting",), s.waiting
    reusable = min(s.blocks_cached, s.blocks_total - s.blocks_used)
    yield "kv_blocks", ("used",), s.blocks_used
    yield "kv_blocks", ("cached",), reusable
    yield "kv_blocks", ("free",), s.blocks_total - s.blocks_used - reusable
    used = s.slots_held + s.slots_ahead
    yield "embedding_slots", ("used",), used
    yield "embedding_slots", ("cached",), s.slots_idle
    yield "embedding_slots", ("free",), s.slots_total - used - s.slots_idle
    yield "preemptions_total", (), s.preemptions
    yield "prompt_tokens_total", ("computed",), stats.prompt_tokens_computed
    yield "prompt_tokens_total", ("cached",), stats.prompt_tokens_cached
    yield "generated_tokens_total", (), stats.generated_tokens
    yield "engine_steps_total", (), stats.steps
    yield "engine_step_failures_total", (), stats.step_faults
    yield "cache_lookups_total", ("lm_embeddings", "hit"), s.embed_hits
    yield "cache_lookups_total", ("lm_embeddings", "miss"), s.encode_starts
    yield "cache_evictions_total", ("lm_embeddings",), s.embed_evictions
    yield "cache_evictions_total", ("prefix",), s.block_evictions
    yield "cache_bytes", ("lm_embeddings",), stats.embed_bytes
