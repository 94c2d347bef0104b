"""Tool calls in a model's text, in the Hermes form that Qwen models are trained on, read as the text arrives.

    some words <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

`feed()` takes text in any pieces and returns what is known by then; `finish()` returns the rest. The events do not
depend on where the text is cut, so that streamed and whole answers are made by one path:

- Text outside calls is content. White space next to a call belongs to the call's form and is dropped.
- A call is announced once its name is known, and its arguments follow as pieces of JSON text. The end of the JSON
  object ends the call, and so does the end of the text.
- What opens like a call but is none (no JSON object, no name, arguments that are no object) is content, tag and all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ContentPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    """Position of the call among the calls of this answer."""
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    index: int
    text: str


ToolEvent = ContentPiece | CallStart | ArgumentsPiece


class _State(Enum):
    CONTENT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class HermesToolParser:
    """One per choice.

    Args:
        forced: A grammar allows nothing but calls, so a call that is cut short is a call, never content.
        forced_name: The one function that can be called, if there is only one: known even where the text is cut
            before its name.
    """

    def __init__(self, *, forced: bool = False, forced_name: str | None = None) -> None:
        self._forced, self._forced_name = forced, forced_name
        self.num_calls = 0
        self._state = _State.CONTENT
        self._held = ""
        """Text not yet accounted for: a possible tag, white space before one, or what follows a call."""
        self._call: _CallReader | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        self._held += text
        return _merge(self._advance())

    def finish(self) -> list[ToolEvent]:
        """What is left when the text has ended."""
        return _merge(self._end())

    def _advance(self) -> Iterator[ToolEvent]:
        while self._held:
            before = (self._state, len(self._held))
            if self._state is _State.CONTENT:
                yield from self._read_content()
            elif self._state is _State.CALL:
                yield from self._read_call()
            else:
                self._read_after_call()
            if (self._state, len(self._held)) == before:
                return

    def _read_content(self) -> Iterator[ToolEvent]:
        position = self._held.find(CALL_OPEN)
        if position >= 0:
            content = self._held[:position].rstrip(_SPACE)
            if content:
                yield ContentPiece(content)
            # Kept whole until the call is certain: it may turn out to be content.
            self._held, self._state = self._held[len(content) :], _State.CALL
            self._call = _CallReader()
            lead = self._held.index(CALL_OPEN) + len(CALL_OPEN)
            self._call.raw, self._held = self._held[:lead], self._held[lead:]
            return
        keep = _possible_tag(self._held, CALL_OPEN)
        content = self._held[: len(self._held) - keep].rstrip(_SPACE)
        if content:
            yield ContentPiece(content)
            self._held = self._held[len(content) :]

    def _read_call(self) -> Iterator[ToolEvent]:
        call = self._call
        assert call is not None
        used = call.read(self._held)
        self._held = self._held[used:]
        yield from self._report(call)
        if call.failed:
            yield from self._give_back(call)
        elif call.done:
            self.num_calls += 1
            self._call, self._state = None, _State.AFTER_CALL

    def _report(self, call: _CallReader) -> Iterator[ToolEvent]:
        if call.name is not None and call.arguments and not call.failed:
            if not call.announced:
                call.announced = True
                yield CallStart(self.num_calls, call.name)
            yield ArgumentsPiece(self.num_calls, call.arguments)
            call.arguments = ""

    def _give_back(self, call: _CallReader) -> Iterator[ToolEvent]:
        """A call that is none: its text is content, unless it has been announced already."""
        self._call, self._state = None, _State.CONTENT
        if call.announced:
            self.num_calls += 1
        else:
            yield ContentPiece(call.raw)

    def _read_after_call(self) -> None:
        """Drop the closing tag and the white space around it; a missing tag is forgiven."""
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(CALL_CLOSE):
            self._held, self._state = rest[len(CALL_CLOSE) :].lstrip(_SPACE), _State.AFTER_CALL
        elif rest and not CALL_CLOSE.startswith(rest):
            self._held, self._state = rest, _State.CONTENT
        else:
            self._held = rest

    def _end(self) -> Iterator[ToolEvent]:
        call = self._call
        if call is not None and call.announced:
            self.num_calls += 1
        elif call is not None and not self._forced:
            yield ContentPiece(call.raw)
        elif self._state is _State.CONTENT and self._held and not self._forced:
            yield ContentPiece(self._held)
        # What is held after a call is white space or the beginning of a closing tag.
        if self._forced_name is not None and not self.num_calls:
            yield CallStart(0, self._forced_name)
            self.num_calls = 1
        self._call, self._held, self._state = None, "", _State.CONTENT


class _CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, keys in any order, and keeps the arguments' text as it was written.

    Knows just enough of JSON to find where values end: strings, escapes and nesting.
    """

    def __init__(self) -> None:
        self.raw = ""
        """Everything since the opening tag, with white space before it, for the case that this is no call."""
        self.name: str | None = None
        self.arguments = ""
        """Text of the arguments that has not been reported."""
        self.announced = False
        self.done = False
        self.failed = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._expect_key = True
        self._token = ""
        """Text of the key or of the value at depth 1 that is being read."""
        self._saw_arguments = False

    def read(self, text: str) -> int:
        """Characters used; fewer than all once the call is done or has failed."""
        for position, character in enumerate(text):
            self._take(character)
            if self.done or self.failed:
                self.raw += text[: position + 1]
                return position + 1
        self.raw += text
        return len(text)

    def _take(self, character: str) -> None:
        if self._in_string:
            self._take_in_string(character)
        elif self._depth == 0:
            self._open(character)
        elif character == '"':
            self._in_string = True
            self._append(character)
        elif character in "{[":
            self._depth += 1
            self._append(character)
        elif character in "}]":
            self._close(character)
        elif self._depth == 1 and character in ":,":
            self._separate(character)
        elif self._depth > 1 or character not in _SPACE:
            self._append(character)

    def _take_in_string(self, character: str) -> None:
        self._append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _open(self, character: str) -> None:
        if character == "{":
            self._depth = 1
        elif character not in _SPACE:
            self.failed = True

    def _close(self, character: str) -> None:
        if self._depth > 1:
            self._depth -= 1
            self._append(character)
            return
        if character != "}":
            self.failed = True
            return
        if not self._expect_key:
            self._end_value()
        if self.name is None:
            self.failed = True
        elif not self.failed:
            if not self._saw_arguments:
                self.arguments = "{}"
            self.done = True

    def _separate(self, character: str) -> None:
        if character == ":" and self._expect_key:
            self._key, self._token, self._expect_key = _as_string(self._token), "", False
            self.failed = self._key is None
        elif character == "," and not self._expect_key:
            self._end_value()
            self._expect_key = True
        else:
            self.failed = True

    def _append(self, character: str) -> None:
        if not self._expect_key and self._key == "arguments":
            if not self._saw_arguments:
                self._saw_arguments = True
                self.failed = character != "{"
            self.arguments += character
        else:
            self._token += character

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _as_string(self._token)
            self.failed = self.name is None
        elif self._key == "arguments" and not self._saw_arguments:
            self.failed = True
        self._key, self._token = None, ""


def _as_string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None


def _possible_tag(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def _merge(events: Iterator[ToolEvent]) -> list[ToolEvent]:
    """Neighbouring pieces of the same kind as one."""
    merged: list[ToolEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentPiece) and isinstance(last, ContentPiece):
            merged[-1] = ContentPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece) and last.index == event.index:
            merged[-1] = ArgumentsPiece(last.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
