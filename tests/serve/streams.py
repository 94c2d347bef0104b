"""Streamed requests with known answers, and what became of each.

- `right`: the whole answer came, and it is the known one,
- `wrong`: another answer came,
- `failed`: a clear error, as a status with OpenAI's error body or as an error event in the stream,
- `lost`: anything else: a broken connection, a stream that just ends, no end within the client's time-out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.serve.examples import Example, load_examples

Outcome = Literal["right", "wrong", "failed", "lost"]
CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """As much as has come of a streamed answer."""

    text: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    finish_reason: str | None = None
    failure: str = ""
    """`STATUS CODE` or `event CODE` of a clear error."""
    loss: str = ""
    """What kept the answer from coming to any end of its own."""

    def outcome(self, is_right: bool) -> Outcome:
        if self.loss:
            return "lost"
        if self.failure:
            return "failed"
        return "right" if is_right else "wrong"


async def stream(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """Send one request and read its answer to whatever end it takes; `answer` grows meanwhile."""
    answer, done = answer or Answer(), False
    body = {"temperature": 0, **body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", CHAT, json=body) as response:
            if response.status_code != httpx.codes.OK:
                answer.failure = f"{response.status_code} {json.loads(await response.aread())['error']['code']}"
                return answer
            async for data in _events(response):
                if data == "[DONE]":
                    done = True
                    continue
                _take(answer, json.loads(data))
    except (httpx.HTTPError, json.JSONDecodeError, KeyError, TypeError) as exc:
        answer.loss = f"{type(exc).__name__}: {exc}"
    else:
        answer.loss = "" if done else "the stream just ended"
    return answer


async def ask(client: httpx.AsyncClient, model: str, example: Example, salt: str | None = None) -> tuple[Outcome, str]:
    """Outcome of one of the shipped model's examples, and what there is to say about it unless it is right."""
    body: dict[str, Any] = {"model": model, "messages": example.messages, "max_tokens": 96}
    if salt is not None:
        body["cache_salt"] = salt
    answer = await stream(client, body)
    text = "".join(answer.text)
    outcome = answer.outcome(example.is_answered_by(text))
    return outcome, answer.loss or answer.failure or ("" if outcome == "right" else f"{example.name}: {text!r}")


async def count(
    client: httpx.AsyncClient, model: str, example: Example, tokens: int, answer: Answer | None = None
) -> tuple[Outcome, str]:
    """Outcome of an answer of exactly so many tokens."""
    body = {"model": model, "messages": example.messages, "max_tokens": tokens, "ignore_eos": True}
    answer = await stream(client, body, answer)
    outcome = answer.outcome(answer.completion_tokens == tokens and answer.finish_reason == "length")
    return outcome, answer.loss or answer.failure or f"{answer.completion_tokens} tokens, {answer.finish_reason}"


@asynccontextmanager
async def long_streams(
    url: str, model: str, number: int, tokens: int
) -> AsyncIterator[list[asyncio.Task[tuple[Outcome, str]]]]:
    """Streams that have all begun and are far from their ends."""
    example = load_examples()[0]
    answers = [Answer() for _ in range(number)]
    async with httpx.AsyncClient(base_url=url, timeout=240.0) as client:
        tasks = [asyncio.create_task(count(client, model, example, tokens, answer)) for answer in answers]
        async with asyncio.timeout(60):
            while not all(answer.text for answer in answers):
                assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
                await asyncio.sleep(0.02)
        yield tasks


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.failure = f"event {event['error']['code']}"
        return
    for choice in event["choices"]:
        answer.text.append(choice["delta"].get("content") or "")
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    if event.get("usage"):
        answer.completion_tokens = event["usage"]["completion_tokens"]


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
