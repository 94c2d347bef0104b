"""Penalties, biases and bans: sparse edits of logits, one gather and one scatter for the whole batch.

Only tokens that a sequence has seen can be penalised, so what is kept per sequence is their ids and counts, not a row
of the vocabulary. Presence and frequency count output tokens; repetition counts the prompt too (CTRL,
arXiv:1909.05858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_INITIAL_CAPACITY = 64


class TokenCounts:
    """How often each token stands in a sequence's output; tokens of the prompt count zero."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        unique = np.unique(np.asarray(prompt_token_ids, np.int64))
        capacity = unique.size + _INITIAL_CAPACITY
        self._ids = np.empty(capacity, np.int64)
        self._ids[: unique.size] = unique
        self._counts = np.zeros(capacity, np.float32)
        self._index = {token_id: position for position, token_id in enumerate(unique.tolist())}

    def add(self, token_id: int) -> None:
        position = self._index.setdefault(token_id, len(self._index))
        if position == self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[position] = token_id
        self._counts[position] += 1

    @property
    def ids(self) -> np.ndarray:
        """int64 [distinct tokens], a view."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [distinct tokens], a view aligned with `ids`."""
        return self._counts[: len(self._index)]


@dataclass(frozen=True, slots=True)
class PenaltyRow:
    """Penalties of one row of logits; meanings and ranges are the OpenAI API's and (repetition) transformers'."""

    row: int
    tokens: TokenCounts
    presence: float
    frequency: float
    repetition: float


def apply_penalties(logits: torch.Tensor, rows: Sequence[PenaltyRow]) -> None:
    """Penalise seen tokens, in place. `logits` is float32 [n, vocab_size]; each row is named at most once."""
    if not rows:
        return
    sizes = [row.tokens.ids.size for row in rows]
    where = np.repeat([row.row for row in rows], sizes), np.concatenate([row.tokens.ids for row in rows])
    counts = np.concatenate([row.tokens.counts for row in rows])
    additive = counts * np.repeat([row.frequency for row in rows], sizes)
    additive += (counts > 0) * np.repeat([row.presence for row in rows], sizes)
    index = tuple(torch.from_numpy(axis).to(logits.device) for axis in where)
    penalty = torch.from_numpy(np.repeat([row.repetition for row in rows], sizes).astype(np.float32)).to(logits.device)
    values = logits[index]
    values = torch.where(values > 0, values / penalty, values * penalty)
    logits[index] = values - torch.from_numpy(additive.astype(np.float32)).to(logits.device)


@dataclass(frozen=True, slots=True)
class Edit:
    """Values added to some tokens of one row; -inf bans a token."""

    row: int
    ids: Sequence[int]
    values: Sequence[float]


def apply_edits(logits: torch.Tensor, edits: Sequence[Edit]) -> None:
    """Add each edit's values, in place; a token named twice gets both."""
    if not edits:
        return
    rows = [edit.row for edit in edits for _ in edit.ids]
    ids = [token_id for edit in edits for token_id in edit.ids]
    values = torch.tensor([value for edit in edits for value in edit.values], dtype=logits.dtype, device=logits.device)
    index = torch.tensor([rows, ids], dtype=torch.int64, device=logits.device)
    logits.index_put_((index[0], index[1]), values, accumulate=True)
