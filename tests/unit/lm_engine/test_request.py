from __future__ import annotations

from deployments.lm_engine.request import SequenceStatus
from tests.unit.lm_engine.host_side import sequence


def test_tokens_are_prompt_then_output() -> None:
    seq = sequence("a", [1, 2], (5, 3), [4])
    seq.token_ids.append(9)
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.output_token_ids, seq.num_output_tokens) == (6, 7, [9], 1)
    assert list(seq.prompt_token_ids) == [1, 2, 999, 999, 999, 4]


def test_items_know_their_span() -> None:
    (item,) = sequence("a", [1, 2], (5, 3), [4]).items
    assert (item.offset, item.end, item.num_slots, item.num_patches) == (2, 5, 3, 12)


def test_statuses_are_ordered_so_that_the_end_is_a_comparison() -> None:
    seq = sequence("a", [1])
    ends = []
    for status in SequenceStatus:
        seq.status = status
        ends.append(seq.is_finished)
    assert ends == [False, False, False, True, True, True]


def test_sequences_are_equal_only_to_themselves() -> None:
    assert sequence("a", [1]) != sequence("a", [1])
