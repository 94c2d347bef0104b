"""The small operations between a tower's matrix products, in plain torch. Half precision is computed in float32.

`Ops` is the seam for fused kernels: each method reads and writes whole rows, and rows never mix (`unpack` moves them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

PIXEL_CENTRE = 128
"""Subtracted from pixels before the first product: exact in bfloat16, and it keeps the folded bias small."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm if there is a bias, else RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float = 1e-6


class Ops(Protocol):
    name: str

    def unpack(
        self, patches: torch.Tensor, order: torch.Tensor | None, unit: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """`pixel - PIXEL_CENTRE` of uint8 patches [rows, row] as [rows, width], columns past `row` zero.

        Args:
            order: int32 [rows / unit]: which run of `unit` rows stands at each place; None keeps them.
        """

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalise rows of x [rows, width]."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its norm)."""

    def rotary(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split qkv [rows, 3 * heads * head_dim] and rotate q and k by float32 angles [rows, head_dim / 2].

        Returns q, k, v as [rows, heads, head_dim]; v may be a view of qkv.
        """

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(left half) * right half of [rows, 2 * width]."""


class PlainOps:
    name = "plain"

    def unpack(
        self, patches: torch.Tensor, order: torch.Tensor | None, unit: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, row = patches.shape
        if order is not None:
            patches = patches.view(-1, unit * row).index_select(0, order).view(rows, row)
        return F.pad(patches.to(dtype) - PIXEL_CENTRE, (0, width - row))

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.bias is not None:
            return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return scaled.to(x.dtype) * norm.weight

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, self.norm(total, norm)

    def rotary(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = qkv.view(qkv.shape[0], 3, heads, -1).unbind(1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}
