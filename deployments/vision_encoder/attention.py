"""Attention over packed sequences: rows of many items lie in one tensor, borders are an array.

    rows       0 ........ 9 | 10 ... 13 | 14 ....... 21 | 22 .... (rows past the last border belong to nobody)
    borders    [0, 10, 14, 22, 22, 22]                            (repeated borders are empty segments)

Borders are device inputs, so a captured graph stays right when equal totals are cut differently. Rows past the last
border may come out as anything, NaN included; no other operation of a tower mixes rows, and results are sliced.

Each backend splits its work in `plan` (once a forward pass) and `attend` (once a layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from deployments.vision_encoder.ops import Ops


@dataclass(frozen=True, slots=True)
class Segments:
    borders: torch.Tensor
    """int32 [segments + 1], non-decreasing, on the device of the rows."""
    longest: int
    """Upper bound of a segment's length in rows, known on the host; baked into captured graphs."""


class Attention(Protocol):
    """Full (non-causal) attention inside each segment."""

    name: str
    capturable: bool
    """Whether `plan` and `attend` run without a host read, so that a CUDA graph may hold them."""

    def plan(self, segments: Segments, rows: int) -> Any:
        """What every layer of one pass shares. Valid for that pass only."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, scale: float) -> torch.Tensor:
        """q, k, v: [rows, heads, head_dim]; returns the same shape."""


@runtime_checkable
class StackedAttention(Protocol):
    """The same straight from the rows of a qkv product, rotation included."""

    name: str
    capturable: bool

    def plan(self, segments: Segments, rows: int) -> Any:
        """As Attention's."""

    def attend_stacked(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, plan: Any, scale: float
    ) -> torch.Tensor:
        """qkv: [rows, 3 * width]; cos, sin: float32 [rows, head_dim / 2]. Returns [rows, width]."""


class Rotated:
    """A StackedAttention from the rotation and an attention of their own."""

    def __init__(self, ops: Ops, attention: Attention) -> None:
        self._ops, self._attention = ops, attention
        self.name, self.capturable = attention.name, attention.capturable

    def plan(self, segments: Segments, rows: int) -> Any:
        return self._attention.plan(segments, rows)

    def attend_stacked(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, plan: Any, scale: float
    ) -> torch.Tensor:
        q, k, v = self._ops.rotary(qkv, cos, sin, heads)
        return self._attention.attend(q, k, v, plan, scale).reshape(qkv.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _LengthGroup:
    length: int
    index: torch.Tensor | slice
    """Rows of all segments of this length: a slice if they lie side by side, else int64 [count * length]."""


class SdpaSegments:
    """One batched SDPA call per distinct segment length. Reads the borders on the host: for CPU, and for eager runs."""

    name = "sdpa_segments"
    capturable = False

    def plan(self, segments: Segments, rows: int) -> list[_LengthGroup]:
        borders = segments.borders.to("cpu", torch.int64)
        lengths = borders.diff()
        groups = []
        for length in lengths.unique().tolist():
            if length == 0:
                continue
            starts = borders[:-1][lengths == length]
            if bool((starts.diff() == length).all()):
                first = int(starts[0])
                index: torch.Tensor | slice = slice(first, first + length * len(starts))
            else:
                offsets = starts[:, None] + torch.arange(length)
                index = offsets.reshape(-1).to(segments.borders.device)
            groups.append(_LengthGroup(length, index))
        return groups

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: list[_LengthGroup], scale: float
    ) -> torch.Tensor:
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        for group in plan:
            shape = (-1, group.length, *q.shape[1:])
            qs, ks, vs = (x[group.index].reshape(shape).transpose(1, 2) for x in (q, k, v))
            result = F.scaled_dot_product_attention(qs, ks, vs, scale=scale)
            out[group.index] = result.transpose(1, 2).reshape(-1, *q.shape[1:])
        return out


class SdpaMasked:
    """One SDPA call with a block-diagonal mask. Needs rows^2 memory, no host read: works everywhere, also captured."""

    name = "sdpa_masked"
    capturable = True

    def plan(self, segments: Segments, rows: int) -> torch.Tensor:
        place = torch.arange(rows, dtype=torch.int32, device=segments.borders.device)
        segment = torch.bucketize(place, segments.borders, right=True)
        return (segment[:, None] == segment[None, :])[None]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: torch.Tensor, scale: float
    ) -> torch.Tensor:
        qs, ks, vs = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(qs, ks, vs, attn_mask=plan, scale=scale)[0].transpose(0, 1)


class Varlen:
    """torch's variable-length flash attention (CUDA, half precision): no host read, no padding between segments."""

    name = "varlen"
    capturable = True

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn: Callable[..., Any] = varlen_attn

    def plan(self, segments: Segments, rows: int) -> Segments:
        return segments

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Segments, scale: float) -> torch.Tensor:
        return self._varlen_attn(q, k, v, plan.borders, plan.borders, plan.longest, plan.longest, scale=scale)


class BySize:
    """One of several attentions by the number of rows of a pass, which the host knows.

    Args:
        levels: (most rows, attention), ascending; the last one takes whatever is larger.
    """

    def __init__(self, levels: Sequence[tuple[int, Attention]]) -> None:
        self._levels = tuple(levels)
        self.name = "+".join(dict.fromkeys(attention.name for _, attention in levels))
        self.capturable = all(attention.capturable for _, attention in levels)

    def plan(self, segments: Segments, rows: int) -> tuple[Attention, Any]:
        attention = next((a for most, a in self._levels if rows <= most), self._levels[-1][1])
        return attention, attention.plan(segments, rows)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: tuple[Attention, Any], scale: float
    ) -> torch.Tensor:
        attention, inner = plan
        return attention.attend(q, k, v, inner, scale)


class StackedBySize:
    """BySize of stacked attentions."""

    def __init__(self, levels: Sequence[tuple[int, StackedAttention]]) -> None:
        self._levels = tuple(levels)
        self.name = "+".join(dict.fromkeys(attention.name for _, attention in levels))
        self.capturable = all(attention.capturable for _, attention in levels)

    def plan(self, segments: Segments, rows: int) -> tuple[StackedAttention, Any]:
        attention = next((a for most, a in self._levels if rows <= most), self._levels[-1][1])
        return attention, attention.plan(segments, rows)

    def attend_stacked(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        plan: tuple[StackedAttention, Any],
        scale: float,
    ) -> torch.Tensor:
        attention, inner = plan
        return attention.attend_stacked(qkv, cos, sin, heads, inner, scale)
