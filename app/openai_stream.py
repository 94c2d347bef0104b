"""From deltas to the answers of the OpenAI API: server-sent events, or one JSON body. Knows nothing about HTTP.

Both forms are fed by the same reader of a choice, so that a stream's pieces add up to the whole answer. Of each choice
a stream holds: the role, then pieces, then one chunk with the finish reason. Pieces that come in one batch are one
write. Log-probabilities travel with the text they belong to; those of text that is held back wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from app.errors import error_object
from app.observer import Usage
from app.tool_calls import ArgumentsPiece, CallStart, ContentPiece, HermesToolParser, ToolEvent
from deployments.errors import SightlineError
from deployments.messages import DeltaBatch, Logprob, SequenceDelta, TokenLogprobs

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class AnswerWriter(Protocol):
    """One answer in the making, streamed or whole: feed every batch, then ask for the end once."""

    def events(self, batch: DeltaBatch) -> bytes:
        """Server-sent events of a batch; may be empty."""

    def last_events(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        """A last chunk with usage and `sightline` (the extension), as far as they were asked for, and `[DONE]`."""

    def keep(self, batch: DeltaBatch) -> None:
        """Take a batch into the whole answer."""

    def body(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        """The whole answer; the extension is its `sightline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer repeat."""

    id: str
    model: str
    created_s: int
    num_choices: int
    logprobs: bool = False
    include_usage: bool = False


def error_events(error: SightlineError) -> bytes:
    """The end of a stream that has failed after it began."""
    return _event(orjson.dumps(error_object(error))) + DONE


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "image_tokens": usage.image_tokens},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Chat
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _ToolCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _ChatChoice:
    parser: HermesToolParser | None
    begun: bool = False
    content: list[str] = field(default_factory=list)
    calls: list[_ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """In a stream: those that wait for their text."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def read(self, delta: SequenceDelta) -> list[ToolEvent]:
        """What a delta adds, and whether it ends the choice."""
        self.logprobs.extend(delta.logprobs)
        if self.parser is None:
            events: list[ToolEvent] = [ContentPiece(delta.text)] if delta.text else []
        else:
            events = self.parser.feed(delta.text)
            if delta.finish_reason is not None:
                events += self.parser.finish()
        if delta.finish_reason is not None:
            called = self.parser is not None and self.parser.num_calls > 0
            self.finish_reason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
            self.stop_reason = delta.stop_reason
        return events


class ChatWriter:
    """AnswerWriter of /v1/chat/completions.

    Args:
        make_parser: Makes a choice's tool call parser; None where no tools are in play.
        new_call_id: Makes ids of tool calls.
    """

    def __init__(
        self,
        head: AnswerHead,
        make_parser: Callable[[], HermesToolParser] | None,
        new_call_id: Callable[[], str],
    ) -> None:
        self._head, self._new_call_id = head, new_call_id
        self._choices = [_ChatChoice(make_parser() if make_parser else None) for _ in range(head.num_choices)]
        self._frame = _Frame(head, "chat.completion.chunk")

    def events(self, batch: DeltaBatch) -> bytes:
        return b"".join(event for delta in batch for event in self._chunks(delta))

    def last_events(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        return self._frame.end(usage, extension)

    def keep(self, batch: DeltaBatch) -> None:
        for delta in batch:
            choice = self._choices[delta.index]
            for event in choice.read(delta):
                if isinstance(event, ContentPiece):
                    choice.content.append(event.text)
                elif isinstance(event, CallStart):
                    choice.calls.append(_ToolCall(self._new_call_id(), event.name))
                else:
                    choice.calls[event.index].arguments.append(event.text)

    def body(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        return self._frame.whole(
            "chat.completion", [self._whole(i) for i in range(len(self._choices))], usage, extension
        )

    def _chunks(self, delta: SequenceDelta) -> Iterable[bytes]:
        choice = self._choices[delta.index]
        if not choice.begun:
            choice.begun = True
            yield self._chunk(delta.index, {"role": "assistant", "content": ""})
        piece = self._piece(choice.read(delta))
        if piece:
            yield self._chunk(delta.index, piece, logprobs=self._take_logprobs(choice))
        if choice.finish_reason is not None:
            end: dict[str, Any] = {"finish_reason": choice.finish_reason}
            if choice.stop_reason is not None:
                end["stop_reason"] = choice.stop_reason
            logprobs = self._take_logprobs(choice) if choice.logprobs else None
            yield self._chunk(delta.index, {}, logprobs=logprobs, **end)

    def _piece(self, events: Sequence[ToolEvent]) -> dict[str, Any]:
        """One delta object; a call's name and the arguments that follow it at once share an entry."""
        text = "".join(event.text for event in events if isinstance(event, ContentPiece))
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                calls[event.index] = {
                    "index": event.index,
                    "id": self._new_call_id(),
                    "type": "function",
                    "function": function,
                }
            elif isinstance(event, ArgumentsPiece):
                entry = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += event.text
        piece: dict[str, Any] = {"content": text} if text else {}
        if calls:
            piece["tool_calls"] = list(calls.values())
        return piece

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None, **more: Any
    ) -> bytes:
        return self._frame.chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        )

    def _take_logprobs(self, choice: _ChatChoice) -> dict[str, Any] | None:
        if not self._head.logprobs:
            return None
        entries = [_chat_logprob(entry) for entry in choice.logprobs]
        choice.logprobs.clear()
        return {"content": entries, "refusal": None}

    def _whole(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not choice.calls else None,
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(c.arguments)}}
                for c in choice.calls
            ]
        whole = {
            "index": index,
            "message": message,
            "logprobs": self._take_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if choice.stop_reason is not None:
            whole["stop_reason"] = choice.stop_reason
        return whole


def _chat_logprob(entry: TokenLogprobs) -> dict[str, Any]:
    return {**_chat_token(entry.chosen), "top_logprobs": [_chat_token(token) for token in entry.top]}


def _chat_token(token: Logprob) -> dict[str, Any]:
    text = _valid(token.token)
    return {"token": text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.utf8 or text.encode())}


# ---------------------------------------------------------------------------------------------------------------------
# Text completions
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _TextChoice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset_chars: int = 0
    """Where the next token's text begins in the answer."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def read(self, delta: SequenceDelta) -> None:
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class CompletionWriter:
    """AnswerWriter of /v1/completions."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._choices = [_TextChoice() for _ in range(head.num_choices)]
        self._frame = _Frame(head, "text_completion")

    def events(self, batch: DeltaBatch) -> bytes:
        return b"".join(event for delta in batch for event in self._chunks(delta))

    def last_events(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        return self._frame.end(usage, extension)

    def keep(self, batch: DeltaBatch) -> None:
        for delta in batch:
            choice = self._choices[delta.index]
            choice.read(delta)
            choice.text.append(delta.text)

    def body(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        wholes = [self._choice(i, "".join(choice.text)) for i, choice in enumerate(self._choices)]
        return self._frame.whole("text_completion", wholes, usage, extension)

    def _chunks(self, delta: SequenceDelta) -> Iterable[bytes]:
        choice = self._choices[delta.index]
        choice.read(delta)
        if delta.text or choice.finish_reason is not None:
            yield self._frame.chunk(self._choice(delta.index, delta.text))

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        choice = self._choices[index]
        whole = {
            "index": index,
            "text": text,
            "logprobs": self._take_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if choice.stop_reason is not None:
            whole["stop_reason"] = choice.stop_reason
        return whole

    def _take_logprobs(self, choice: _TextChoice) -> dict[str, Any] | None:
        if not self._head.logprobs:
            return None
        tokens = [_valid(entry.chosen.token) for entry in choice.logprobs]
        offsets = []
        for token in tokens:
            offsets.append(choice.offset_chars)
            choice.offset_chars += len(token)
        answer = {
            "tokens": tokens,
            "token_logprobs": [max(entry.chosen.logprob, LEAST_LOGPROB) for entry in choice.logprobs],
            "top_logprobs": [
                {_valid(t.token): max(t.logprob, LEAST_LOGPROB) for t in (entry.chosen, *entry.top)}
                for entry in choice.logprobs
            ],
            "text_offset": offsets,
        }
        choice.logprobs.clear()
        return answer


# ---------------------------------------------------------------------------------------------------------------------
# Framing
# ---------------------------------------------------------------------------------------------------------------------
class _Frame:
    """The fields around the choices, written once and kept as bytes: a stream's cost is per chunk."""

    def __init__(self, head: AnswerHead, chunk_object: str) -> None:
        self._head, self._chunk_object = head, chunk_object
        fields = orjson.dumps(self._fields(chunk_object))
        self._before = b"data: " + fields[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return self._before + orjson.dumps(choice) + self._after

    def end(self, usage: Usage, extension: Mapping[str, object] | None = None) -> bytes:
        if not self._head.include_usage and extension is None:
            return DONE
        last = {**self._fields(self._chunk_object), "choices": []}
        if self._head.include_usage:
            last["usage"] = usage_object(usage)
        if extension is not None:
            last["sightline"] = extension
        return _event(orjson.dumps(last)) + DONE

    def whole(
        self,
        object_name: str,
        choices: list[dict[str, Any]],
        usage: Usage,
        extension: Mapping[str, object] | None = None,
    ) -> bytes:
        answer = {**self._fields(object_name), "choices": choices, "usage": usage_object(usage)}
        if extension is not None:
            answer["sightline"] = extension
        return orjson.dumps(answer)

    def _fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": object_name,
            "created": self._head.created_s,
            "model": self._head.model,
        }


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _valid(text: str) -> str:
    """Text that can be written as UTF-8; a token may be a part of a character."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text
