"""A tower's blocks in eight bits: their four products each, nearly all of a picture's matrix products.

The first projection stays as it is: it reads raw pixels, few columns wide. So do the mergers: nothing after them
averages their rounding out, and they are a fiftieth of the products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from deployments.fp8 import Fp8Linear, Fp8Ops, QuantizedRows
from deployments.vision_encoder.adapters.tower import Block, Linear, TowerWeights
from deployments.vision_encoder.ops import Norm, Ops


@dataclass(frozen=True, slots=True)
class QuantizedNorm(Norm):
    """A norm whose rows go to an 8-bit product and nowhere else."""


class QuantizedOps:
    """`ops.Ops` that hand 8-bit products their rows quantised; everything else is the wrapped ones' work."""

    def __init__(self, ops: Ops, fp8: Fp8Ops) -> None:
        self._ops, self._fp8 = ops, fp8
        self.name = f"{ops.name}, fp8 {fp8.name}"

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor | QuantizedRows:
        if not isinstance(norm, QuantizedNorm):
            return self._ops.norm(x, norm)
        return self._fp8.norm(x, None, norm.weight, norm.bias, norm.eps)[1]

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | QuantizedRows]:
        if not isinstance(norm, QuantizedNorm):
            return self._ops.add_norm(x, delta, norm)
        return self._fp8.norm(x, delta, norm.weight, norm.bias, norm.eps)

    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        return self._fp8.gated_silu(gate_up)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


def quantize_tower(weights: TowerWeights, ops: Ops, fp8: Fp8Ops) -> tuple[TowerWeights, Ops]:
    """The tower with 8-bit blocks, and the operations that feed them. What `ops` gives goes straight to a product, or
    through a norm that no product follows, so the tower never sees which of its rows are quantised."""
    blocks = tuple(_quantize_block(block, fp8) for block in weights.blocks)
    return replace(weights, blocks=blocks), cast(Ops, QuantizedOps(ops, fp8))


def _quantize_block(block: Block, fp8: Fp8Ops) -> Block:
    qkv, proj, mlp_in, mlp_out = (
        cast(Linear, Fp8Linear(layer.weight, layer.bias, fp8))
        for layer in (block.qkv, block.proj, block.mlp_in, block.mlp_out)
    )
    norm1, norm2 = (QuantizedNorm(norm.weight, norm.bias, norm.eps) for norm in (block.norm1, block.norm2))
    return replace(block, norm1=norm1, qkv=qkv, proj=proj, norm2=norm2, mlp_in=mlp_in, mlp_out=mlp_out)
