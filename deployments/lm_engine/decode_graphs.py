"""Decode steps replayed from CUDA graphs, one per batch size. A step pads to the next larger size.

    plan ──pack──▶ one pinned transfer ──▶ static ids, slots, lengths, positions, tables ──replay──▶ static logits
                                            └── ids still pending: from the step before

All graphs record into one memory pool, largest first, so that smaller ones reuse its blocks. A padding row has length
0 and no slot: it stores nothing, attends to nothing and its logits are not handed out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from deployments.lm_engine.device_copy import HostStaging, to_device
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.model_runner import fill_pending
from deployments.lm_engine.plan import SequenceChunk
from deployments.lm_engine.triton_attention import DecodeRows, TritonBackend, block_tables

logger = logging.getLogger(__name__)

_WARM_UP_CALLS = 2
_ID, _SLOT, _LENGTH, _POSITION = range(4)
"""Rows of the static inputs; positions take one row per axis."""


class DecodeGraphs:
    """Args:
    sizes: Batch sizes, ascending.
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
        self._model, self._backend, self._block_size = model, backend, block_size
        self._sizes = tuple(sizes)
        self._axes = model.position_rule.axes
        device = model.device
        # Rows start at multiples of 16 bytes, as kernels compiled for aligned pointers expect.
        width = -(-self._sizes[-1] // 16) * 16
        self._tables = torch.zeros((width, -(-max_blocks // 16) * 16), dtype=torch.int32, device=device)
        # Where transfers arrive: the inputs, where graphs read them, then as many tables as the step has.
        num_inputs = (_POSITION + self._axes) * width
        self._arrived = torch.zeros(num_inputs + self._tables.numel(), dtype=torch.int32, device=device)
        self._inputs = self._arrived[:num_inputs].view(-1, width)
        self._inputs[_SLOT] = -1
        self._staging = HostStaging(self._arrived.numel(), device)
        self._rows = torch.arange(width, dtype=torch.int32, device=device)
        self._capture = capture
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that can run; empty before `prepare`."""
        return tuple(sorted(self._replays))

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record all sizes, largest first."""
        begin_s, pool = time.monotonic(), None
        for size in tqdm(self._sizes[::-1], desc="Capturing decode graphs", unit="graph", disable=None):
            if not self._capture:
                self._replays[size] = lambda size=size: self._forward(size)  # type: ignore[misc]
                continue
            graph, logits = self._record(size, pool)
            pool = pool or graph.pool()
            self._replays[size] = _replay(graph, logits)
        logger.info("decode graphs: %d sizes up to %d in %.1f s", len(self._sizes), self._sizes[-1],
                    time.monotonic() - begin_s)  # fmt: skip

    def fits(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether a step of these chunks can be replayed: one token each, none of it an item's."""
        return (
            bool(self._replays)
            and 0 < len(chunks) <= self._sizes[-1]
            and all(chunk.num_tokens == 1 and not chunk.embeds for chunk in chunks)
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[SequenceChunk], previous: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits [sampling chunks, vocab_size]; overwritten by the next call. `previous` as in ModelRunner."""
        num = len(chunks)
        size = next(size for size in self._sizes if size >= num)
        tables = block_tables(chunks, self._block_size)
        is_pending = self._send(chunks, tables)
        if is_pending:
            fill_pending(self._inputs[_ID, :num], previous)
        self._tables[:num, : tables.shape[1]].copy_(
            self._arrived[self._inputs.numel() : self._inputs.numel() + tables.size].view(tables.shape)
        )
        logits = self._replays[size]()[:num]
        if all(chunk.samples for chunk in chunks):
            return logits
        sampling = np.array([row for row, chunk in enumerate(chunks) if chunk.samples], np.int64)
        return logits[to_device(sampling, logits.device)]

    def _send(self, chunks: Sequence[SequenceChunk], tables: np.ndarray) -> bool:
        """Transfer a step's inputs; True if some of its ids are pending."""
        buffer, num, block_size = self._staging.take(), len(chunks), self._block_size
        packed = buffer[: self._inputs.numel()].reshape(self._inputs.shape)
        packed.fill(0)
        packed[_SLOT] = -1
        packed[_ID, :num] = [chunk.token_ids[0] for chunk in chunks]
        packed[_SLOT, :num] = [
            chunk.block_ids[chunk.start // block_size] * block_size + chunk.start % block_size for chunk in chunks
        ]
        packed[_LENGTH, :num] = [chunk.start + 1 for chunk in chunks]
        packed[_POSITION:, :num] = np.concatenate([chunk.positions for chunk in chunks], axis=1)
        is_pending = bool(packed[_ID, :num].min() < 0)
        total = packed.size + tables.size
        buffer[packed.size : total] = tables.reshape(-1)
        self._staging.send(self._arrived[:total])
        return is_pending

    def _forward(self, size: int) -> torch.Tensor:
        """float32 logits [size, vocab_size] of the static inputs' first rows."""
        decode = DecodeRows(self._rows[:size], self._inputs[_LENGTH, :size], self._tables[:size])
        batch = self._backend.batch(self._inputs[_SLOT, :size], decode, None)
        hidden = self._model.embed_tokens(self._inputs[_ID, :size])
        hidden = self._model(hidden, self._inputs[_POSITION:, :size], batch)
        return self._model.logits(hidden).float()

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
            logits = self._forward(size)
        return graph, logits


def _replay(graph: torch.cuda.CUDAGraph, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay
