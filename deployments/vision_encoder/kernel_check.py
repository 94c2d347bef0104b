"""Whether a kernel agrees with plain torch on this device: random data of the model's own shape, hard cases among it.

Attention is compared with float64; rows that belong to nobody are NaN in what a kernel reads, and so is the memory that
it is given to write, since the allocator hands out what was freed last. A disagreement says where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import Attention, Segments, StackedAttention
from deployments.vision_encoder.ops import Norm, Ops, PlainOps

_CALLS = 3
"""Calls of a kernel that must give the same bits: what depends on luck has been seen to be right once."""
_TOLERANCE = 0.01
"""Largest error, as a share of the largest value, that half precision explains: weights and results are rounded to 8
bits each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one tensor is from another, [rows, columns] each."""

    largest: float
    """As a share of the largest expected value; NaN if any value is."""
    row: int
    column: int
    """Where the largest error is, or the first NaN."""
    not_finite: int
    """Values that are NaN or infinite."""
    wrong_rows: int
    """Rows with an error above the tolerance, or NaN."""
    wrong_columns: int

    @property
    def small(self) -> bool:
        return self.largest <= _TOLERANCE

    def __str__(self) -> str:
        return (
            f"by {self.largest:.3g} of the largest value, worst at row {self.row}, column {self.column}; wrong are"
            f" {self.wrong_rows} rows, {self.wrong_columns} columns; {self.not_finite} values are not finite"
        )


def difference(ours: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Over rows of any shape, flattened to [rows, columns]."""
    found, wanted = (x.reshape(x.shape[0], -1).double() for x in (ours, expected))
    error = (found - wanted).abs() / wanted.abs().max().clamp(min=1e-30)
    finite = torch.isfinite(found)
    order = torch.where(finite, error, torch.inf)
    worst = int(order.argmax())
    wrong = order > _TOLERANCE
    return Difference(
        largest=float(error.flatten()[worst]) if bool(finite.all()) else float("nan"),
        row=worst // error.shape[1],
        column=worst % error.shape[1],
        not_finite=int((~finite).sum()),
        wrong_rows=int(wrong.any(1).sum()),
        wrong_columns=int(wrong.any(0).sum()),
    )


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """float64 attention inside runs of rows. q, k, v: [rows, heads, head_dim]; rows behind the last run are NaN."""
    out = torch.full(q.shape, torch.nan, dtype=torch.float64, device=q.device)
    first = 0
    for length in lengths:
        qs, ks, vs = (x[first : first + length].double().transpose(0, 1) for x in (q, k, v))
        out[first : first + length] = ((qs @ ks.transpose(1, 2) * scale).softmax(-1) @ vs).transpose(0, 1)
        first += length
    return out


def check_windows(windows: StackedAttention, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless it agrees on windows of several lengths, an empty one among them."""
    longest = shape.window_slots**2 * shape.unit
    lengths = [longest, shape.unit, longest - shape.unit, longest, 1, 3 * shape.unit, 0]
    used, half = sum(lengths), shape.width // shape.heads // 2
    rows = used + 37
    qkv = noise((rows, 3 * shape.width), dtype, device, 0)
    angles = noise((rows, half), torch.float32, device, 1) * 10
    cos, sin, scale = angles.cos(), angles.sin(), (2 * half) ** -0.5
    expected = exact_attention(*PlainOps().rotary(qkv, cos, sin, shape.heads), lengths, scale)[:used]
    for poisoned in (qkv, cos, sin):
        poisoned[used:] = torch.nan
    segments = make_segments(lengths, device)
    plan = windows.plan(segments, rows)
    _compare_calls(
        "window attention",
        lambda: windows.attend_stacked(qkv, cos, sin, shape.heads, plan, scale),
        expected.reshape(used, -1),
    )


def check_frames(frames: Attention, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless it agrees on frames of many lengths, with rows of nobody behind."""
    lengths = [300, shape.unit, 64, 0, 1, 517, 128, 3 * shape.unit, 0, 0]
    used = sum(lengths)
    rows = used + 200
    q, k, v = frame_inputs(rows, shape, dtype, device)
    scale = q.shape[-1] ** -0.5
    expected = exact_attention(q, k, v, lengths, scale)[:used]
    for poisoned in (q, k, v):
        poisoned[used:] = torch.nan
    plan = frames.plan(make_segments(lengths, device), rows)
    _compare_calls("frame attention", lambda: frames.attend(q, k, v, plan, scale), expected)


def check_ops(ops: Ops, plain: Ops, shape: TowerShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless every operation agrees with the plain one."""
    rows, half = 37, shape.width // shape.heads // 2
    x, delta = noise((rows, shape.width), dtype, device, 0), noise((rows, shape.width), dtype, device, 1)
    weight = 1 + noise((shape.width,), dtype, device, 2)
    norm = Norm(weight, None if shape.rms_norm else noise((shape.width,), dtype, device, 3))
    angles = noise((rows, half), torch.float32, device, 4) * 10
    qkv = noise((rows, 3 * shape.width), dtype, device, 5)
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
        _poison_next(x)
        for ours, expected in zip(call(ops), call(plain), strict=True):
            _compare(name, ours, expected)


def make_segments(lengths: Sequence[int], device: torch.device) -> Segments:
    borders = torch.tensor([0, *lengths]).cumsum(0)
    return Segments(borders.to(device, torch.int32), max(lengths))


def frame_inputs(
    rows: int, shape: TowerShape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as `Ops.rotary` gives them: v is a view of the qkv product."""
    return split_qkv(noise((rows, 3, shape.heads, shape.width // shape.heads), dtype, device, rows))


def split_qkv(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, 3, heads, head_dim] as `frame_inputs` has it."""
    return qkv[:, 0].contiguous(), qkv[:, 1].contiguous(), qkv[:, 2]


def noise(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _poison_next(like: torch.Tensor) -> None:
    """Leave NaN where the allocator finds the memory of the next tensor of this size."""
    torch.full_like(like, torch.nan)


def _compare_calls(name: str, call: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """The first rows of each result are compared, as many as are expected."""
    used = len(expected)
    kept = None
    for _ in range(_CALLS):
        found = call()
        _compare(name, found[:used], expected)
        if kept is not None and not torch.equal(found[:used], kept):
            raise RuntimeError(f"{name} differs from call to call {difference(found[:used], kept.double())}")
        kept = found[:used].clone()
        found.fill_(torch.nan)  # what the allocator hands out next


def _compare(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    found = difference(ours, expected)
    if not found.small:
        raise RuntimeError(f"{name} differs from plain torch {found}")
