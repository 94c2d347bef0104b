"""Paged attention by Triton kernels: one launch for all decoding sequences of a step, one for all longer chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deployments.lm_engine.attention import HeadNorms, Rotary
from deployments.lm_engine.device_copy import to_device_together
from deployments.lm_engine.kernels import paged_attention, rotary_store
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.plan import SequenceChunk

_TABLE_STEP = 16
"""Tables are padded to multiples of so many blocks: kernels are compiled anew for strides without this divisor."""
_CPU_PROCESSORS = 8
"""Stands in for the multiprocessors where Triton's interpreter runs the kernels on a CPU."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences that advance by one token each; int32 on the device."""

    rows: torch.Tensor
    """[sequences], the sequence's row of the batch."""
    lengths: torch.Tensor
    """[sequences], tokens in the cache, this step's included; 0 marks a padding row."""
    tables: torch.Tensor
    """[sequences, blocks]."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Chunks of several tokens; see `paged_attention.prefill`."""

    spans: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor


class TritonBackend:
    """attention.AttentionBackend for CUDA devices (and for Triton's interpreter)."""

    name = "triton"

    def __init__(self, kv: KVTensors) -> None:
        self._kv = kv
        self._device = kv.keys(0).device
        self._queries = paged_attention.prefill_queries(kv.layout.head_dim, kv.layout.dtype)
        self._processors = (
            torch.cuda.get_device_properties(self._device).multi_processor_count
            if self._device.type == "cuda"
            else _CPU_PROCESSORS
        )

    @property
    def queries_per_tile(self) -> int:
        return self._queries

    def prepare(self, chunks: Sequence[SequenceChunk]) -> TritonBatch:
        firsts = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
        decodes = [(row, chunk) for row, chunk in zip(firsts, chunks, strict=False) if chunk.num_tokens == 1]
        prefills = [(row, chunk) for row, chunk in zip(firsts, chunks, strict=False) if chunk.num_tokens > 1]
        block_size = self._kv.layout.block_size
        arrays = [np.concatenate([chunk_slots(chunk, block_size) for chunk in chunks])]
        if decodes:
            arrays += [
                np.array([row for row, _ in decodes], np.int32),
                np.array([chunk.start + 1 for _, chunk in decodes], np.int32),
                block_tables([chunk for _, chunk in decodes], block_size),
            ]
        if prefills:
            spans = np.array([(row, chunk.start, chunk.num_tokens) for row, chunk in prefills], np.int32)
            arrays += [spans, self.tiles(spans), block_tables([chunk for _, chunk in prefills], block_size)]
        slots, *rest = to_device_together(arrays, self._device)
        decode = DecodeRows(*rest[:3]) if decodes else None
        prefill = PrefillRows(*rest[-3:]) if prefills else None
        return self.batch(slots, decode, prefill)

    def batch(
        self,
        slots: torch.Tensor,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        split_for: int | None = None,
    ) -> TritonBatch:
        """A batch over index tensors that are on the device already.

        Args:
            split_for: Decodes that are expected if some of `decode` are padding; decides how contexts are cut.
        """
        kv_heads = self._kv.layout.num_kv_heads
        sequences = 0 if decode is None else min(split_for or decode.rows.shape[0], decode.rows.shape[0])
        return TritonBatch(
            self._kv, slots, decode, prefill, paged_attention.num_splits(sequences, kv_heads, self._processors)
        )

    def tiles(self, spans: np.ndarray) -> np.ndarray:
        """int32 [tiles, 2] of chunks [chunks, 3], see `paged_attention.prefill`. Late tiles see the most keys and come
        first, so that none is left to run alone at the end."""
        tiles = [(index, first) for index, (_, _, num) in enumerate(spans) for first in range(0, num, self._queries)]
        return np.array(sorted(tiles, key=lambda tile: -(tile[1] + spans[tile[0], 1])), np.int32)


class TritonBatch:
    """See TritonBackend; built by its `prepare`."""

    def __init__(
        self, kv: KVTensors, slots: torch.Tensor, decode: DecodeRows | None, prefill: PrefillRows | None, splits: int
    ) -> None:
        self._kv, self._slots, self._decode, self._prefill, self._splits = kv, slots, decode, prefill, splits

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
        """See attention.AttentionBatch."""
        rotary_store.store(
            _dense_rows(key), _dense_rows(value), self._kv.keys(layer), self._kv.values(layer), self._slots
        )
        return self._attend(layer, query.contiguous(), scale, sliding_window)

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
        """See attention.AttentionBatch."""
        head_dim = self._kv.layout.head_dim
        rotary_store.rotate_store(
            qkv,
            rotary.cos,
            rotary.sin,
            self._kv.keys(layer),
            self._kv.values(layer),
            self._slots,
            num_heads=num_heads,
            q_norm=None if norms is None else norms.query,
            k_norm=None if norms is None else norms.key,
            eps=0.0 if norms is None else norms.eps,
        )
        query = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        return self._attend(layer, query, scale, sliding_window)

    def _attend(self, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        keys, values, block_size = self._kv.keys(layer), self._kv.values(layer), self._kv.layout.block_size
        if self._prefill is not None:
            rows = self._prefill
            paged_attention.prefill(
                query,
                keys,
                values,
                out,
                tables=rows.tables,
                spans=rows.spans,
                tiles=rows.tiles,
                block_size=block_size,
                scale=scale,
                window=window,
            )
        if self._decode is not None:
            paged_attention.decode(
                query,
                keys,
                values,
                out,
                tables=self._decode.tables,
                lengths=self._decode.lengths,
                rows=self._decode.rows,
                block_size=block_size,
                scale=scale,
                window=window,
                splits=self._splits,
            )
        return out


def chunk_slots(chunk: SequenceChunk, block_size: int) -> np.ndarray:
    """int32 [num_tokens], pool rows of the chunk's tokens."""
    if chunk.num_tokens == 1:
        block, place = divmod(chunk.start, block_size)
        return np.array([chunk.block_ids[block] * block_size + place], np.int32)
    first = chunk.start // block_size
    stop = chunk.start + chunk.num_tokens
    table = np.asarray(chunk.block_ids[first : -(-stop // block_size)], np.int32)
    tokens = np.arange(chunk.start, stop, dtype=np.int32)
    return table[tokens // block_size - first] * block_size + tokens % block_size


def block_tables(chunks: Sequence[SequenceChunk], block_size: int) -> np.ndarray:
    """int32 [chunks, blocks]: each chunk's blocks up to its end, padded with zeros to a common width."""
    sizes = [-(-(chunk.start + chunk.num_tokens) // block_size) for chunk in chunks]
    width = -(-max(sizes) // _TABLE_STEP) * _TABLE_STEP
    tables = np.zeros((len(chunks), width), np.int32)
    for row, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        tables[row, :size] = chunk.block_ids[:size]
    return tables


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
