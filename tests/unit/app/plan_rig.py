"""The measured 7B shape, its shipped rates, and short ways to an estimate and a replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from app.plan import DEFAULT_RATES
from app.planning.estimate import Estimate
from app.planning.rates import Rates, read_rates
from app.planning.replay import CACHE_BYTES, Played, Replay
from app.planning.serve_fragment import preprocessors_for
from app.planning.shape import ModelShape, shape_of
from app.planning.splits import EngineOptions, Split, engine_memory
from app.planning.stage_times import StageTimes
from app.planning.workload import Caches, SyntheticWorkload, demand_of
from deployments.lm_engine.trace import TraceRequest

MEGAPIXELS_PER_SLOT = 28 * 28 / 1e6


@cache
def shipped_rates() -> Rates:
    return read_rates(DEFAULT_RATES)


@cache
def measured_shape() -> ModelShape:
    rates = shipped_rates()
    return shape_of(rates.config, rates.model)


@cache
def measured_times() -> StageTimes:
    return StageTimes(shipped_rates(), measured_shape())


def workload(
    requests: int = 300,
    images: int = 1,
    slots: int = 144,
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    reuse: float = 0.0,
    requests_per_s: float = 10.0,
) -> list[TraceRequest]:
    return SyntheticWorkload(
        requests=requests,
        images=images,
        slots=slots,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        reuse=reuse,
        requests_per_s=requests_per_s,
    ).make()


def estimate(
    split: Split, requests: Sequence[TraceRequest], options: EngineOptions | None = None, gpu_memory_gib: float = 139.0
) -> Estimate:
    options, shape = options or EngineOptions(), measured_shape()
    memory = engine_memory(shipped_rates(), shape, options, gpu_memory_gib, colocated=split.colocated)
    caches = Caches(
        (split.encoders or split.engines) * CACHE_BYTES / shape.tower.row_bytes, split.engines * memory.kv_tokens
    )
    demand = demand_of(requests, caches)
    return Estimate(split, demand, measured_times(), options, memory, MEGAPIXELS_PER_SLOT)


def replay(
    split: Split, requests: Sequence[TraceRequest], cpu_s: float = 0.01, options: EngineOptions | None = None
) -> Played:
    options = options or EngineOptions()
    memory = engine_memory(shipped_rates(), measured_shape(), options, 139.0, colocated=split.colocated)
    return Replay(
        split,
        measured_times(),
        options,
        memory,
        requests,
        megapixels_per_slot=MEGAPIXELS_PER_SLOT,
        preprocessors=preprocessors_for(cpu_s, 1000.0),
    ).run()
