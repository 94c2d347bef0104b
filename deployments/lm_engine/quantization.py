"""Decoder layers in eight bits: their matrix products, nine tenths of the weights that a 7B-shaped decode step reads.

The embedding is read row by row and costs nothing. The head stays as it is: nothing after it averages its rounding out,
and a prefill runs it over its last row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deployments.fp8 import Fp8Linear, Fp8Ops, QuantizedRows
from deployments.lm_engine.fused_layers import FusedLayer

PRODUCTS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up"))
"""Linear layers by name, the library's and the fused ones. Others, such as a router's, stay as they are."""


class QuantizedRowOps:
    """`fused_layers.LayerOps` that hand the following product its rows quantised."""

    def __init__(self, ops: Fp8Ops) -> None:
        self._ops = ops
        self.name = f"fp8 {ops.name}"

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
        return self._ops.norm(x, None, weight, None, eps)[1]

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, QuantizedRows]:
        return self._ops.norm(x, delta, weight, None, eps)

    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        return self._ops.gated_silu(gate_up)


def quantize_layers(decoder: nn.Module, ops: Fp8Ops) -> int:
    """Replace the products of a loaded decoder's layers in place, one at a time; returns how many.

    Fused layers also quantise in the kernels between their products.
    """
    layers: Any = decoder.layers
    replaced = 0
    for layer in layers:
        for owner in layer.modules():
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.Linear) and name in PRODUCTS:
                    setattr(owner, name, Fp8Linear(child.weight, child.bias, ops))
                    replaced += 1
        if isinstance(layer, FusedLayer):
            layer.ops = QuantizedRowOps(ops)
    return replaced
