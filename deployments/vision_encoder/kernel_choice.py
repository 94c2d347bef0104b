"""Which kernels this device runs. Chosen once at start, said in the log, and selectable by option.

A fused kernel is taken only after it has agreed with plain torch on random data of the model's own shape; one that
cannot be built or disagrees is left out with a warning, and the plain path serves. Of several that agree, the fastest
is taken for each size of pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import (
    Attention,
    BySize,
    CudnnVarlen,
    Rotated,
    SdpaMasked,
    SdpaSegments,
    Segments,
    StackedAttention,
    Varlen,
)
from deployments.vision_encoder.config import AttentionBackend
from deployments.vision_encoder.ops import Norm, Ops, PlainOps

logger = logging.getLogger(__name__)

_TOLERANCE = 0.02
"""Largest error, as a share of the largest value, that half precision explains."""
FRAME_SIZES = {256: 512, 1_024: 2_048, 4_096: 8_192, 16_384: 16_384}
"""Rows at which attention over frames is timed, and up to how many the fastest is taken; the last is for all above."""
_USUAL_FRAME = 576
"""Patches of a 336 x 336 picture: what passes of several pictures are timed with."""
_HALF_ON_CUDA = ("varlen", "cudnn", "triton_frames", "triton_windows")


def choose_attention(
    wanted: AttentionBackend, shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[Attention, Attention | StackedAttention]:
    """(attention over whole frames, attention inside windows).

    Raises:
        ValueError: The wanted backend does not run on this device or in this precision.
    """
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted in _HALF_ON_CUDA and not half_on_cuda:
        raise ValueError(
            f"mm_encoder_attn_backend is {wanted!r}; it needs CUDA and half precision, here are {device.type} and"
            f" {dtype}; allowed: auto, sdpa_segments, sdpa_masked"
        )
    frames: Attention
    if wanted == "sdpa_masked":
        frames = SdpaMasked()
    elif wanted == "sdpa_segments" or not half_on_cuda:
        frames = SdpaSegments()
    elif wanted in ("varlen", "triton_windows"):
        frames = Varlen()
    else:
        frames = _choose_frames(wanted, shape, dtype, device)
    windows: Attention | StackedAttention = frames
    if shape.window_slots and half_on_cuda and wanted in ("auto", "cudnn", "triton_frames", "triton_windows"):
        windows = _triton_windows(shape, dtype, device, required=wanted == "triton_windows") or frames
    logger.info("encoder attention: %s over frames, %s in windows", frames.name, windows.name)
    return frames, windows


def frame_candidates() -> dict[str, Callable[[], Attention]]:
    """Makers of all attentions over frames that half precision on CUDA has, by name."""

    def triton(block_rows: int, block_keys: int, num_warps: int, num_stages: int) -> Callable[[], Attention]:
        def make() -> Attention:
            from deployments.vision_encoder.triton_attention import TritonFrames

            return TritonFrames(block_rows, block_keys, num_warps, num_stages)

        return make

    # Without spills for heads of 80 on CUDA capability 9.0; large blocks for long frames, small ones for short passes.
    return {
        "varlen": Varlen,
        "cudnn": CudnnVarlen,
        "triton_frames_128x64": triton(128, 64, 8, 3),
        "triton_frames_128x128": triton(128, 128, 8, 2),
        "triton_frames_64x64": triton(64, 64, 4, 3),
    }


def usable_frames(
    wanted: str, shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[list[Attention], list[str]]:
    """Candidates whose name begins with `wanted` and that agree with plain torch, and what was wrong with others."""
    usable: list[Attention] = []
    problems = []
    for name, make in frame_candidates().items():
        if not name.startswith(wanted):
            continue
        try:
            candidate = make()
            check_frames(candidate, shape, dtype, device)
        except Exception as exc:  # a missing compiler, an unknown GPU, a library that refuses, a disagreement
            problems.append(f"{name}: {type(exc).__name__}: {exc}")
        else:
            usable.append(candidate)
    return usable, problems


def _choose_frames(wanted: AttentionBackend, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> Attention:
    usable, problems = usable_frames("" if wanted == "auto" else wanted, shape, dtype, device)
    if problems:
        logger.warning("encoder attention: left out: %s", "; ".join(problems))
    if not usable:
        raise ValueError(f"mm_encoder_attn_backend {wanted!r} does not work here: {'; '.join(problems)}")
    times = {rows: [_time_or_never(c, shape, rows, dtype, device) for c in usable] for rows in FRAME_SIZES}
    for rows, seconds in times.items():
        found = ", ".join(f"{c.name} {s * 1e6:.0f}" for c, s in zip(usable, seconds, strict=True))
        logger.info("encoder attention over %d rows, microseconds: %s", rows, found)
    return fastest_by_size(usable, times, FRAME_SIZES)


def _time_or_never(
    attention: Attention, shape: TowerShape, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    try:
        return time_frames(attention, shape, rows, dtype, device)
    except Exception as exc:  # a library may refuse one size that it has no kernel for
        logger.warning("encoder attention: %s refuses %d rows: %s", attention.name, rows, exc)
        return float("inf")


def fastest_by_size(
    candidates: Sequence[Attention], seconds: Mapping[int, Sequence[float]], sizes: Mapping[int, int]
) -> Attention:
    """The candidate with the least time at each size.

    Args:
        seconds: By size, one for each candidate.
        sizes: Most rows that each size speaks for, ascending; the last speaks for all above.
    """
    levels: list[tuple[int, Attention]] = []
    for size, most in sizes.items():
        times = seconds[size]
        levels.append((most, candidates[min(range(len(times)), key=times.__getitem__)]))
    if len({id(attention) for _, attention in levels}) == 1:
        return levels[0][1]
    return BySize(levels)


@torch.inference_mode()
def time_frames(
    attention: Attention, shape: TowerShape, rows: int, dtype: torch.dtype, device: torch.device, repeats: int = 9
) -> float:
    """Median device seconds of one layer over `rows`: as one frame, and as frames of a usual picture's size, averaged.

    Borders have the room that a captured graph's have.
    """
    q, k, v = _frame_inputs(rows, shape, dtype, device)
    seconds = []
    for frame in (rows, min(rows, _USUAL_FRAME)):
        borders = torch.arange(0, rows + frame, frame, dtype=torch.int32).clamp_(max=rows)
        room = max(2, rows // shape.unit // 64) + 1 - len(borders)
        borders = torch.cat((borders, borders[-1:].expand(max(0, room)))).to(device)
        plan = attention.plan(Segments(borders, rows), rows)
        samples = []
        for turn in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The host is ahead of the device, so that launching is not what is timed.
            torch.cuda._sleep(200_000)
            begin.record()
            attention.attend(q, k, v, plan, q.shape[-1] ** -0.5)
            end.record()
            end.synchronize()
            if turn >= 2:
                samples.append(begin.elapsed_time(end) / 1e3)
        seconds.append(median(samples))
    return sum(seconds) / len(seconds)


def choose_ops(fused: bool, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> Ops:
    plain = PlainOps()
    if not fused or device.type != "cuda" or dtype is torch.float32:
        return plain
    try:
        from deployments.vision_encoder.triton_ops import TritonOps

        ops = TritonOps()
        check_ops(ops, plain, shape, dtype, device)
    except Exception as exc:  # a missing compiler, an unknown GPU, a disagreement: plain torch always works
        logger.warning("encoder kernels: plain torch, since the fused ones failed: %s: %s", type(exc).__name__, exc)
        return plain
    logger.info("encoder kernels: %s", ops.name)
    return ops


def _triton_windows(
    shape: TowerShape, dtype: torch.dtype, device: torch.device, *, required: bool
) -> StackedAttention | None:
    try:
        from deployments.vision_encoder.triton_attention import TritonWindows

        windows = TritonWindows()
        check_windows(windows, shape, dtype, device)
    except Exception as exc:  # as above
        if required:
            raise ValueError(f"mm_encoder_attn_backend 'triton_windows' does not work here: {exc}") from exc
        logger.warning("encoder windows: no fused kernel: %s: %s", type(exc).__name__, exc)
        return None
    return windows


def check_windows(windows: StackedAttention, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless it agrees with plain torch on windows of several lengths, an empty one among them."""
    longest = shape.window_slots**2 * shape.unit
    segments = _segments([longest, shape.unit, longest - shape.unit, longest, 3 * shape.unit, 0], device)
    rows, half = int(segments.borders[-1]), shape.width // shape.heads // 2
    qkv = _noise((rows, 3 * shape.width), dtype, device, 0)
    angles = _noise((rows, half), torch.float32, device, 1) * 10
    cos, sin, scale = angles.cos(), angles.sin(), (2 * half) ** -0.5
    plain = Rotated(PlainOps(), SdpaSegments())
    ours, expected = (
        each.attend_stacked(qkv, cos, sin, shape.heads, each.plan(segments, rows), scale) for each in (windows, plain)
    )
    _compare("window attention", ours, expected)


