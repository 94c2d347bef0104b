"""Decoder layers of the Llama shape with stacked weights, put in the place of the library's own.

    library     norm, q, k, v, rotate, attend, o, add, norm, gate, up, silu * , down, add
    here        norm, qkv,  norm + rotate + store, attend,  o, add + norm, gate_up, silu * , down + add

The library's decoder still runs the loop, the embeddings, the rotary tables and the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from deployments.fp8 import QuantizedRows
from deployments.lm_engine.attention import AttentionBatch, HeadNorms, Rotary, rms_norm

_LAYERS = frozenset(
    f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VLText")
)
"""Layer classes whose forward pass is the one above."""


class RowOps(Protocol):
    """What runs between two matrix products, row by row."""

    name: str

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of [rows, width]."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta in memory of its own, its RMS norm), [rows, width] each."""

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of the stacked [rows, 2 * width] -> [rows, width]."""


class LayerOps(Protocol):
    """`RowOps` inside a layer: results go to a product, which takes them plain or quantised."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | QuantizedRows: ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor | QuantizedRows]: ...

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor | QuantizedRows: ...


class Ranks(Protocol):
    """The gang of which this process holds a share of every layer; see tensor_parallel."""

    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""


class PlainRowOps:
    """`RowOps` in plain torch."""

    name = "plain"

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, rms_norm(total, weight, eps)

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up


class FusedLayer(nn.Module):
    """One decoder layer; takes the weights out of the library's layer that it replaces."""

    qkv_proj: nn.Module
    gate_up_proj: nn.Module

    def __init__(self, layer: Any, ops: LayerOps, ranks: Ranks | None = None) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.ops = ops
        self._ranks = ranks
        self._index: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.q_proj.out_features // attention.head_dim
        self._scale: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        # Decoders of some library versions ask the layer which mask it wants.
        self.attention_type = getattr(layer, "attention_type", None)
        self.qkv_proj = stack_linears((attention.q_proj, attention.k_proj, attention.v_proj))
        del attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.gate_up_proj = stack_linears((mlp.gate_proj, mlp.up_proj))
        del mlp.gate_proj, mlp.up_proj
        self.down_proj = mlp.down_proj
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm, attention.k_norm
            self._norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.variance_epsilon)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: AttentionBatch,
        **unused: Any,
    ) -> torch.Tensor:
        """The library's contract: [1, T, width] in and out."""
        x, ops = hidden_states[0], self.ops
        normed = ops.norm(x, self.input_norm.weight, self.input_norm.variance_epsilon)
        attended = paged.attend_qkv(
            self._index,
            self.qkv_proj(normed),
            Rotary(*(table[0] for table in position_embeddings)),
            num_heads=self._num_heads,
            norms=self._norms,
            scale=self._scale,
            sliding_window=self._window,
        )
        projected = self._total(self.o_proj(attended.flatten(1)))
        x, normed = ops.add_norm(x, projected, self.post_norm.weight, self.post_norm.variance_epsilon)
        gated = ops.gated_silu(self.gate_up_proj(normed))
        if self._ranks is not None and self._ranks.rank > 0:
            return self._total(self.down_proj(gated))[None]  # rank 0 brings x into the sum
        # The sum is this layer's own memory: the product adds to it in place.
        if isinstance(gated, QuantizedRows):
            return self._total(x.add_(self.down_proj(gated)))[None]
        return self._total(x.addmm_(gated, self.down_proj.weight.t()))[None]

    def _total(self, part: torch.Tensor) -> torch.Tensor:
        """Of the products that the ranks of a gang hold parts of."""
        return part if self._ranks is None else self._ranks.all_reduce(part)


class FlatRotary(nn.Module):
    """Rotary tables [1, T, head_dim], whatever axes the library's module keeps apart.

    Args:
        sections: Half-dimensions of each M-RoPE axis, for modules that leave merging the axes to attention.
    """

    def __init__(self, rotary: nn.Module, sections: list[int] | None) -> None:
        super().__init__()
        self.rotary, self._sections = rotary, sections

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(x, position_ids)
        if cos.ndim == 4:
            cos, sin = self._merge(cos), self._merge(sin)
        return cos.contiguous(), sin.contiguous()

    def _merge(self, table: torch.Tensor) -> torch.Tensor:
        if self._sections is None:
            raise ValueError("the rotary module gives tables per axis, but the config has no mrope_section")
        parts = table.split(self._sections * 2, dim=-1)
        return torch.cat([part[axis % 3] for axis, part in enumerate(parts)], dim=-1)


class FusedNorm(nn.Module):
    """The decoder's last norm."""

    def __init__(self, norm: Any, ops: RowOps) -> None:
        super().__init__()
        self.weight, self._eps, self._ops = norm.weight, norm.variance_epsilon, ops

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._ops.norm(hidden_states[0], self.weight, self._eps)[None]


def can_fuse(decoder: nn.Module) -> bool:
    """Whether all layers are of a known class, with SiLU gates and no bias that the fused layer lacks."""
    layers: Iterable[Any] = decoder.layers  # type: ignore[assignment]
    return getattr(decoder.config, "hidden_act", None) == "silu" and all(
        type(layer).__name__ in _LAYERS and layer.mlp.gate_proj.bias is None and layer.mlp.down_proj.bias is None
        for layer in layers
    )


@torch.no_grad()
def fuse_layers(decoder: nn.Module, ops: RowOps, ranks: Ranks | None = None) -> None:
    """Replace the layers of a loaded decoder in place, one at a time, so that no second copy of the weights is held.

    Args:
        ranks: Of a decoder that has been cut down to one rank's share.
    """
    layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]
    for index in range(len(layers)):
        layers[index] = FusedLayer(layers[index], ops, ranks)
    parameters = getattr(decoder.config, "rope_parameters", None) or {}
    decoder.rotary_emb = FlatRotary(decoder.rotary_emb, parameters.get("mrope_section"))  # type: ignore[arg-type]
    decoder.norm = FusedNorm(decoder.norm, ops)


def stack_linears(linears: Iterable[nn.Linear]) -> nn.Linear:
    """One product for several of the same input; outputs side by side."""
    parts = list(linears)
    weight = torch.cat([part.weight for part in parts])
    with torch.device("meta"):
        stacked = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None)
    stacked.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        stacked.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return stacked
