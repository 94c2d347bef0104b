"""Which kernels this device runs. Chosen once at start, said in the log, and selectable by option.

A fused kernel is taken only after it has agreed with plain torch on random data of the model's own shape; one that
cannot be built or disagrees is left out with a warning, and the plain path serves. Of several that agree, the fastest
is taken for each size of pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import torch

from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import (
    Attention,
    BySize,
    SdpaMasked,
    SdpaSegments,
    Segments,
    StackedAttention,
    StackedBySize,
    Varlen,
)
from deployments.vision_encoder.config import AttentionBackend
from deployments.vision_encoder.kernel_check import check_frames, check_ops, check_windows, split_qkv
from deployments.vision_encoder.ops import Ops, PlainOps

logger = logging.getLogger(__name__)

FRAME_SIZES = {256: 512, 1_024: 2_048, 4_096: 8_192, 16_384: 16_384}
"""Rows at which attention over frames is timed, and up to how many the fastest is taken; the last is for all above."""
_USUAL_FRAME = 576
"""Patches of a 336 x 336 picture: what passes of several pictures are timed with."""
_HALF_ON_CUDA = ("varlen", "triton_frames", "triton_windows")

_T = TypeVar("_T")


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
    if shape.window_slots and half_on_cuda and wanted in ("auto", "triton_frames", "triton_windows"):
        windows = _choose_windows(shape, dtype, device, required=wanted == "triton_windows") or frames
    logger.info("encoder attention: %s over frames, %s in windows", frames.name, windows.name)
    return frames, windows


Makers = Mapping[str, Callable[[], _T]]


def frame_candidates() -> tuple[Makers[Attention], ...]:
    """Makers, by name, of all attentions over frames that half precision on CUDA has, best first: of a later group one
    is looked at only if no Triton kernel of an earlier one is right."""

    def triton(
        block_rows: int, block_keys: int, num_warps: int, num_stages: int, split: bool = True
    ) -> Callable[[], Attention]:
        def make() -> Attention:
            from deployments.vision_encoder.triton_attention import TritonFrames

            return TritonFrames(block_rows, block_keys, num_warps, num_stages, split)

        return make

    # Without spills for heads of 80 on CUDA capability 9.0; large blocks for long frames, small ones for short passes.
    return (
        {
            "varlen": Varlen,
            "triton_frames_128x64": triton(128, 64, 8, 3),
            "triton_frames_128x128": triton(128, 128, 8, 2),
            "triton_frames_64x64": triton(64, 64, 4, 3),
        },
        {
            "triton_frames_128x64_whole": triton(128, 64, 8, 3, split=False),
            "triton_frames_64x64_whole": triton(64, 64, 4, 3, split=False),
        },
    )


def window_candidates() -> tuple[Makers[StackedAttention], ...]:
    """As `frame_candidates`, inside windows."""

    def triton(by_halves: bool, num_warps: int) -> Callable[[], StackedAttention]:
        def make() -> StackedAttention:
            from deployments.vision_encoder.triton_attention import TritonWindows

            return TritonWindows(by_halves, num_warps)

        return make

    return (
        {
            "triton_windows_halves_4": triton(True, 4),
            "triton_windows_halves_8": triton(True, 8),
            "triton_windows_whole_8": triton(False, 8),
        },
    )


def usable_frames(
    wanted: str, shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[list[Attention], list[str]]:
    """Candidates whose name begins with `wanted` and that are right, and what was wrong with others."""
    return _usable(wanted, frame_candidates(), lambda frames: check_frames(frames, shape, dtype, device))


def usable_windows(
    shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[list[StackedAttention], list[str]]:
    """As `usable_frames`."""
    return _usable("", window_candidates(), lambda windows: check_windows(windows, shape, dtype, device))


def _usable(wanted: str, groups: Iterable[Makers[_T]], check: Callable[[_T], None]) -> tuple[list[_T], list[str]]:
    usable: dict[str, _T] = {}
    problems = []
    for group in groups:
        for name, make in group.items():
            if not name.startswith(wanted):
                continue
            try:
                candidate = make()
                check(candidate)
            except Exception as exc:  # a missing compiler, an unknown GPU, a library that refuses, a disagreement
                problems.append(f"{name}: {type(exc).__name__}: {exc}")
            else:
                usable[name] = candidate
        if any(name.startswith("triton") for name in usable):
            break
    return list(usable.values()), problems


def _choose_frames(wanted: AttentionBackend, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> Attention:
    usable, problems = usable_frames("" if wanted == "auto" else wanted, shape, dtype, device)
    if problems:
        logger.warning("encoder attention: left out: %s", "; ".join(problems))
    if not usable:
        if wanted != "auto":
            raise ValueError(f"mm_encoder_attn_backend {wanted!r} does not work here: {'; '.join(problems)}")
        logger.warning("encoder attention: no kernel for packed rows works here; passes cannot be captured")
        return SdpaSegments()
    times = _times(usable, lambda each, rows: time_frames(each, shape, rows, dtype, device))
    return fastest_by_size(usable, times, FRAME_SIZES)


def _choose_windows(
    shape: TowerShape, dtype: torch.dtype, device: torch.device, *, required: bool
) -> StackedAttention | None:
    usable, problems = usable_windows(shape, dtype, device)
    if problems:
        logger.warning("encoder windows: left out: %s", "; ".join(problems))
    if not usable:
        if required:
            raise ValueError(f"mm_encoder_attn_backend 'triton_windows' does not work here: {'; '.join(problems)}")
        return None
    times = _times(usable, lambda each, rows: time_windows(each, shape, rows, dtype, device))
    return fastest_windows_by_size(usable, times, FRAME_SIZES)


def _times(candidates: Sequence[_T], measure: Callable[[_T, int], float]) -> dict[int, list[float]]:
    """Seconds of each candidate by size; infinity for one that refuses a size."""
    times: dict[int, list[float]] = {}
    for rows in FRAME_SIZES:
        times[rows] = []
        for candidate in candidates:
            name = getattr(candidate, "name", "")
            try:
                seconds = measure(candidate, rows)
            except Exception as exc:  # a library may have no kernel for one size
                logger.warning("encoder attention: %s refuses %d rows: %s", name, rows, exc)
                seconds = float("inf")
            times[rows].append(seconds)
            logger.info("encoder attention over %d rows: %s takes %.0f us", rows, name, seconds * 1e6)
    return times


def fastest_by_size(
    candidates: Sequence[Attention], seconds: Mapping[int, Sequence[float]], sizes: Mapping[int, int]
) -> Attention:
    """The candidate with the least time at each size.

    Args:
        seconds: By size, one for each candidate.
        sizes: Most rows that each size speaks for, ascending; the last speaks for all above.
    """
    levels = _fastest(candidates, seconds, sizes)
    return levels[0][1] if len(levels) == 1 else BySize(levels)


def fastest_windows_by_size(
    candidates: Sequence[StackedAttention], seconds: Mapping[int, Sequence[float]], sizes: Mapping[int, int]
) -> StackedAttention:
    """As `fastest_by_size`."""
    levels = _fastest(candidates, seconds, sizes)
    return levels[0][1] if len(levels) == 1 else StackedBySize(levels)


def _fastest(
    candidates: Sequence[_T], seconds: Mapping[int, Sequence[float]], sizes: Mapping[int, int]
) -> list[tuple[int, _T]]:
    """(most rows, candidate), ascending, without neighbours that are the same."""
    levels: list[tuple[int, _T]] = []
    for size, most in sizes.items():
        times = seconds[size]
        best = candidates[min(range(len(times)), key=times.__getitem__)]
        if levels and levels[-1][1] is best:
            levels.pop()
        levels.append((most, best))
    return levels


@torch.inference_mode()
def time_frames(
    attention: Attention, shape: TowerShape, rows: int, dtype: torch.dtype, device: torch.device, repeats: int = 9
) -> float:
    """Median device seconds of one layer over `rows`: as one frame, and as frames of a usual picture's size, averaged.

    Borders have the room that a captured graph's have.
    """
    head_dim = shape.width // shape.heads
    q, k, v = split_qkv(torch.randn((rows, 3, shape.heads, head_dim), dtype=dtype, device=device))
    seconds = []
    for frame in (rows, min(rows, _USUAL_FRAME)):
        borders = torch.arange(0, rows + frame, frame, dtype=torch.int32).clamp_(max=rows)
        room = max(2, rows // shape.unit // 64) + 1 - len(borders)
        borders = torch.cat((borders, borders[-1:].expand(max(0, room)))).to(device)
        plan = attention.plan(Segments(borders, rows), rows)
        seconds.append(
            _device_seconds(lambda plan=plan: attention.attend(q, k, v, plan, q.shape[-1] ** -0.5), repeats)  # type: ignore[misc]
        )
    return sum(seconds) / len(seconds)


@torch.inference_mode()
def time_windows(
    windows: StackedAttention,
    shape: TowerShape,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 9,
) -> float:
    """Median device seconds of one layer over `rows` in full windows, with the borders' room of a captured graph."""
    qkv = torch.randn((rows, 3 * shape.width), dtype=dtype, device=device)
    angles = torch.randn((rows, shape.width // shape.heads // 2), device=device)
    cos, sin = angles.cos(), angles.sin()
    length = shape.window_slots**2 * shape.unit
    room = rows // shape.unit // 4 + 2
    borders = (torch.arange(max(room, -(-rows // length) + 1), dtype=torch.int32) * length).clamp_(max=rows).to(device)
    plan = windows.plan(Segments(borders, min(rows, length)), rows)
    return _device_seconds(lambda: windows.attend_stacked(qkv, cos, sin, shape.heads, plan, 0.1), repeats)


def _device_seconds(call: Callable[[], object], repeats: int) -> float:
    samples = []
    for turn in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host is ahead of the device, so that launching is not what is timed.
        torch.cuda._sleep(200_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 2:
            samples.append(begin.elapsed_time(end) / 1e3)
    return median(samples)


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
