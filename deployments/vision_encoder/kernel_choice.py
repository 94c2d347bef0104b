"""Which kernels this device runs. Chosen once at start, said in the log, and selectable by option.

A fused kernel is taken only after it has agreed with plain torch on random data of the model's own shape; one that
cannot be built or disagrees is left out with a warning, and the plain path serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import Attention, SdpaMasked, SdpaSegments, Segments, Varlen
from deployments.vision_encoder.config import AttentionBackend
from deployments.vision_encoder.ops import Norm, Ops, PlainOps

logger = logging.getLogger(__name__)

_TOLERANCE = 0.02
"""Largest error, as a share of the largest value, that half precision explains."""


def choose_attention(
    wanted: AttentionBackend, shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[Attention, Attention]:
    """(attention over whole frames, attention inside windows).

    Raises:
        ValueError: The wanted backend does not run on this device or in this precision.
    """
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted in ("varlen", "triton_windows") and not half_on_cuda:
        raise ValueError(
            f"mm_encoder_attn_backend is {wanted!r}; it needs CUDA and half precision, here are {device.type} and"
            f" {dtype}; allowed: auto, sdpa_segments, sdpa_masked"
        )
    frames: Attention
    if wanted == "sdpa_masked":
        frames = SdpaMasked()
    elif wanted == "sdpa_segments" or not half_on_cuda:
        frames = SdpaSegments()
    else:
        frames = Varlen()
    windows: Attention = frames
    if shape.window_slots and half_on_cuda and wanted in ("auto", "triton_windows"):
        windows = _triton_windows(shape, dtype, device, required=wanted == "triton_windows") or frames
    logger.info("encoder attention: %s over frames, %s in windows", frames.name, windows.name)
    return frames, windows


def choose_ops(fused: bool, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> Ops:
    plain = PlainOps()
    if not fused or device.type != "cuda" or dtype is torch.float32:
        return plain
    try:
        from deployments.vision_encoder.triton_ops import TritonOps

        ops = TritonOps()
        _check_ops(ops, plain, shape, dtype, device)
    except Exception as exc:  # a missing compiler, an unknown GPU, a disagreement: plain torch always works
        logger.warning("encoder kernels: plain torch, since the fused ones failed: %s: %s", type(exc).__name__, exc)
        return plain
    logger.info("encoder kernels: %s", ops.name)
    return ops


def _triton_windows(shape: TowerShape, dtype: torch.dtype, device: torch.device, *, required: bool) -> Attention | None:
    try:
        from deployments.vision_encoder.triton_ops import TritonWindows

        windows = TritonWindows()
        _check_windows(windows, shape, dtype, device)
    except Exception as exc:  # as above
        if required:
            raise ValueError(f"mm_encoder_attn_backend 'triton_windows' does not work here: {exc}") from exc
        logger.warning("encoder windows: no fused kernel: %s: %s", type(exc).__name__, exc)
        return None
    return windows


def _check_windows(windows: Attention, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    longest = shape.window_slots**2 * shape.unit
    lengths = torch.tensor([longest, shape.unit, longest - shape.unit, longest, 3 * shape.unit, 0])
    borders = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(device, torch.int32)
    rows = int(lengths.sum())
    size = (rows, shape.heads, shape.width // shape.heads)
    q, k, v = (_noise(size, dtype, device, seed) for seed in range(3))
    segments = Segments(borders, longest)
    scale = size[-1] ** -0.5
    plain = SdpaSegments()
    _compare(
        "window attention",
        windows.attend(q, k, v, windows.plan(segments, rows), scale),
        plain.attend(q, k, v, plain.plan(segments, rows), scale),
    )


def _check_ops(ops: Ops, plain: Ops, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    rows, half = 37, shape.width // shape.heads // 2
    x, delta = _noise((rows, shape.width), dtype, device, 0), _noise((rows, shape.width), dtype, device, 1)
    weight = 1 + _noise((shape.width,), dtype, device, 2)
    norm = Norm(weight, None if shape.rms_norm else _noise((shape.width,), dtype, device, 3))
    angles = _noise((rows, half), torch.float32, device, 4) * 10
    qkv = _noise((rows, 3 * shape.width), dtype, device, 5)
    calls: list[tuple[str, Callable[[Ops], tuple[torch.Tensor, ...]]]] = [
        ("norm", lambda o: (o.norm(x, norm),)),
        ("add_norm", lambda o: o.add_norm(x, delta, norm)),
        ("rotary", lambda o: o.rotary(qkv, angles.cos(), angles.sin(), shape.heads)),
        ("gated_silu", lambda o: (o.gated_silu(qkv[:, : 2 * shape.width].contiguous()),)),
    ]
    for name, call in calls:
        for ours, expected in zip(call(ops), call(plain), strict=True):
            _compare(name, ours, expected)


def _noise(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _compare(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    error = (ours.float() - expected.float()).abs().max() / expected.float().abs().max()
    if not bool(error <= _TOLERANCE):
        raise RuntimeError(f"{name} differs from plain torch by {float(error):.3g} of the largest value")
