"""Runs step plans. Anything on the device happens here or below; nothing here decides what runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from cache_service.identity import EmbeddingIdentity
from deployments.errors import InternalError
from deployments.lm_engine.attention import AttentionBackend
from deployments.lm_engine.device_copy import to_device
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.plan import SequenceChunk, StepPlan


class DecodeReplay(Protocol):
    """Runs steps of single tokens faster than the eager pass; see decode_graphs.DecodeGraphs."""

    def fits(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether `run` can take these chunks."""

    def run(self, chunks: Sequence[SequenceChunk], previous: torch.Tensor | None) -> torch.Tensor:
        """float32 logits [sampling chunks, vocab_size], valid until the next call; `previous` as in ModelRunner."""


class MixedReplay(Protocol):
    """Runs steps of any chunks faster than the eager pass; see mixed_graphs.MixedGraphs."""

    def fits(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether `run` can take these chunks."""

    def run(self, chunks: Sequence[SequenceChunk], hidden: torch.Tensor) -> torch.Tensor:
        """From input embeddings [T, hidden_size] to what the head reads, alike; valid until the next call."""


class ModelRunner:
    """One forward pass per plan, over all chunks at once.

    Args:
        backend: Attention over the KV pools that the plans' block ids index.
        embeds: Where item embeddings lie; the runner drops what a plan evicts before anything new is put.
        decodes, mixed: Take the steps that fit them, decodes first; the others run eagerly.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        embeds: EmbedStore,
        decodes: DecodeReplay | None = None,
        mixed: MixedReplay | None = None,
    ) -> None:
        self._model, self._backend, self._embeds = model, backend, embeds
        self._decodes, self._mixed = decodes, mixed

    @property
    def embed_width(self) -> int:
        return self._model.embed_width

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def embed_bytes(self) -> int:
        """Bytes of embeddings resident on the device."""
        return self._embeds.num_bytes

    def has_embedding(self, identity: EmbeddingIdentity) -> bool:
        return identity in self._embeds

    def drop_embeddings(self, identities: Iterable[EmbeddingIdentity]) -> None:
        self._embeds.drop(identities)

    def clear_embeddings(self) -> None:
        self._embeds.clear()

    def put_embedding(self, identity: EmbeddingIdentity, embeddings: torch.Tensor) -> None:
        """Make rows [num_slots, embed_width] resident, in the model's precision."""
        if embeddings.is_cuda:
            # An encoder in this process allocated them on its own stream and reuses the memory as soon as it is freed;
            # work queued here may still read it then.
            embeddings.record_stream(torch.cuda.current_stream(embeddings.device))
        self._embeds.put(identity, embeddings.to(self._model.device, self._model.dtype))

    @torch.inference_mode()
    def run(self, plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        """Advance all chunks; only queues the work where the device works by itself.

        Args:
            previous: int64 [rows], the tokens that the step before drew; the plan's pending tokens point into them.

        Returns:
            float32 logits [sampling chunks, vocab_size], in the plan's order; valid until the next call.

        Raises:
            InternalError: The plan uses an embedding that is not resident, or a pending token that was never drawn.
        """
        self._embeds.drop(plan.evicted_embeds)
        if not plan.chunks:
            return torch.empty(0, self._model.vocab_size)
        if self._decodes is not None and self._decodes.fits(plan.chunks):
            return self._decodes.run(plan.chunks, previous)
        token_ids = np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in plan.chunks])
        # All copies go first: one that had to wait for the pass would hold up the host.
        sampling_rows = self._to_device(_sampling_rows(plan.chunks))
        ids = self._to_device(token_ids)
        if token_ids.min() < 0:
            fill_pending(ids, previous)
        hidden = self._model.embed_tokens(ids)
        visual_rows, deepstack = self._splice(hidden, plan.chunks)
        if self._mixed is not None and self._mixed.fits(plan.chunks):
            hidden = self._mixed.run(plan.chunks, hidden)
        else:
            positions = np.concatenate([chunk.positions for chunk in plan.chunks], axis=1).astype(np.int64)
            batch = self._backend.prepare(plan.chunks)
            hidden = self._model(hidden, self._to_device(positions), batch, visual_rows, deepstack)
        return self._model.logits(hidden[sampling_rows]).float()

    def _splice(
        self, hidden: torch.Tensor, chunks: Iterable[SequenceChunk]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Overwrite placeholder rows of `hidden` in place; returns their mask and the deepstack levels' rows."""
        width, row = self._model.hidden_size, 0
        mask = np.zeros(hidden.shape[0], np.bool_)
        deeper: list[torch.Tensor] = []
        for chunk in chunks:
            for piece in chunk.embeds:
                start = row + piece.chunk_start
                rows = self._rows(piece.identity, piece.item_start, piece.num_slots)
                hidden[start : start + piece.num_slots] = rows[:, :width]
                mask[start : start + piece.num_slots] = True
                deeper.append(rows[:, width:])
            row += chunk.num_tokens
        if not deeper:
            return None, []
        levels = self._model.deepstack_levels
        stacked = torch.cat(deeper) if levels else None
        return self._to_device(mask), [] if stacked is None else list(stacked.split(width, dim=1))

    def _rows(self, identity: EmbeddingIdentity, start: int, num_rows: int) -> torch.Tensor:
        try:
            rows = self._embeds.rows(identity, start, num_rows)
        except KeyError:
            raise InternalError("the step plan uses an embedding that is not resident") from None
        if rows.shape[0] != num_rows:
            raise InternalError(f"the step plan uses {num_rows} embedding rows of which {rows.shape[0]} are resident")
        return rows

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._model.device)


def fill_pending(ids: torch.Tensor, previous: torch.Tensor | None) -> None:
    """Put the tokens that the step before drew in the places of `ids` that stand for them (plan.pending_token)."""
    if previous is None:
        raise InternalError("the step plan uses tokens of a step that drew none")
    ids.copy_(torch.where(ids < 0, previous[(-1 - ids).clamp_min(0)], ids))


def _sampling_rows(chunks: Iterable[SequenceChunk]) -> np.ndarray:
    """Flat row of the last token of every chunk that samples."""
    rows, row = [], 0
    for chunk in chunks:
        row += chunk.num_tokens
        if chunk.samples:
            rows.append(row - 1)
    return np.asarray(rows, np.int64)
