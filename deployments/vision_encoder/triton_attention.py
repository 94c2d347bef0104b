"""Triton attention over packed rows: short windows with the rotation inside, and frames of any length.

A window's rows fit one block, so its attention is two products and a softmax without a loop, read straight from the
rows of the qkv product. Frames are flash attention (Dao et al. 2022) with two changes:

    heads of 72 or 80   split in a wide and a narrow part (64 + 16), where a power of two would compute 128 columns
    blocks of rows      run over the packed rows instead of (segment, block) pairs, so that a captured graph launches
                        nothing for segments that are not there; a block that holds parts of several segments masks

Rows of no segment are neither read as keys nor waited for; what they hold reaches no other row, NaN included.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deployments.vision_encoder.attention import Segments

_LOG2_E = 1.4426950408889634


@triton.jit
def _rotated_scores(
    scores,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    at,
    live,
    head,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add what angles [FIRST, FIRST + BLOCK) give to q times k; each angle turns two columns, HALF apart."""
    place = FIRST + tl.arange(0, BLOCK)
    inside = live & (place < HALF)[None, :]
    cos = tl.load(cos_ptr + at * HALF + place[None, :], mask=inside, other=0.0)
    sin = tl.load(sin_ptr + at * HALF + place[None, :], mask=inside, other=0.0)
    source = qkv_ptr + at * (WIDTH * 3) + head * (HALF * 2) + place[None, :]
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    q_left, q_right = (left * cos - right * sin).to(KIND), (right * cos + left * sin).to(KIND)
    left = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + WIDTH + HALF, mask=inside, other=0.0).to(tl.float32)
    scores = tl.dot(q_left, tl.trans((left * cos - right * sin).to(KIND)), scores)
    return tl.dot(q_right, tl.trans((right * cos + left * sin).to(KIND)), scores)


@triton.jit
def _rotated(source, cos_ptr, sin_ptr, at, live, BLOCK: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    """Columns [0, BLOCK) of a head, rotated. Reads every column twice, as itself and as the other of its pair."""
    dim = tl.arange(0, BLOCK)[None, :]
    inside = live & (dim < HALF * 2)
    is_left = dim < HALF
    place = tl.where(is_left, dim, dim - HALF)
    cos = tl.load(cos_ptr + at * HALF + place, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + at * HALF + place, mask=inside, other=0.0)
    own = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
    pair = tl.load(source + tl.where(is_left, dim + HALF, dim - HALF), mask=inside, other=0.0).to(tl.float32)
    return (own * cos + tl.where(is_left, -pair, pair) * sin).to(KIND)


@triton.jit
def _window_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    borders_ptr,
    out_ptr,
    scale,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_WIDE: tl.constexpr,
    HALF_NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_HALVES: tl.constexpr,
):
    segment = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(borders_ptr + segment).to(tl.int64)
    length = (tl.load(borders_ptr + segment + 1) - first).to(tl.int32)
    if length > 0:
        width: tl.constexpr = HEADS * HALF * 2
        kind: tl.constexpr = out_ptr.dtype.element_ty
        row = tl.arange(0, ROWS)
        at = (first + row)[:, None]
        live = (row < length)[:, None]
        column = head * (HALF * 2)
        if BY_HALVES:
            scores = tl.zeros((ROWS, ROWS), tl.float32)
            scores = _rotated_scores(
                scores, qkv_ptr, cos_ptr, sin_ptr, at, live, head, 0, HALF_WIDE, HALF, width, kind
            )  # fmt: skip
            if HALF > HALF_WIDE:
                scores = _rotated_scores(
                    scores, qkv_ptr, cos_ptr, sin_ptr, at, live, head, HALF_WIDE, HALF_NARROW, HALF, width, kind
                )  # fmt: skip
        else:
            source = qkv_ptr + at * (width * 3) + column
            q = _rotated(source, cos_ptr, sin_ptr, at, live, BLOCK, HALF, kind)
            k = _rotated(source + width, cos_ptr, sin_ptr, at, live, BLOCK, HALF, kind)
            scores = tl.dot(q, tl.trans(k))
        scores = tl.where((row < length)[None, :], scores * scale, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 1)[:, None])
        inverse = 1.0 / tl.sum(weights, 1)[:, None]
        weights = weights.to(kind)
        source = qkv_ptr + at * (width * 3) + 2 * width + column
        # In one part: of a second, narrow one ptxas 12.8 takes the descriptor from a register that nothing sets.
        dim = tl.arange(0, BLOCK)[None, :]
        inside = live & (dim < HALF * 2)
        v = tl.load(source + dim, mask=inside, other=0.0)
        tl.store(out_ptr + at * width + column + dim, (tl.dot(weights, v) * inverse).to(kind), mask=inside)


