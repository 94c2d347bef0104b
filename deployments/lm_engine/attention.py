"""Attention over paged keys and values for a ragged batch, behind one protocol.

All tokens of a step lie in one flat row [T]: chunk after chunk, as the plan lists them. `prepare` turns the plan into
index tensors once per step; `attend` runs once per layer. The SDPA backend is the plain path for any device and the
oracle for faster ones.

    keys of a chunk     |<------- start cached ------->|<- num_tokens new ->|
    query i sees        all keys at or before start + i, and with a sliding window W only the last W of them
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from deployments.lm_engine.device_copy import to_device
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.plan import SequenceChunk


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation of each token's queries and keys, [T, head_dim] each; left and right halves are alike."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head before the rotation; weights [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class AttentionBatch(Protocol):
    """A backend's index tensors for one step."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Store the step's keys and values, then attend.

        Args:
            query: [T, num_heads, head_dim], already rotated.
            key, value: [T, num_kv_heads, head_dim].
            sliding_window: Keys each query sees, itself included; None for all before it.

        Returns:
            [T, num_heads, head_dim].
        """

    def attend_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        *,
        num_heads: int,
        norms: HeadNorms | None,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Norm and rotate, then store and attend.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values. May be overwritten.

        Returns:
            [T, num_heads, head_dim].
        """


class AttentionBackend(Protocol):
    name: str

    def prepare(self, chunks: Sequence[SequenceChunk]) -> AttentionBatch:
        """Index tensors of a step, on the device. Valid until the next call."""