def check_frames(frames: Attention, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless it agrees with plain torch on frames of many lengths, with rows of nobody behind."""
    segments = _segments([300, shape.unit, 64, 0, 517, 128, 3 * shape.unit, 0, 0], device)
    used = int(segments.borders[-1])
    rows = used + 70
    q, k, v = _frame_inputs(rows, shape, dtype, device)
    scale, plain = q.shape[-1] ** -0.5, SdpaSegments()
    ours, expected = (each.attend(q, k, v, each.plan(segments, rows), scale)[:used] for each in (frames, plain))
    _compare("frame attention", ours, expected)


def _segments(lengths: Sequence[int], device: torch.device) -> Segments:
    borders = torch.tensor([0, *lengths]).cumsum(0)
    return Segments(borders.to(device, torch.int32), max(lengths))


def _frame_inputs(
    rows: int, shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as `Ops.rotary` gives them: v is a view of the qkv product."""
    qkv = _noise((rows, 3, shape.heads, shape.width // shape.heads), dtype, device, rows)
    return qkv[:, 0].contiguous(), qkv[:, 1].contiguous(), qkv[:, 2]


def check_ops(ops: Ops, plain: Ops, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    rows, half = 37, shape.width // shape.heads // 2
    x, delta = _noise((rows, shape.width), dtype, device, 0), _noise((rows, shape.width), dtype, device, 1)
    weight = 1 + _noise((shape.width,), dtype, device, 2)
    norm = Norm(weight, None if shape.rms_norm else _noise((shape.width,), dtype, device, 3))
    angles = _noise((rows, half), torch.float32, device, 4) * 10
    qkv = _noise((rows, 3 * shape.width), dtype, device, 5)
    pixels = torch.arange(12 * shape.unit * shape.image_row, device=device).view(-1, shape.image_row) % 251
    pixels = pixels.to(torch.uint8)
    order = torch.arange(11, -1, -1, dtype=torch.int32, device=device)
    width = -(-shape.image_row // 64) * 64
    calls: list[tuple[str, Callable[[Ops], tuple[torch.Tensor, ...]]]] = [
        ("unpack", lambda o: (o.unpack(pixels, None, shape.unit, width, dtype),)),
        ("unpack in order", lambda o: (o.unpack(pixels, order, shape.unit, width, dtype),)),
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
