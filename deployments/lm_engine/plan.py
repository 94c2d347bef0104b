"""The step plan: all that the scheduler tells the device side, frozen. Knows no tensors.

One step advances some sequences by some tokens each. There is no prefill or decode phase: a chunk covers positions
[start, start + num_tokens) of a sequence's tokens (prompt, then output), and the last position samples a token if the
chunk reaches the end of what is known.

    prompt     t t t P P P P P P t t        P = placeholder of one item, span (offset=3, num_slots=6)
    chunk              [-------)            start=5, num_tokens=4
    EmbedSlice         chunk_start=0, item_start=2, num_slots=4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_service.identity import EmbeddingIdentity
from deployments.messages import MediaItem


def pending_token(row: int) -> int:
    """Stands for a token that the step before drew and the host does not know yet: that step's sampling row `row`.

    Negative, so that no token id can be mistaken for one; -1 - value gives the row back.
    """
    return -1 - row


@dataclass(frozen=True, slots=True)
class EmbedSlice:
    """Rows of a resident embedding that overwrite token embeddings of a chunk."""

    identity: EmbeddingIdentity
    chunk_start: int
    """First token of the chunk that is overwritten."""
    item_start: int
    """First row of the item's embeddings that is used."""
    num_slots: int


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """One sequence's share of a step."""

    sequence_id: str
    start: int
    """Tokens already in the KV cache = position of the chunk's first token."""
    token_ids: Sequence[int]
    positions: np.ndarray
    """int32 [axes, num_tokens] rotary positions (3 axes for M-RoPE, else 1)."""
    block_ids: Sequence[int]
    """The sequence's whole block table: a view of scheduler state, valid until the next `schedule()`."""
    samples: bool
    """Whether the chunk's last position yields a token."""
    embeds: tuple[EmbedSlice, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class EncodeStart:
    """Slots are reserved for this item: ask the encoder for it now."""

    identity: EmbeddingIdentity
    item: MediaItem
    sequence_id: str
    """The first sequence that wants it; others may have joined."""
    ticket: int = 0
    """Number of this encode. Report it with a failure, so that a late one of a cancelled encode is told apart."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[SequenceChunk, ...] = ()
    encode: tuple[EncodeStart, ...] = ()
    evicted_embeds: tuple[EmbeddingIdentity, ...] = ()
    """Logically evicted already; the embedding store drops the tensors before it takes new ones.

    An identity whose encode is still in flight means: cancel it and drop its result. Handle these before `encode`,
    which may start the same item anew."""
    preempted: tuple[str, ...] = ()
    """Sequences whose blocks were taken this step; they recompute later."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.encode or self.evicted_embeds)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the device side answers for one sampling chunk."""

    sequence_id: str
    token_id: int
