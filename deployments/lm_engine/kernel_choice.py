"""Which kernels this device runs. Chosen once at start, said in the log, and selectable by option.

A kernel is taken only after it has agreed with plain torch on random data of the model's own head shape; one that
cannot be built or disagrees is left out with a warning, and the plain path serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from deployments.lm_engine.attention import AttentionBackend, HeadNorms, Rotary, SdpaBackend
from deployments.lm_engine.config import AttentionBackend as Wanted
from deployments.lm_engine.fused_layers import PlainRowOps, RowOps
from deployments.lm_engine.kv_tensors import KVLayout, KVTensors
from deployments.lm_engine.plan import SequenceChunk

logger = logging.getLogger(__name__)

MakeBackend = Callable[[KVTensors], AttentionBackend]

_TOLERANCE = 0.02
"""Largest error, as a share of the largest value, that half precision explains."""


def choose_attention(wanted: Wanted, layout: KVLayout, num_heads: int, device: torch.device) -> MakeBackend:
    """What makes the attention backend of a KV pool.

    Raises:
        ValueError: The wanted backend does not run on this device.
    """
    if wanted == "triton" and device.type != "cuda":
        raise ValueError(f"attention_backend is 'triton', which needs a CUDA device; the device is {device.type}")
    chosen: MakeBackend = SdpaBackend
    if device.type == "cuda" and wanted != "sdpa":
        try:
            from deployments.lm_engine.triton_attention import TritonBackend

            check_attention(TritonBackend, layout, num_heads, device)
            chosen = TritonBackend
        except Exception as exc:  # a missing compiler, an unknown GPU, a disagreement: plain torch always works
            if wanted == "triton":
                raise ValueError(f"attention_backend 'triton' does not work here: {exc}") from exc
            logger.warning("LM attention: sdpa, since triton failed: %s: %s", type(exc).__name__, exc)
    logger.info("LM attention: %s", chosen.name)  # type: ignore[attr-defined]
    return chosen


def choose_row_ops(hidden_size: int, dtype: torch.dtype, device: torch.device) -> RowOps | None:
    """Operations of fused layers, or None where the library's own layers serve: on CPUs."""
    if device.type != "cuda":
        return None
    ops: RowOps = PlainRowOps()
    try:
        from deployments.lm_engine.kernels.row_ops import TritonRowOps

        triton_ops = TritonRowOps()
        check_row_ops(triton_ops, hidden_size, dtype, device)
        ops = triton_ops
    except Exception as exc:  # as above
        logger.warning("LM row kernels: plain torch, since triton failed: %s: %s", type(exc).__name__, exc)
    logger.info("LM row kernels: %s", ops.name)
    return ops


@torch.inference_mode()
def check_attention(make: MakeBackend, layout: KVLayout, num_heads: int, device: torch.device) -> None:
    """Raise RuntimeError unless a backend agrees with SDPA over a prefill, a cached prefill and decoding."""
    small = KVLayout(
        num_layers=1,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )
    lengths = (150, 37)
    blocks = [-(-length // layout.block_size) for length in lengths]
    tables = [list(range(blocks[0])), list(range(blocks[0], sum(blocks)))]
    width = (num_heads + 2 * layout.num_kv_heads) * layout.head_dim
    qkv = [_noise((length, width), layout.dtype, device, seed) for seed, length in enumerate(lengths)]
    q_norm, k_norm = (1 + 0.1 * _noise((layout.head_dim,), layout.dtype, device, seed) for seed in (2, 3))
    norms = HeadNorms(q_norm, k_norm, 1e-6)
    angles = _noise((max(lengths), layout.head_dim // 2), torch.float32, device, 4).repeat(1, 2) * 3
    rotary = Rotary(angles.cos().to(layout.dtype), angles.sin().to(layout.dtype))
    backends = [maker(KVTensors(small, sum(blocks), device)) for maker in (make, SdpaBackend)]
    for spans in (((0, 100), (0, 20)), ((100, 149), (20, 36)), ((149, 150), (36, 37))):
        rows = torch.cat([tensor[a:b] for tensor, (a, b) in zip(qkv, spans, strict=True)])
        turns = Rotary(*(torch.cat([table[a:b] for a, b in spans]) for table in (rotary.cos, rotary.sin)))
        chunks = [_chunk(a, b, table) for (a, b), table in zip(spans, tables, strict=True)]
        ours, expected = (
            backend.prepare(chunks).attend_qkv(
                0, rows.clone(), turns, num_heads=num_heads, norms=norms, scale=layout.head_dim**-0.5,
                sliding_window=None,
            )
            for backend in backends
        )  # fmt: skip
        _compare(f"attention of spans {spans}", ours, expected)


@torch.inference_mode()
def check_row_ops(ops: RowOps, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless the operations agree with plain torch."""
    plain = PlainRowOps()
    x, delta, gate_up = (
        _noise((37, size), dtype, device, seed) for seed, size in enumerate((hidden_size, hidden_size, 1536), start=2)
    )
    weight = 1 + 0.1 * _noise((hidden_size,), dtype, device, 1)
    pairs: Sequence[tuple[str, Callable[[RowOps], torch.Tensor]]] = (
        ("norm", lambda o: o.norm(x, weight, 1e-6)),
        ("add", lambda o: o.add_norm(x, delta, weight, 1e-6)[0]),
        ("add_norm", lambda o: o.add_norm(x, delta, weight, 1e-6)[1]),
        ("gated_silu", lambda o: o.gated_silu(gate_up)),
    )
    for name, call in pairs:
        _compare(name, call(ops), call(plain))


def _chunk(start: int, stop: int, table: list[int]) -> SequenceChunk:
    positions = np.arange(start, stop, dtype=np.int32)[None]
    return SequenceChunk("check", start, (0,) * (stop - start), positions, table, True)


def _noise(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _compare(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    error = (ours.float() - expected.float()).abs().max() / expected.float().abs().max()
    if not bool(error <= _TOLERANCE):
        raise RuntimeError(f"{name} differs from plain torch by {float(error):.3g} of the largest value")
