"""Splits of GPUs, and what fits the memory of one."""

from __future__ import annotations

from dataclasses import dataclass

from app.planning.errors import PlanError
from app.planning.rates import Rates
from app.planning.shape import ModelShape, shape_of
from app.planning.stage_times import MAX_PASS_PATCHES

GIB = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """So many GPUs for vision encoders and for LM engines; without encoders each LM engine has one of its own in the
    same process (colocated)."""

    encoders: int
    engines: int

    @property
    def gpus(self) -> int:
        return self.encoders + self.engines

    @property
    def colocated(self) -> bool:
        return self.encoders == 0

    def __str__(self) -> str:
        return f"{self.engines} colocated" if self.colocated else f"{self.encoders} + {self.engines}"


def splits_of(gpus: int) -> list[Split]:
    """Every split of exactly so many GPUs; at least one of them runs the language model."""
    return [Split(encoders, gpus - encoders) for encoders in range(gpus)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an LM engine replica; names and meanings are those of `lm_engine`."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_prefill_tokens_while_decoding: int = 0
    encoder_cache_slots: int = 0
    max_model_len: int = 32_768
    block_size: int = 16
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_prefill_tokens_while_decoding", "encoder_cache_slots"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise PlanError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0, at most 1")


@dataclass(frozen=True, slots=True)
class Memory:
    """What an LM engine replica's GPU holds."""

    kv_tokens: int
    encoder_bytes: int
    """Weights, captured sizes and the largest pass of a colocated encoder; 0 without one."""
    utilization: float
    """`gpu_memory_utilization` that leaves the encoder its part."""


def engine_memory(
    rates: Rates, shape: ModelShape, options: EngineOptions, gpu_memory_gib: float, *, colocated: bool
) -> Memory:
    """KV tokens of one replica.

    Raises:
        PlanError: The weights, the largest step and the KV cache of one longest request do not fit.
    """
    total = gpu_memory_gib * GIB
    encoder = encoder_bytes(rates, shape) if colocated else 0
    utilization = min(options.gpu_memory_utilization, int((1 - encoder / total) * 100) / 100)
    step = shape.decoder.step_bytes(options.max_num_batched_tokens, options.max_num_seqs)
    left = total * options.gpu_memory_utilization - shape.decoder_bytes - step - encoder
    needed = options.max_model_len * shape.decoder.kv_bytes_per_token
    if left < needed:
        raise PlanError(
            f"{shape.name} does not fit a GPU of {gpu_memory_gib:g} GiB: at gpu_memory_utilization "
            f"{options.gpu_memory_utilization:g}, {shape.decoder_bytes / GIB:.1f} GiB of weights, {step / GIB:.1f} of "
            f"the largest step{f' and {encoder / GIB:.1f} of the encoder' if encoder else ''} leave {left / GIB:.1f} "
            f"GiB for the KV cache, and one request of max_model_len {options.max_model_len} needs {needed / GIB:.1f}; "
            "engines spread over several GPUs (tensor_parallel_size) are not planned"
        )
    return Memory(int(left // shape.decoder.kv_bytes_per_token), encoder, utilization)


def encoder_bytes(rates: Rates, shape: ModelShape) -> int:
    """Device memory of a vision encoder with its largest pass. What was measured for another tower is scaled by
    its width."""
    measured = shape_of(rates.config, rates.model).tower
    scale = shape.tower.hidden / measured.hidden
    encoder = rates.encoder
    working = encoder.graph_bytes + encoder.fixed_bytes + encoder.bytes_per_patch * MAX_PASS_PATCHES
    return int(shape.tower_bytes + working * scale)
