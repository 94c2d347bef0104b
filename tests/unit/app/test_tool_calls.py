from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tool_calls import ArgumentsPiece, CallStart, ContentPiece, HermesToolParser, ToolEvent

CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo", "n": [1, {"a": "}"}]}}\n</tool_call>'
ARGUMENTS = '{"city": "Oslo", "n": [1, {"a": "}"}]}'


def read(pieces: Iterable[str], parser: HermesToolParser | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content, and each call's name and arguments, put together as a client would."""
    parser = parser or HermesToolParser()
    events: list[ToolEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    content = ""
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ContentPiece):
            assert event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        else:
            calls[event.index][1] += event.text
    assert parser.num_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


TEXTS = {
    CALL: ("", [("get", ARGUMENTS)]),
    f"Let me see. \n{CALL}": ("Let me see.", [("get", ARGUMENTS)]),
    f"{CALL}\n{CALL}": ("", [("get", ARGUMENTS), ("get", ARGUMENTS)]),
    f"{CALL}\n done": ("done", [("get", ARGUMENTS)]),
    CALL.replace("\n", ""): ("", [("get", ARGUMENTS)]),
    '<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call>': ("", [("late", '{"x": 1}')]),
    '<tool_call>{"name": "bare"}</tool_call>': ("", [("bare", "{}")]),
    '<tool_call>{"name": "q", "arguments": {"s": "</tool_call> \\" <tool_call>"}}</tool_call>': (
        "",
        [("q", '{"s": "</tool_call> \\" <tool_call>"}')],
    ),
    '<tool_call>{"name": "x", "extra": [1, "}"], "arguments": {}}</tool_call>': ("", [("x", "{}")]),
    # Cut short by the length limit.
    '<tool_call>\n{"name": "get", "arguments": {"city": "Os': ("", [("get", '{"city": "Os')]),
    f"{CALL[:-4]}": ("", [("get", ARGUMENTS)]),
    '<tool_call>\n{"na': ('<tool_call>\n{"na', []),
    # No calls at all.
    "a < b and <tool> or <tool_cal": ("a < b and <tool> or <tool_cal", []),
    "plain words \n ": ("plain words \n ", []),
    "hi <tool_call>nonsense": ("hi <tool_call>nonsense", []),
    "hi <tool_call>{}": ("hi <tool_call>{}", []),
    'hi <tool_call>{"name": 5, "arguments": {}}': ('hi <tool_call>{"name": 5, "arguments": {}}', []),
    'hi <tool_call>{"name": "x", "arguments": 5}': ('hi <tool_call>{"name": "x", "arguments": 5}', []),
    f"<tool_call>oops {CALL}": ("<tool_call>oops", [("get", ARGUMENTS)]),
    "": ("", []),
}


@pytest.mark.parametrize("text", TEXTS)
def test_whole_text(text: str) -> None:
    assert read([text]) == TEXTS[text]


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_position(text: str) -> None:
    for i in range(len(text) + 1):
        assert read([text[:i], text[i:]]) == TEXTS[text], f"split at {i}"
    assert read(list(text)) == TEXTS[text]


@given(st.sampled_from(list(TEXTS)), st.lists(st.integers(0, 200), max_size=8))
def test_any_splits(text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert read(pieces) == TEXTS[text]


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {', "}", '"', " ", "x"]))
)
def test_fragments_never_fail_and_do_not_depend_on_the_cut(fragments: list[str]) -> None:
    text = "".join(fragments)
    assert read(fragments) == read([text]) == read(list(text))


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text())), st.booleans())
def test_arguments_come_through_unchanged(arguments: dict[str, object], ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    assert read(list(text)) == ("", [("f", written)])


def test_name_is_announced_before_the_arguments_are_complete() -> None:
    parser = HermesToolParser()
    assert parser.feed('<tool_call>\n{"name": "get", "arguments": {"c') == [
        CallStart(0, "get"),
        ArgumentsPiece(0, '{"c'),
    ]
    assert parser.feed("ity") == [ArgumentsPiece(0, "ity")]


def test_text_that_cannot_become_a_tag_is_not_held_back() -> None:
    parser = HermesToolParser()
    assert parser.feed("a <tool") == [ContentPiece("a")]
    assert parser.feed("box") == [ContentPiece(" <toolbox")]


@pytest.mark.parametrize("text", ["", "<tool", "<tool_call>\n", '<tool_call>\n{"name": "ge'])
def test_a_forced_call_that_is_cut_short_is_a_call(text: str) -> None:
    assert read([text], HermesToolParser(forced=True, forced_name="get")) == ("", [("get", "")])
    assert read([text], HermesToolParser(forced=True)) == ("", [])
