"""Which part of each weight a rank holds. Integers and names alone.

    q, k, v, gate, up     rows of the weight (outputs), whole heads; biases with them
    o, down               columns of the weight (inputs); the ranks' products are summed
    lm_head               rows, as even as can be
    everything else       whole, on every rank

With more ranks than KV heads, neighbouring ranks hold the same KV head:

    8 query heads, 2 KV heads, 4 ranks      q 01 | 23 | 45 | 67      kv 0 | 0 | 1 | 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """[start, stop) of a tensor along `dim`, where the whole tensor has `size`."""

    dim: int
    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> DecoderShape:
        """The shape in a text config's values."""
        heads = text["num_attention_heads"]
        return cls(
            num_heads=heads,
            num_kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            intermediate_size=text.get("intermediate_size") or 0,
            vocab_size=text["vocab_size"],
        )


class Shards:
    """The shares of one rank.

    Raises:
        ValueError: The shape cannot be split over so many ranks; the message names the option, its value and what
            must divide.
    """

    def __init__(self, shape: DecoderShape, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}); it is {rank}")
        _must_divide(size, "num_attention_heads", shape.num_heads)
        _must_divide(size, "intermediate_size", shape.intermediate_size)
        if shape.num_kv_heads % size and size % shape.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {size}, but it must divide the model's num_key_value_heads "
                f"{shape.num_kv_heads} or be a multiple of it"
            )
        self.num_heads = shape.num_heads // size
        self.num_kv_heads = max(1, shape.num_kv_heads // size)
        first_kv_head = rank * shape.num_kv_heads // size
        heads = _rows(rank * self.num_heads, self.num_heads, shape.num_heads, shape.head_dim)
        kv_heads = _rows(first_kv_head, self.num_kv_heads, shape.num_kv_heads, shape.head_dim)
        columns = shape.intermediate_size // size
        inner = _rows(rank * columns, columns, shape.intermediate_size, 1)
        self.vocab_columns = -(-shape.vocab_size // size)
        """Of a rank's logits; the last ranks may have fewer."""
        vocab = [min(edge * self.vocab_columns, shape.vocab_size) for edge in (rank, rank + 1)]
        outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": inner, "up_proj": inner}
        self._slices = {
            **{f"{layer}.{kind}": part for layer, part in outputs.items() for kind in ("weight", "bias")},
            "o_proj.weight": Slice(1, heads.start, heads.stop, heads.size),
            "down_proj.weight": Slice(1, inner.start, inner.stop, inner.size),
            "lm_head.weight": Slice(0, vocab[0], vocab[1], shape.vocab_size),
        }

    def of(self, name: str) -> Slice | None:
        """The rank's part of a parameter, by its dotted name; None for all of it."""
        return self._slices.get(".".join(name.split(".")[-2:]))


def _rows(first: int, count: int, total: int, width: int) -> Slice:
    return Slice(0, first * width, (first + count) * width, total * width)


def _must_divide(size: int, name: str, value: int) -> None:
    if value % size:
        raise ValueError(f"tensor_parallel_size is {size}, but it must divide the model's {name} {value}")
