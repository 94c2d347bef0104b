"""Steps that prefill and decode, replayed from CUDA graphs, one per number of tokens. A step pads to the next larger.

    embedded tokens ──▶ static hidden states ─┐
    plan ──pack──▶ one pinned transfer ───────┴──▶ static positions, slots, tiles, tables ──replay──▶ hidden states

Launched one by one, the hundreds of kernels of a small step keep the host busier than the device. Long steps gain
nothing and run eagerly. What depends on the number of sampling rows (the head) stays outside. The last row of a graph
belongs to no token: decodes that pad the batch write there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from deployments.lm_engine.device_copy import HostStaging
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.plan import SequenceChunk
from deployments.lm_engine.triton_attention import DecodeRows, PrefillRows, TritonBackend, block_tables, chunk_slots

logger = logging.getLogger(__name__)

MAX_DECODES = 256
MAX_PREFILLS = 16
"""Chunks of several tokens in a step."""
_SPLIT_FOR = 32
"""Decodes for which attention is cut into parts: with more, less would do, but graphs know no numbers."""
_WARM_UP_CALLS = 2
_ALIGNMENT = 4
"""int32 values per 16 bytes, where kernels compiled for aligned pointers expect each array to start."""


class MixedGraphs:
    """Args:
    sizes: Numbers of rows, ascending; each takes one token less.
    max_blocks: Blocks of the longest sequence.
    capture: Record CUDA graphs; False calls the same pass on the same static inputs (CPU, and as the graphs' oracle).
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: TritonBackend,
        sizes: Sequence[int],
        *,
        block_size: int,
        max_blocks: int,
        capture: bool = True,
    ) -> None:
        self._model, self._backend, self._block_size, self._capture = model, backend, block_size, capture
        self._sizes = tuple(sizes)
        largest, axes, device = self._sizes[-1], model.position_rule.axes, model.device
        num_decodes, num_tiles = self._decodes_of(largest), self._tiles_of(largest)
        shapes = {
            "positions": (axes, largest),
            "slots": (largest,),
            "rows": (num_decodes,),
            "lengths": (num_decodes,),
            "spans": (MAX_PREFILLS + 1, 3),  # the last one is empty; tiles that pad the batch are its
            "tiles": (num_tiles, 2),
        }
        self._parts = _Parts(shapes)
        table_columns = -(-max_blocks // 16) * 16
        self._decode_tables = torch.zeros((num_decodes, table_columns), dtype=torch.int32, device=device)
        self._prefill_tables = torch.zeros((MAX_PREFILLS + 1, table_columns), dtype=torch.int32, device=device)
        room = self._parts.size + self._decode_tables.numel() + self._prefill_tables.numel()
        self._arrived = torch.zeros(room, dtype=torch.int32, device=device)
        self._inputs = self._parts.views(self._arrived)
        self._staging = HostStaging(room, device)
        self._hidden = torch.zeros((largest, model.hidden_size), dtype=model.dtype, device=device)
        self._fill(self._parts.views(self._staging.take()), (), 0)
        self._staging.send(self._arrived)
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record all sizes, largest first."""
        begin_s, pool = time.monotonic(), None
        for size in tqdm(self._sizes[::-1], desc="Capturing mixed graphs", unit="graph", disable=None):
            if not self._capture:
                self._replays[size] = lambda size=size: self._forward(size)  # type: ignore[misc]
                continue
            graph, hidden = self._record(size, pool)
            pool = pool or graph.pool()
            self._replays[size] = _replay(graph, hidden)
        logger.info("mixed graphs: %d sizes up to %d tokens in %.1f s", len(self._sizes), self._sizes[-1] - 1,
                    time.monotonic() - begin_s)  # fmt: skip

    def fits(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether a step of these chunks can be replayed."""
        if not self._replays or (self._model.deepstack_levels and any(chunk.embeds for chunk in chunks)):
            return False
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        if num_tokens >= self._sizes[-1] or len(chunks) - num_decodes > MAX_PREFILLS:
            return False
        return num_decodes <= self._decodes_of(self._size_for(num_tokens))

    @torch.inference_mode()
    def run(self, chunks: Sequence[SequenceChunk], hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] after the final norm, overwritten by the next call.

        Args:
            hidden: Input embeddings [T, hidden_size].
        """
        num_tokens = hidden.shape[0]
        size = self._size_for(num_tokens)
        decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
        prefills = [chunk for chunk in chunks if chunk.num_tokens > 1]
        buffer = self._staging.take()
        self._fill(self._parts.views(buffer), chunks, size)
        total = self._parts.size
        arrivals = []
        for target, group in ((self._decode_tables, decodes), (self._prefill_tables, prefills)):
            if group:
                tables = block_tables(group, self._block_size)
                buffer[total : total + tables.size] = tables.reshape(-1)
                arrivals.append((target, tables.shape, total))
                total += tables.size
        self._staging.send(self._arrived[:total])
        for target, shape, start in arrivals:
            target[: shape[0], : shape[1]].copy_(self._arrived[start : start + shape[0] * shape[1]].view(shape))
        self._hidden[:num_tokens].copy_(hidden)
        return self._replays[size]()[:num_tokens]

    def _size_for(self, num_tokens: int) -> int:
        return next(size for size in self._sizes if size > num_tokens)

    def _decodes_of(self, size: int) -> int:
        return min(MAX_DECODES, size - 1)

    def _tiles_of(self, size: int) -> int:
        return -(-size // self._backend.queries_per_tile) + MAX_PREFILLS

    def _fill(self, inputs: dict[str, np.ndarray], chunks: Sequence[SequenceChunk], size: int) -> None:
        """Write a step's inputs, padding included; `size` is its graph's."""
        for values in inputs.values():
            values.fill(0)
        inputs["slots"].fill(-1)
        inputs["rows"].fill(size - 1)
        inputs["tiles"][:, 0] = MAX_PREFILLS
        spans, num_decodes, row = [], 0, 0
        for chunk in chunks:
            stop = row + chunk.num_tokens
            inputs["positions"][:, row:stop] = chunk.positions
            inputs["slots"][row:stop] = chunk_slots(chunk, self._block_size)
            if chunk.num_tokens == 1:
                inputs["rows"][num_decodes], inputs["lengths"][num_decodes] = row, chunk.start + 1
                num_decodes += 1
            else:
                spans.append((row, chunk.start, chunk.num_tokens))
            row = stop
        if spans:
            inputs["spans"][: len(spans)] = spans
            tiles = self._backend.tiles(np.array(spans, np.int32))
            inputs["tiles"][: len(tiles)] = tiles

    def _forward(self, size: int) -> torch.Tensor:
        """[size, hidden_size] of the static inputs' first rows."""
        inputs, num_decodes = self._inputs, self._decodes_of(size)
        decode = DecodeRows(inputs["rows"][:num_decodes], inputs["lengths"][:num_decodes], self._decode_tables)
        prefill = PrefillRows(inputs["spans"], inputs["tiles"][: self._tiles_of(size)], self._prefill_tables)
        batch = self._backend.batch(inputs["slots"][:size], decode, prefill, split_for=_SPLIT_FOR)
        return self._model(self._hidden[:size], inputs["positions"][:, :size], batch)

    def _record(self, size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):  # kernels are compiled and libraries take their workspaces before capture
                self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile; only this thread's calls are recorded.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            hidden = self._forward(size)
        return graph, hidden


class _Parts:
    """Arrays side by side in one flat int32 buffer, on the host or on the device."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            self._places[name] = self.size, shape
            self.size += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT

    def views(self, flat: Any) -> dict[str, Any]:
        """The arrays in `flat`, an array or a tensor."""
        return {
            name: flat[start : start + int(np.prod(shape))].reshape(shape)
            for name, (start, shape) in self._places.items()
        }


def _replay(graph: torch.cuda.CUDAGraph, hidden: torch.Tensor) -> Callable[[], torch.Tensor]:
    def replay() -> torch.Tensor:
        graph.replay()
        return hidden

    return replay