class SdpaBackend:
    """torch's scaled_dot_product_attention over keys gathered block by block.

    Decoding sequences of similar length share one call, padded to the longest; each longer chunk is a call of its own.
    Gathering reads whole blocks, so blocks first written in a step are zeroed before: what a former owner left in
    their tail (NaN at worst) can then never meet a zero weight.
    """

    name = "sdpa"

    def __init__(self, kv: KVTensors) -> None:
        self._kv = kv
        self._device = kv.keys(0).device
        self._workspace: dict[str, torch.Tensor] = {}

    def prepare(self, chunks: Sequence[SequenceChunk]) -> SdpaBatch:
        block_size = self._kv.layout.block_size
        slots: list[np.ndarray] = []
        fresh_blocks: list[np.ndarray] = []
        prefills: list[_Prefill] = []
        decodes: dict[int, list[tuple[int, int, np.ndarray]]] = defaultdict(list)
        row = 0
        for chunk in chunks:
            stop = chunk.start + chunk.num_tokens
            num_blocks = -(-stop // block_size)
            table = np.asarray(chunk.block_ids[:num_blocks], np.int64)
            tokens = np.arange(chunk.start, stop)
            slots.append(table[tokens // block_size] * block_size + tokens % block_size)
            fresh_blocks.append(table[-(-chunk.start // block_size) :])
            if chunk.num_tokens == 1:
                decodes[num_blocks.bit_length()].append((row, stop, table))
            else:
                prefills.append(_Prefill(row, chunk.start, chunk.num_tokens, self._to_device(table)))
            row += chunk.num_tokens
        self._kv.clear_blocks(self._to_device(np.concatenate(fresh_blocks)))
        return SdpaBatch(
            self, self._to_device(np.concatenate(slots)), [self._decode(group) for group in decodes.values()], prefills
        )

    def _decode(self, group: list[tuple[int, int, np.ndarray]]) -> _Decode:
        rows, lengths, tables = zip(*group, strict=True)
        padded = np.empty((len(tables), max(table.size for table in tables)), np.int64)
        for row, table in enumerate(tables):
            padded[row, : table.size] = table
            padded[row, table.size :] = table[0]  # read again past the sequence's end: finite, and masked
        return _Decode(*(self._to_device(np.asarray(array, np.int64)) for array in (rows, lengths, padded)))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)

    def gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks, [blocks * block_size, num_kv_heads, head_dim] each.

        Views of a workspace that the next call overwrites: fresh memory each time costs several times the copy.
        """
        return self._gather("keys", self._kv.keys(layer), table), self._gather("values", self._kv.values(layer), table)

    def _gather(self, name: str, pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        block_size = self._kv.layout.block_size
        blocks = pool.view(-1, block_size * pool.shape[1] * pool.shape[2])
        space = self._workspace.get(name)
        if space is None or space.shape[0] < table.numel():
            space = self._workspace[name] = blocks.new_empty(table.numel(), blocks.shape[1])
        out = space[: table.numel()]
        torch.index_select(blocks, 0, table.reshape(-1), out=out)
        return out.view(-1, *pool.shape[1:])

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._kv.write(layer, slots, keys, values)


class SdpaBatch:
    """See SdpaBackend; built by its `prepare`."""

    def __init__(
        self, backend: SdpaBackend, slots: torch.Tensor, decodes: list[_Decode], prefills: list[_Prefill]
    ) -> None:
        self._backend, self._slots, self._decodes, self._prefills = backend, slots, decodes, prefills

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self._backend.write(layer, self._slots, key, value)
        out = torch.empty_like(query)
        for decode in self._decodes:
            keys, values = self._backend.gather(layer, decode.tables)
            out[decode.rows] = decode.attend(query[decode.rows], keys, values, scale, sliding_window)
        for prefill in self._prefills:
            rows = slice(prefill.row, prefill.row + prefill.num_tokens)
            if prefill.start == 0:
                keys, values = key[rows], value[rows]
            else:
                keys, values = self._backend.gather(layer, prefill.table)
            out[rows] = prefill.attend(query[rows], keys, values, scale, sliding_window)
        return out

    def attend_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        *,
        num_heads: int,
        norms: HeadNorms | None,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, rotary.cos.shape[1])
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if norms is not None:
            query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
        query, key = rotate(query, rotary), rotate(key, rotary)
        return self.attend(layer, query, key, value, scale=scale, sliding_window=sliding_window)


class _Decode:
    """Sequences that advance by one token each and have about as many blocks."""

    __slots__ = ("_lengths", "_masks", "rows", "tables")

    def __init__(self, rows: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor) -> None:
        self.rows, self._lengths, self.tables = rows, lengths, tables
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        num_sequences, num_heads, head_dim = query.shape
        shape = (num_sequences, -1, keys.shape[1], head_dim)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        # Query heads that share a KV head become its query positions, so that no key is repeated.
        grouped = query.view(num_sequences, keys.shape[1], -1, head_dim)
        mask = self._mask(keys.shape[2], window)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(num_sequences, num_heads, head_dim)

    def _mask(self, num_keys: int, window: int | None) -> torch.Tensor:
        """bool [sequences, 1, 1, num_keys], the same in all layers with this window."""
        if window not in self._masks:
            positions = torch.arange(num_keys, device=self._lengths.device)
            lengths = self._lengths[:, None]
            mask = positions < lengths
            if window is not None:
                mask &= positions >= lengths - window
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


class _Prefill:
    """One sequence's chunk of several tokens."""

    __slots__ = ("_masks", "num_tokens", "row", "start", "table")

    def __init__(self, row: int, start: int, num_tokens: int, table: torch.Tensor) -> None:
        self.row, self.start, self.num_tokens, self.table = row, start, num_tokens, table
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        stop = self.start + self.num_tokens
        first = 0 if window is None else max(0, self.start - window + 1)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, keys[first:stop], values[first:stop]))
        is_causal = self.start == 0 and (window is None or stop <= window)
        mask = None if is_causal else self._mask(first, window, query.device)
        enable_gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out[0].transpose(0, 1)

    def _mask(self, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """bool [num_tokens, stop - first], the same in all layers with this window."""
        if window not in self._masks:
            stop = self.start + self.num_tokens
            queries = torch.arange(self.start, stop, device=device)[:, None]
            keys = torch.arange(first, stop, device=device)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[window] = mask
        return self._masks[window]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, in float32, rounded to the input's precision before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotated [T, heads, head_dim]: each half's values pair with the other half's."""
    left, right = heads.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return heads * rotary.cos[:, None] + turned * rotary.sin[:, None]
