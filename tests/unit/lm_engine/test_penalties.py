from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.lm_engine.penalties import Edit, PenaltyRow, TokenCounts, apply_edits, apply_penalties

VOCAB = 12
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=100)


def penalise(row: torch.Tensor, prompt: list[int], output: list[int], p: float, f: float, r: float) -> torch.Tensor:
    """One row, token by token, as the definitions say."""
    row = row.clone()
    counts = Counter(output)
    for token in range(VOCAB):
        if token in counts or token in prompt:
            row[token] = row[token] / r if row[token] > 0 else row[token] * r
        row[token] -= f * counts[token] + p * (counts[token] > 0)
    return row


@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=4), st.integers(0, 2**31))
def test_batches_equal_the_definitions(sequences: list[tuple[list[int], list[int]]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(sequences) + 1, VOCAB, generator=generator)
    expected, rows = logits.clone(), []
    for row, (prompt, output) in enumerate(sequences):
        options = (0.5 * row, 0.25, 1.0 + 0.5 * row)
        tokens = TokenCounts(prompt)
        for token in output:
            tokens.add(token)
        rows.append(PenaltyRow(row, tokens, *options))
        expected[row] = penalise(logits[row], prompt, output, *options)
    apply_penalties(logits, rows)
    torch.testing.assert_close(logits, expected)


def test_counts_grow_past_their_first_capacity() -> None:
    tokens = TokenCounts([5, 5])
    for token in range(1000):
        tokens.add(token)
    assert tokens.ids.size == 1000
    assert tokens.counts.sum() == 1000


def test_edits_add_up_and_ban() -> None:
    logits = torch.zeros(2, 4)
    apply_edits(logits, [Edit(0, (1, 1), (2.0, 3.0)), Edit(1, (0,), (float("-inf"),)), Edit(1, (), ())])
    assert logits.tolist() == [[0, 5, 0, 0], [float("-inf"), 0, 0, 0]]


def test_nothing_to_do_is_nothing_done() -> None:
    logits = torch.zeros(1, 4)
    apply_penalties(logits, [])
    apply_edits(logits, [])
    assert not logits.any()
