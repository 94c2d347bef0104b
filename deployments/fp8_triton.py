"""Fused Triton kernels that quantise rows for 8-bit products, alone or with what precedes a product.

One program a row: the largest magnitude, the scale, the values. Everything is computed in float32 and rounded where
plain torch rounds, so that results differ from the emulation by no more than a sum's order does.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deployments.fp8 import ALIGNMENT, E4M3, LARGEST, LEAST_ABSMAX, QuantizedRows, ScaledMmFp8

_LEAST_ABSMAX = tl.constexpr(LEAST_ABSMAX)
_SHARE = tl.constexpr(1 / LARGEST)

_GATE_BLOCK = 4096


@triton.jit
def _store_rows(x, row, column, values_ptr, scales_ptr, padded):
    """A whole row in one block: x is zero outside of it."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), _LEAST_ABSMAX) * _SHARE
    values = (x * tl.div_rn(1.0, scale)).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * padded + column, values, mask=column < padded)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_kernel(x_ptr, values_ptr, scales_ptr, x_row, width, padded, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + column, mask=column < width, other=0.0).to(tl.float32)
    _store_rows(x, row, column, values_ptr, scales_ptr, padded)


@triton.jit
def _norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    values_ptr,
    scales_ptr,
    width,
    padded,
    eps,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    stored = total_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(stored)
        tl.store(total_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        mean = tl.sum(x, 0) / width
        x = tl.where(inside, x - mean, 0.0)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
        normed += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    else:
        normed = (x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)).to(stored).to(tl.float32) * weight
    _store_rows(normed.to(stored).to(tl.float32), row, column, values_ptr, scales_ptr, padded)


@triton.jit
def _gated(gate_up_ptr, row, column, width):
    """silu(gate) * up of some columns, rounded as plain torch does; zero outside of the row."""
    inside = column < width
    stored = gate_up_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * width * 2 + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * width * 2 + width + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(stored).to(tl.float32)
    return (silu * up).to(stored).to(tl.float32)


@triton.jit
def _gate_kernel(gate_up_ptr, values_ptr, scales_ptr, width, padded, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # A row is kept in registers, in blocks since its width is far from a power of two.
    blocks = ()
    largest = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(NUM_BLOCKS):
        block = _gated(gate_up_ptr, row, index * BLOCK + tl.arange(0, BLOCK), width)
        largest = tl.maximum(largest, tl.abs(block))
        blocks = blocks + (block,)  # noqa: RUF005  (Triton unpacks no tuples)
    scale = tl.maximum(tl.max(largest, 0), _LEAST_ABSMAX) * _SHARE
    inverse = tl.div_rn(1.0, scale)
    for index in tl.static_range(NUM_BLOCKS):
        column = index * BLOCK + tl.arange(0, BLOCK)
        values = (blocks[index] * inverse).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * padded + column, values, mask=column < padded)
    tl.store(scales_ptr + row, scale)


class TritonFp8(ScaledMmFp8):
    """Products on tensor cores, rows quantised in one kernel each. Inputs must be contiguous."""

    name = "triton"

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        num_rows, width = x.shape
        rows, padded = _empty_rows(x, width)
        block = triton.next_power_of_2(padded)
        _quantize_kernel[(num_rows,)](
            x, rows.values, rows.scales, x.stride(0), width, padded, BLOCK=block, num_warps=_warps(block)
        )
        return rows

    def norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, QuantizedRows]:
        num_rows, width = x.shape
        total = x if delta is None else torch.empty_like(x)
        rows, padded = _empty_rows(x, width)
        block = triton.next_power_of_2(padded)
        _norm_kernel[(num_rows,)](
            x,
            x if delta is None else delta,
            weight,
            weight if bias is None else bias,
            total,
            rows.values,
            rows.scales,
            width,
            padded,
            eps,
            ADD=delta is not None,
            LAYER=bias is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
        return total, rows

    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        rows, padded = _empty_rows(gate_up, width)
        block = min(_GATE_BLOCK, triton.next_power_of_2(padded))
        num_blocks = triton.cdiv(padded, block)
        _gate_kernel[(num_rows,)](
            gate_up,
            rows.values,
            rows.scales,
            width,
            padded,
            NUM_BLOCKS=num_blocks,
            BLOCK=block,
            num_warps=_warps(num_blocks * block),
        )
        return rows


def _empty_rows(like: torch.Tensor, width: int) -> tuple[QuantizedRows, int]:
    """Rows for a kernel to fill, and their padded width."""
    padded = width + -width % ALIGNMENT
    values = torch.empty((like.shape[0], padded), dtype=E4M3, device=like.device)
    return QuantizedRows(values, torch.empty((like.shape[0], 1), dtype=torch.float32, device=like.device)), padded


def _warps(row: int) -> int:
    """For a program that holds `row` numbers in registers."""
    return 4 if row <= 2048 else 8 if row <= 8192 else 16 if row <= 32768 else 32
