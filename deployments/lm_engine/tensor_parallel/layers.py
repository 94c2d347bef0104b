"""A decoder cut down to one rank's share. Its layers are cut on the meta device, before weights are read.

All projections stay plain linears, q, k, v, gate and up with fewer outputs, o and down with fewer inputs: attention and
the gate work on whatever heads and columns there are, and what replaces linears (fused, quantised ones) need not know.
What o and down give is a part of a sum, which is added up over the ranks where a block ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deployments.lm_engine.tensor_parallel.group import TensorParallelGroup
from deployments.lm_engine.tensor_parallel.shards import Shards, Slice

_PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model, and the gang that has the others."""

    group: TensorParallelGroup
    shards: Shards


class VocabParallelHead(nn.Linear):
    """Logits of some of the vocabulary on each rank. Rank 0 gets all of them, the others their own.

    At 7B shape half a head saves 0.5 GiB and an eighth of a millisecond of memory traffic a step on each of two GPUs;
    the gather costs less than that over NVLink at any batch size.

    Args:
        whole: The head of all ranks, on the meta device.
    """

    def __init__(self, whole: nn.Linear, share: Share) -> None:
        part = _part(share, "lm_head.weight")
        with torch.device("meta"):
            super().__init__(whole.in_features, part.stop - part.start, bias=False, dtype=whole.weight.dtype)
        self._columns, self._vocab_size, self._group = share.shards.vocab_columns, part.size, share.group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, vocab_size] on rank 0."""
        logits = super().forward(input)
        if not logits.shape[0]:
            return logits.new_empty(0, self._vocab_size)
        if logits.shape[1] < self._columns:
            logits = F.pad(logits, (0, self._columns - logits.shape[1]))
        parts = self._group.gather(logits)
        return logits if parts is None else torch.cat(parts, dim=1)[:, : self._vocab_size]


def shard_model(decoder: nn.Module, head: nn.Linear, share: Share) -> VocabParallelHead:
    """Cut every layer of a decoder on the meta device down to the rank's share, in place; returns the head's share.

    Raises:
        ValueError: A layer is not of the Llama shape.
    """
    layers: Any = decoder.layers
    for layer in layers:
        try:
            for name, projections in _PROJECTIONS.items():
                for projection in projections:
                    _cut(getattr(layer, name), projection, share)
        except AttributeError as exc:
            raise ValueError(
                f"tensor_parallel_size is {share.group.size}, but layers of class {type(layer).__name__} "
                f"cannot be split: {exc}"
            ) from exc
        _add_sums(layer, share.group)
    return VocabParallelHead(head, share)


def leave_biases_to_rank_0(decoder: nn.Module, share: Share) -> None:
    """Once weights are read: the bias of a summed product counts once."""
    if share.group.rank > 0:
        layers: Any = decoder.layers
        for layer in layers:
            layer.self_attn.o_proj.bias = None
            layer.mlp.down_proj.bias = None


def _add_sums(layer: Any, group: TensorParallelGroup) -> None:
    """Fused layers, which take this one's place, sum by themselves."""
    layer.self_attn.register_forward_hook(lambda _, inputs, outputs: (group.all_reduce(outputs[0]), *outputs[1:]))
    layer.mlp.register_forward_hook(lambda _, inputs, output: group.all_reduce(output))


def _part(share: Share, name: str) -> Slice:
    part = share.shards.of(name)
    assert part is not None
    return part


def _cut(block: Any, projection: str, share: Share) -> None:
    whole: nn.Linear = getattr(block, projection)
    part = _part(share, f"{projection}.weight")
    shape = [whole.out_features, whole.in_features]
    shape[part.dim] = part.stop - part.start
    with torch.device("meta"):
        setattr(block, projection, nn.Linear(shape[1], shape[0], whole.bias is not None, dtype=whole.weight.dtype))
