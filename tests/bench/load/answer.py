"""A streamed answer as it comes in: pure, so that every way in which a stream can go wrong has a test."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_DETAIL = 200
"""Characters kept of an error's message."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Instants are on the monotonic clock that all processes of a machine share."""

    begun_s: float
    ended_s: float = 0.0
    first_s: float | None = None
    """When the first chunk with a choice arrived. Servers open a stream with its first token, which need not have a
    text of its own: a special token has none, nor has the first half of a character."""
    last_s: float = 0.0
    """When the last such chunk arrived."""
    piece_s: array[float] = field(default_factory=lambda: array("d"))
    """When each piece of the answer arrived; one piece may hold several tokens."""
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """Kind of failure; None is a whole answer."""
    detail: str = ""
    late_s: float = 0.0
    """How much later than planned the request began: the client's own fault."""

    @property
    def ttft_s(self) -> float:
        """Of an answer that has begun."""
        assert self.first_s is not None
        return self.first_s - self.begun_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there is no second."""
        if self.completion_tokens < 2 or self.first_s is None:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.begun_s

    def gaps_s(self) -> Iterator[float]:
        """Between one piece of the answer and the next."""
        for before, after in zip(self.piece_s, self.piece_s[1:], strict=False):
            yield after - before

    def fail(self, kind: str, detail: str = "") -> None:
        """Remember the first thing that went wrong."""
        if self.error is None:
            self.error, self.detail = kind, detail[:MAX_DETAIL]


class EventLines:
    """Cuts what the network hands over into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class AnswerReader:
    """Fills an outcome from the events of its stream."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._lines = outcome, EventLines()
        self._done = False

    def feed(self, data: bytes, now_s: float) -> None:
        for event in self._lines.feed(data):
            if event == b"[DONE]":
                self._done = True
                continue
            try:
                chunk = orjson.loads(event)
            except orjson.JSONDecodeError:
                self._outcome.fail("event is no JSON", event.decode(errors="replace"))
                continue
            self._read(chunk, now_s)

    def end(self, now_s: float) -> None:
        """The connection has nothing more to say."""
        outcome = self._outcome
        outcome.ended_s = now_s
        if outcome.error is not None:
            return
        if not self._done or outcome.finish_reason is None:
            outcome.fail("stream cut", f"after {len(outcome.piece_s)} pieces")
        elif not outcome.completion_tokens and not outcome.piece_s:
            outcome.fail("no tokens")

    def _read(self, chunk: dict[str, Any], now_s: float) -> None:
        outcome = self._outcome
        if error := chunk.get("error"):
            outcome.fail(*describe("stream error", error))
            return
        if usage := chunk.get("usage"):
            outcome.prompt_tokens = usage.get("prompt_tokens")
            outcome.completion_tokens = usage.get("completion_tokens") or 0
        for choice in chunk.get("choices") or ():
            if outcome.first_s is None:
                outcome.first_s = now_s
            outcome.last_s = now_s
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            if _is_piece(choice.get("delta") or {}):
                outcome.piece_s.append(now_s)


def describe(what: str, error: Any) -> tuple[str, str]:
    """Kind and message of an error object in OpenAI's form, or of whatever else was sent."""
    if not isinstance(error, dict):
        return what, str(error)
    code = error.get("code") or error.get("type")
    return f"{what} {code}" if code else what, str(error.get("message", ""))


def _is_piece(delta: dict[str, Any]) -> bool:
    """Whether it holds some of the answer. An opening that only names the role would be a gap of nothing before one."""
    content = delta.get("content")
    if content is None:
        return bool(delta.get("reasoning_content") or delta.get("tool_calls"))
    return bool(content) or "role" not in delta
