"""Streams as they come in, whole and broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.load.answer import AnswerReader, EventLines, Outcome, describe
from tests.unit.bench.fake_server import event

ROLE = event({"role": "assistant", "content": ""})
END = event({}, "length")
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes) -> Outcome:
    """Pieces arrive a second apart, the first a second after the question."""
    outcome = Outcome(begun_s=100.0)
    reader = AnswerReader(outcome)
    for number, piece in enumerate(pieces, start=1):
        reader.feed(piece, 100.0 + number)
    reader.end(200.0)
    return outcome


def test_a_whole_answer() -> None:
    outcome = read(ROLE, event({"content": "a"}), event({"content": ""}), event({"content": "c"}), END + USAGE + DONE)
    assert outcome.error is None
    # The opening comes with the first token, whose text may follow later; it is no piece to measure a gap from.
    assert outcome.ttft_s == 1
    assert outcome.tpot_s == 2
    assert list(outcome.gaps_s()) == [1, 1]
    assert outcome.e2e_s == 100
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.finish_reason) == (9, 3, "length")


def test_an_opening_with_text_is_a_piece() -> None:
    outcome = read(event({"role": "assistant", "content": "a"}), event({"content": "b"}), END + USAGE + DONE)
    assert list(outcome.gaps_s()) == [1]


def test_an_answer_of_tokens_without_text_is_an_answer() -> None:
    outcome = read(ROLE, END + USAGE + DONE)
    assert outcome.error is None
    assert (outcome.ttft_s, outcome.tpot_s, list(outcome.gaps_s())) == (1, 0.5, [])


def test_thoughts_and_calls_are_tokens() -> None:
    outcome = read(event({"reasoning_content": "hm"}), event({"tool_calls": [{"index": 0}]}), END + USAGE + DONE)
    assert len(outcome.piece_s) == 2


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((ROLE, event({"content": "a"})), "stream cut"),
        ((event({"content": "a"}), END + USAGE), "stream cut"),
        ((event({"content": "a"}), DONE), "stream cut"),
        ((ROLE, END + DONE), "no tokens"),
        ((), "stream cut"),
        ((event({"content": "a"}), b'data: {"error": {"code": "replica_lost", "message": "gone"}}\n\n'),
         "stream error replica_lost"),
        ((b"data: {oops\n\n", event({"content": "a"}), END + DONE), "event is no JSON"),
    ],
)  # fmt: skip
def test_what_can_go_wrong_has_a_name(pieces: tuple[bytes, ...], kind: str) -> None:
    assert read(*pieces).error == kind


def test_one_token_has_no_time_per_token() -> None:
    assert Outcome(begun_s=0.0, first_s=1.0, last_s=2.0, completion_tokens=1).tpot_s is None


def test_the_first_failure_is_kept_and_cut_short() -> None:
    outcome = Outcome(begun_s=0.0)
    outcome.fail("one", "x" * 1000)
    outcome.fail("two")
    assert (outcome.error, len(outcome.detail)) == ("one", 200)


def test_errors_of_any_form_are_described() -> None:
    assert describe("HTTP 400", {"message": "m", "code": "c"}) == ("HTTP 400 c", "m")
    assert describe("HTTP 400", {"message": "m", "type": "t", "code": None}) == ("HTTP 400 t", "m")
    assert describe("HTTP 400", "text") == ("HTTP 400", "text")


@given(st.lists(st.integers(1, 40), max_size=20), st.booleans())
def test_the_network_may_cut_anywhere(lengths: list[int], carriage_returns: bool) -> None:
    whole = b": keep-alive\n\n" + ROLE + event({"content": "größer"}) + END + DONE
    if carriage_returns:
        whole = whole.replace(b"\n", b"\r\n")
    lines, found, start = EventLines(), list[bytes](), 0
    for length in [*lengths, len(whole)]:
        found += lines.feed(whole[start : start + length])
        start += length
    assert found == list(EventLines().feed(whole))
    assert len(found) == 4
