"""Fused Triton kernels between a tower's matrix products.

Everything is read and written in the tower's half precision and computed in float32. What is fused is what is bound by
memory: gather and cast of the pixels, residual add with the norm after it, the rotation of q and k out of the stacked
qkv rows, the gate of the MLP.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deployments.vision_encoder.ops import PIXEL_CENTRE, Norm

_GATE_BLOCK = 1024


@triton.jit
def _unpack_kernel(
    patches_ptr,
    order_ptr,
    out_ptr,
    centre,
    unit,
    width,
    out_width,
    ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if ORDERED:
        source = tl.load(order_ptr + row // unit).to(tl.int64) * unit + row % unit
    column = tl.arange(0, BLOCK)
    pixel = tl.load(patches_ptr + source * width + column, mask=column < width, other=0).to(tl.float32)
    value = tl.where(column < width, pixel - centre, 0.0)
    tl.store(out_ptr + row * out_width + column, value.to(out_ptr.dtype.element_ty), mask=column < out_width)


@triton.jit
def _norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        mean = tl.sum(x, 0) / width
        x = tl.where(inside, x - mean, 0.0)
        scaled = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
        scaled += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    else:
        scaled = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + row * width + column, scaled.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    width = HEADS * HALF * 2
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    place = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < HEADS) & (place < HALF)
    cos = tl.load(cos_ptr + row * HALF + place, mask=place < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + place, mask=place < HALF, other=0.0)
    offset = head * (HALF * 2) + place
    for which in tl.static_range(2):
        source = qkv_ptr + row * width * 3 + which * width + offset
        left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        if which == 0:
            target = q_ptr + row * width + offset
        else:
            target = k_ptr + row * width + offset
        tl.store(target, (left * cos - right * sin).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (right * cos + left * sin).to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * width * 2 + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * width * 2 + width + column, mask=inside, other=0.0).to(tl.float32)
    # As plain torch rounds: silu in the stored precision, then the product.
    silu = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


class TritonOps:
    """`Ops` in one kernel each. Inputs must be contiguous."""

    name = "triton"

    def unpack(
        self, patches: torch.Tensor, order: torch.Tensor | None, unit: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        rows = patches.shape[0]
        out = torch.empty((rows, width), dtype=dtype, device=patches.device)
        _unpack_kernel[(rows,)](
            patches,
            patches if order is None else order,
            out,
            float(PIXEL_CENTRE),
            unit,
            patches.shape[1],
            width,
            ORDERED=order is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
        )
        return out

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._norm(x, None, norm)[1]

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, delta, norm)

    def _norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        total = x if delta is None else torch.empty_like(x)
        out = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        _norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            norm.weight,
            norm.weight if norm.bias is None else norm.bias,
            total,
            out,
            width,
            norm.eps,
            ADD=delta is not None,
            LAYER=norm.bias is not None,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
        return total, out

    def rotary(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = qkv.shape[0]
        split = qkv.view(rows, 3, heads, -1)
        half = split.shape[-1] // 2
        q, k = (torch.empty((rows, heads, half * 2), dtype=qkv.dtype, device=qkv.device) for _ in range(2))
        _rotary_kernel[(rows,)](
            qkv,
            cos,
            sin,
            q,
            k,
            HEADS=heads,
            HALF=half,
            HEADS_BLOCK=triton.next_power_of_2(heads),
            HALF_BLOCK=triton.next_power_of_2(half),
            num_warps=4,
        )
        return q, k, split[:, 2]

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        _gate_kernel[(rows, triton.cdiv(width, _GATE_BLOCK))](gate_up, out, width, BLOCK=_GATE_BLOCK, num_warps=4)
        return out
