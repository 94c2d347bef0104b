"""Kernels of the vision encoder one against another, and what a profile says: parts of bench_encoder.py."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import Rotated, Segments, Varlen
from deployments.vision_encoder.kernel_choice import choose_ops, time_frames, usable_frames, usable_windows
from deployments.vision_encoder.ops import Norm, Ops

Case = tuple[str, Any]

FRAME_ROWS = (256, 576, 2_304, 5_476, 11_520)
"""Patches of 1 x 224^2, 1 x 336^2, 4 x 336^2 or 1 x 672^2, 1 x 1036^2, 20 x 336^2."""
PRODUCT_ROWS = (256, 2_304, 5_476, 5_632)

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|sdpa|_frame_kernel|_window_kernel"),
    ("matrix products", r"nvjet|gemm|cutlass|cublas|_scaled_mm"),
    ("copies and memsets", r"memcpy|memset"),
    ("norms, rotation, gates", r"_norm_kernel|_rotary_kernel|_gate_kernel|_unpack_kernel|fp8|quantize"),
)
"""Kinds of kernels by what their names hold; the first that matches."""
ADVICE = {
    "attention": "a faster attention kernel, or fewer columns of padding in its heads",
    "matrix products": "fewer bits (quantization: fp8), or products that fit the tiles better",
    "copies and memsets": "fewer, larger copies",
    "norms, rotation, gates": "fusing these into the products around them",
    "others": "looking at the list",
    "gaps between kernels": "fewer kernels: fuse small ones",
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "others")


def summarise(events: Sequence[tuple[str, int, float]], wall_ms: float | None = None, top: int = 12) -> dict[str, Any]:
    """Top kernels, time by kind, and the kind with the most time that is left.

    Args:
        events: (kernel, calls, milliseconds on the device).
        wall_ms: Device time of the whole pass, gaps included.
    """
    total = sum(ms for _, _, ms in events)
    by_kind: dict[str, float] = defaultdict(float)
    for kernel, _, ms in events:
        by_kind[kind_of(kernel)] += ms
    if wall_ms is not None:
        by_kind["gaps between kernels"] = max(0.0, wall_ms - total)
    most = max(by_kind, key=by_kind.__getitem__, default="others")
    return {
        "device_ms": round(total, 3),
        "replay_ms": None if wall_ms is None else round(wall_ms, 3),
        "kernels": sum(calls for _, calls, _ in events),
        "by_kind_ms": {kind: round(ms, 3) for kind, ms in sorted(by_kind.items(), key=lambda pair: -pair[1])},
        "bottleneck": f"{most}: {ADVICE[most]}",
        "top": [
            {"kernel": kernel[:90], "calls": calls, "ms": round(ms, 3), "share": round(ms / total, 3) if total else 0.0}
            for kernel, calls, ms in sorted(events, key=lambda event: -event[2])[:top]
        ],
    }


def device_us(call: Callable[[], object], repeats: int = 9) -> float:
    """Median device time of a call in microseconds, launching not included."""
    samples = []
    for turn in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 2:
            samples.append(begin.elapsed_time(end) * 1e3)
    return round(median(samples), 1)


def compare_frames(shape: TowerShape, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Microseconds of one layer over whole frames (see kernel_choice.time_frames), every attention that there is."""
    usable, problems = usable_frames("", shape, dtype, device)
    yield "left_out", problems
    for rows in FRAME_ROWS:
        yield (
            f"frames_{rows}_rows",
            {each.name: round(time_frames(each, shape, rows, dtype, device) * 1e6, 1) for each in usable},
        )


@torch.inference_mode()
def compare_windows(shape: TowerShape, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Microseconds of one layer inside windows, rotation included, with the borders of an eager pass."""
    ops = choose_ops(True, shape, dtype, device)
    usable, problems = usable_windows(shape, dtype, device)
    yield "windows_left_out", problems
    length = shape.window_slots**2 * shape.unit
    for rows in FRAME_ROWS:
        qkv = torch.randn(rows, 3 * shape.width, device=device).to(dtype)
        angles = torch.randn(rows, shape.width // shape.heads // 2, device=device)
        cos, sin, scale = angles.cos(), angles.sin(), 0.1
        borders = torch.arange(0, rows + length, length, dtype=torch.int32).clamp_(max=rows).to(device)
        segments = Segments(borders, length)
        times = {}
        for windows in (*usable, Rotated(ops, Varlen())):
            plan = windows.plan(segments, rows)
            name = "rotary+varlen" if isinstance(windows, Rotated) else windows.name
            times[name] = device_us(partial(windows.attend_stacked, qkv, cos, sin, shape.heads, plan, scale))
        yield f"windows_{rows}_rows", times


@torch.inference_mode()
def compare_products(shape: TowerShape, mlp_width: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Microseconds of a block's products, and of two ways to add the residual: in the norm after a product, as the
    tower does, or in the product's own epilogue."""
    ops, width = choose_ops(True, shape, dtype, device), shape.width
    sizes = {
        "qkv": (width, 3 * width),
        "proj": (width, width),
        "mlp_in": (width, 2 * mlp_width if shape.gated else mlp_width),
        "mlp_out": (mlp_width, width),
    }
    norm = Norm(torch.ones(width, dtype=dtype, device=device), None)
    for rows in PRODUCT_ROWS:
        times: dict[str, float] = {}
        for name, (inner, outer) in sizes.items():
            x = torch.randn(rows, inner, device=device).to(dtype)
            weight = (torch.randn(outer, inner, device=device) / inner**0.5).to(dtype)
            bias = torch.zeros(outer, dtype=dtype, device=device)
            times[name] = device_us(partial(F.linear, x, weight, bias))
            if outer == width:
                total = torch.randn(rows, width, device=device).to(dtype)
                after = partial(_added_after, ops, total, x, weight, bias, norm)
                inside = partial(_added_inside, ops, total, x, weight, norm)
                times[f"{name}, then add and norm"] = device_us(after)
                times[f"{name} added inside, then norm"] = device_us(inside)
        yield f"products_{rows}_rows", times


def _added_after(
    ops: Ops, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, norm: Norm
) -> None:
    ops.add_norm(total, F.linear(x, weight, bias), norm)


def _added_inside(ops: Ops, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> None:
    # Half of the old sum, so that it does not grow from call to call.
    ops.norm(total.addmm_(x, weight.t(), beta=0.5), norm)
