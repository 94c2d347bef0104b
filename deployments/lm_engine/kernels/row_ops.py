"""Fused Triton kernels between a decoder's matrix products: RMS norm with the residual add before it, gated SiLU.

Read and written in the model's precision, computed in float32, rounded where plain torch rounds.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GATE_BLOCK = 1024


@triton.jit
def _norm_kernel(x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    stored = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(stored)
        tl.store(total_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)).to(stored).to(tl.float32)
    tl.store(out_ptr + row * width + column, (scaled * weight).to(stored), mask=inside)


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stored = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * width * 2 + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * width * 2 + width + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(stored).to(tl.float32)
    tl.store(out_ptr + row * width + column, (silu * up).to(stored), mask=inside)


class TritonRowOps:
    """`fused_layers.RowOps` in one kernel each. Inputs must be contiguous."""

    name = "triton"

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)[1]

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, delta, weight, eps)

    def _norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        total = x if delta is None else torch.empty_like(x)
        out = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        _norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            total,
            out,
            width,
            eps,
            ADD=delta is not None,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
        return total, out

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        _gate_kernel[(rows, triton.cdiv(width, _GATE_BLOCK))](gate_up, out, width, BLOCK=_GATE_BLOCK, num_warps=4)
        return out