@triton.jit
def _frame_step(
    start,
    last,
    low,
    high,
    q_wide,
    q_narrow,
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    scale,
    peak,
    total,
    wide,
    narrow,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold keys [start, start + BLOCK_N) into the running softmax; none at or behind `last` is read if MASKED."""
    key = start + tl.arange(0, BLOCK_N)
    dim_wide = tl.arange(0, WIDE)
    dim_narrow = WIDE + tl.arange(0, NARROW)
    at = key.to(tl.int64)[:, None]
    wide_inside = (dim_wide < HEAD_DIM)[None, :]
    narrow_inside = (dim_narrow < HEAD_DIM)[None, :]
    if MASKED:
        wide_inside = wide_inside & (key < last)[:, None]
        narrow_inside = narrow_inside & (key < last)[:, None]
    # Without a mask where there is nothing to mask: loads are then whole vectors that the compiler can pipeline.
    if MASKED or HEAD_DIM < WIDE:
        k_wide = tl.load(k_ptr + at * k_row + dim_wide[None, :], mask=wide_inside, other=0.0)
        v_wide = tl.load(v_ptr + at * v_row + dim_wide[None, :], mask=wide_inside, other=0.0)
    else:
        k_wide = tl.load(k_ptr + at * k_row + dim_wide[None, :])
        v_wide = tl.load(v_ptr + at * v_row + dim_wide[None, :])
    scores = tl.dot(q_wide, tl.trans(k_wide))
    if HEAD_DIM > WIDE:
        if MASKED or HEAD_DIM < WIDE + NARROW:
            k_narrow = tl.load(k_ptr + at * k_row + dim_narrow[None, :], mask=narrow_inside, other=0.0)
            v_narrow = tl.load(v_ptr + at * v_row + dim_narrow[None, :], mask=narrow_inside, other=0.0)
        else:
            k_narrow = tl.load(k_ptr + at * k_row + dim_narrow[None, :])
            v_narrow = tl.load(v_ptr + at * v_row + dim_narrow[None, :])
        scores = tl.dot(q_narrow, tl.trans(k_narrow), scores)
    if MASKED:
        mine = (key[None, :] >= low[:, None]) & (key[None, :] < tl.minimum(high, last)[:, None])
        # Not a large number: the product below is fused with the subtraction, so that what rounding takes off the peak
        # of a row without keys, some 1e22, would be its exponent.
        scores = tl.where(mine, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
    keep = tl.exp2(peak - new_peak)
    total = total * keep + tl.sum(weights, 1)
    weights = weights.to(v_wide.dtype)
    wide = tl.dot(weights, v_wide, wide * keep[:, None])
    if HEAD_DIM > WIDE:
        narrow = tl.dot(weights, v_narrow, narrow * keep[:, None])
    return new_peak, total, wide, narrow


@triton.jit(do_not_specialize=["rows"])
def _frame_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    low_ptr,
    high_ptr,
    out_ptr,
    q_row,
    k_row,
    v_row,
    out_row,
    rows,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows
    low = tl.load(low_ptr + row, mask=inside, other=0)
    high = tl.load(high_ptr + row, mask=inside, other=0)
    # Rows of no segment have an empty range: they ask for no keys.
    used = high > low
    first = tl.min(tl.where(used, low, rows))
    latest = tl.max(tl.where(used, low, 0))
    earliest = tl.min(tl.where(used, high, rows))
    last = tl.max(tl.where(used, high, 0))

    column = head * HEAD_DIM
    at = row.to(tl.int64)[:, None]
    dim_wide = tl.arange(0, WIDE)
    dim_narrow = WIDE + tl.arange(0, NARROW)
    wide_inside = inside[:, None] & (dim_wide < HEAD_DIM)[None, :]
    narrow_inside = inside[:, None] & (dim_narrow < HEAD_DIM)[None, :]
    q_wide = tl.load(q_ptr + at * q_row + column + dim_wide[None, :], mask=wide_inside, other=0.0)
    q_narrow = tl.load(q_ptr + at * q_row + column + dim_narrow[None, :], mask=narrow_inside, other=0.0)

    # Finite, so that a row that has met no key yet stays free of inf - inf.
    peak = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    wide = tl.zeros((BLOCK_M, WIDE), tl.float32)
    narrow = tl.zeros((BLOCK_M, NARROW), tl.float32)
    # Keys that every row of the block sees, in whole blocks; before and behind them with masks.
    shared_end = tl.minimum(latest + tl.maximum(earliest - latest, 0) // BLOCK_N * BLOCK_N, last)
    for start in tl.range(first, latest, BLOCK_N):
        peak, total, wide, narrow = _frame_step(
            start, latest, low, high, q_wide, q_narrow, k_ptr + column, v_ptr + column, k_row, v_row, scale,
            peak, total, wide, narrow, True, HEAD_DIM, WIDE, NARROW, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(latest, shared_end, BLOCK_N):
        peak, total, wide, narrow = _frame_step(
            start, last, low, high, q_wide, q_narrow, k_ptr + column, v_ptr + column, k_row, v_row, scale,
            peak, total, wide, narrow, False, HEAD_DIM, WIDE, NARROW, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(shared_end, last, BLOCK_N):
        peak, total, wide, narrow = _frame_step(
            start, last, low, high, q_wide, q_narrow, k_ptr + column, v_ptr + column, k_row, v_row, scale,
            peak, total, wide, narrow, True, HEAD_DIM, WIDE, NARROW, BLOCK_N,
        )  # fmt: skip

    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    kind = out_ptr.dtype.element_ty
    target = out_ptr + at * out_row + column
    tl.store(target + dim_wide[None, :], (wide * inverse[:, None]).to(kind), mask=wide_inside)
    if HEAD_DIM > WIDE:
        tl.store(target + dim_narrow[None, :], (narrow * inverse[:, None]).to(kind), mask=narrow_inside)


class TritonWindows:
    """Attention inside segments short enough for one block each; see attention.StackedAttention.

    Args:
        by_halves: Scores as the sum of what the halves of a head give, each in a wide and a narrow part, instead of as
            one product of power-of-two width that reads every column twice.
    """

    capturable = True

    def __init__(self, by_halves: bool = True, num_warps: int = 4) -> None:
        self.name = f"triton_windows_{'halves' if by_halves else 'whole'}_{num_warps}"
        self._by_halves, self._num_warps = by_halves, num_warps

    def plan(self, segments: Segments, rows: int) -> Segments:
        return segments

    def attend_stacked(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, plan: Segments, scale: float
    ) -> torch.Tensor:
        """See attention.StackedAttention. Raises ValueError if an input is not contiguous."""
        if not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError("qkv, cos and sin must be contiguous")
        rows, width = qkv.shape[0], qkv.shape[1] // 3
        half = width // heads // 2
        out = torch.empty((rows, width), dtype=qkv.dtype, device=qkv.device)
        half_wide, half_narrow = split_head(half)
        _window_kernel[(plan.borders.shape[0] - 1, heads)](
            qkv,
            cos,
            sin,
            plan.borders,
            out,
            scale,
            HEADS=heads,
            HALF=half,
            ROWS=max(16, triton.next_power_of_2(plan.longest)),
            HALF_WIDE=half_wide,
            HALF_NARROW=half_narrow,
            BLOCK=max(16, triton.next_power_of_2(half * 2)),
            BY_HALVES=self._by_halves,
            num_warps=self._num_warps,
        )
        return out


@dataclass(frozen=True, slots=True)
class RowRanges:
    """For every row the rows of its segment, int32 [rows] each: [low, high); empty for rows of no segment."""

    low: torch.Tensor
    high: torch.Tensor


def row_ranges(borders: torch.Tensor, rows: int) -> RowRanges:
    """On the borders' device, without a host read."""
    place = torch.arange(rows, dtype=torch.int32, device=borders.device)
    behind = torch.bucketize(place, borders, right=True).clamp_(max=borders.shape[0] - 1)
    high = borders[behind]
    low = torch.where(place < high, borders[behind - 1], high)
    return RowRanges(low, high)


class TritonFrames:
    """Attention inside segments of any length; see attention.Attention. Rows of q, k and v may lie apart (as those of v
    in a qkv product do), each row's heads may not.

    Args:
        block_rows: Query rows of a program.
        block_keys: Keys of a step.
        split: Heads in a wide and a narrow part instead of one power of two.
    """

    capturable = True

    def __init__(
        self, block_rows: int = 128, block_keys: int = 64, num_warps: int = 8, num_stages: int = 3, split: bool = True
    ) -> None:
        self.name = f"triton_frames_{block_rows}x{block_keys}" + ("" if split else "_whole")
        self._block_rows, self._block_keys, self._split = block_rows, block_keys, split
        self._num_warps, self._num_stages = num_warps, num_stages

    def plan(self, segments: Segments, rows: int) -> RowRanges:
        return row_ranges(segments.borders, rows)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RowRanges, scale: float) -> torch.Tensor:
        """See attention.Attention. Raises ValueError if a row's heads do not lie side by side."""
        rows, heads, head_dim = q.shape
        for name, part in (("q", q), ("k", k), ("v", v)):
            if part.stride()[1:] != (head_dim, 1):
                raise ValueError(f"the heads of a row of {name} must lie side by side; strides are {part.stride()}")
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
        wide, narrow = split_head(head_dim, self._split)
        _frame_kernel[(triton.cdiv(rows, self._block_rows), heads)](
            q,
            k,
            v,
            plan.low,
            plan.high,
            out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            out.stride(0),
            rows,
            scale * _LOG2_E,
            HEAD_DIM=head_dim,
            WIDE=wide,
            NARROW=narrow,
            BLOCK_M=self._block_rows,
            BLOCK_N=self._block_keys,
            num_warps=self._num_warps,
            num_stages=self._num_stages,
        )
        return out


def split_head(columns: int, split: bool = True) -> tuple[int, int]:
    """Powers of two of at least 16 that hold the columns with the least padding; the second may be unused."""
    wide = max(16, triton.next_power_of_2(columns))
    if split and columns < wide and wide > 32:
        narrow = max(16, triton.next_power_of_2(columns - wide // 2))
        if narrow < wide // 2:
            return wide // 2, narrow
    return wide, 16
