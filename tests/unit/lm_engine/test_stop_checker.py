from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.lm_engine.stop_checker import Stop, StopStrings, TokenStop
from deployments.messages import SamplingParams

EOS = (2, 0)


def token_stop(**options: Any) -> TokenStop:
    return TokenStop(SamplingParams(**({"max_tokens": 5} | options)), EOS)


@pytest.mark.parametrize(
    ("options", "token_id", "num_output_tokens", "expected"),
    [
        ({}, 9, 1, None),
        ({}, 2, 1, Stop("stop")),
        ({}, 9, 5, Stop("length")),
        ({}, 2, 5, Stop("stop")),
        ({"ignore_eos": True}, 2, 1, None),
        ({"ignore_eos": True}, 2, 5, Stop("length")),
        ({"stop_token_ids": (9,)}, 9, 1, Stop("stop", 9)),
        ({"stop_token_ids": (9,), "ignore_eos": True}, 9, 1, Stop("stop", 9)),
        ({"min_tokens": 3}, 2, 2, None),
        ({"min_tokens": 3}, 2, 3, Stop("stop")),
    ],
)
def test_tokens(options: dict[str, Any], token_id: int, num_output_tokens: int, expected: Stop | None) -> None:
    assert token_stop(**options).check(token_id, num_output_tokens) == expected


def test_banned_ids_are_all_that_would_end_it() -> None:
    assert token_stop(stop_token_ids=(9,)).banned_ids == (0, 2, 9)
    assert token_stop(stop_token_ids=(9,), ignore_eos=True).banned_ids == (9,)


def feed_all(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """Text shown, stop found, and what was shown before each piece."""
    shown, seen = "", []
    for piece in pieces:
        text, found = stops.feed(piece)
        shown += text
        seen.append(shown)
        if found is not None:
            return shown, found, seen
    return shown + stops.flush(), None, seen


def test_text_that_may_become_a_stop_is_held_back() -> None:
    stops = StopStrings(["END"])
    assert stops.feed("the E") == ("the ", None)
    assert stops.feed("N") == ("", None)
    assert stops.feed("E") == ("EN", None)
    assert stops.feed("NDx") == ("", "END")


def test_the_longest_possible_start_is_held_back() -> None:
    stops = StopStrings(["aab"])
    assert stops.feed("xaa") == ("x", None)
    assert stops.feed("b") == ("", "aab")


def test_the_earliest_stop_wins_and_text_after_it_is_gone() -> None:
    assert StopStrings(["later", "b"]).feed("a b later") == ("a ", "b")
    assert StopStrings(["b"], include_in_output=True).feed("a b later") == ("a b", "b")


def test_without_stops_nothing_is_held() -> None:
    stops = StopStrings([])
    assert stops.feed("abc") == ("abc", None)
    assert stops.flush() == ""


def test_text_before_min_tokens_is_never_searched() -> None:
    stops = StopStrings(["ab"])
    assert stops.skip("xab a") == "xab a"
    assert stops.feed("b") == ("b", None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.booleans(),
)
def test_pieces_end_where_the_whole_text_would(stop_list: list[str], pieces: list[str], include: bool) -> None:
    shown, found, seen = feed_all(StopStrings(stop_list, include_in_output=include), pieces)
    text = "".join(pieces)
    # Piece by piece the first stop to be complete wins; cut the text after the piece in which that happens.
    for count in range(1, len(pieces) + 1):
        prefix = "".join(pieces[:count])
        hits = [(prefix.find(stop), order) for order, stop in enumerate(stop_list) if stop in prefix]
        if hits:
            at, order = min(hits)
            stop = stop_list[order]
            assert (shown, found) == (prefix[: at + len(stop) if include else at], stop)
            break
    else:
        assert (shown, found) == (text, None)
    final = shown
    assert all(final.startswith(early) for early in seen), "something shown was taken back"
