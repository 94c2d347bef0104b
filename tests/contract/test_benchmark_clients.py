"""Requests as `vllm bench serve` sends them, backends openai-chat and openai, and its way of reading streams.

Fields as in vLLM's benchmark client of 2026: everything that its own options put into a body must be accepted as it
stands, or whoever compares servers with that program cannot measure this one.
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.bench.pictures import photo_like_jpeg
from tests.contract.test_http_api import CHAT, Server, server  # noqa: F401 - a fixture
from tests.unit.app.helpers import MODEL

SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What its options of the same names add to a body."""


def chat_body(content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def text_body(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": "Once upon",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


@dataclass
class Reading:
    """What such a client makes of a stream."""

    text: str = ""
    stamps: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    done: bool = False


async def bench(server: Server, path: str, body: dict[str, Any]) -> Reading:  # noqa: F811
    """Reads until the end; messages are separated by empty lines, comments are skipped."""
    reading = Reading()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "x-request-id": "bench-1"}
    async with server.client() as client, client.stream("POST", path, json=body, headers=headers) as response:
        if response.status_code != 200:
            pytest.fail((await response.aread()).decode())
        waiting = ""
        async for piece in response.aiter_text():
            *messages, waiting = (waiting + piece).split("\n\n")
            for message in messages:
                read_message(reading, message.strip())
        assert waiting == ""
    return reading


def read_message(reading: Reading, message: str) -> None:
    if not message or message.startswith(":"):
        return
    data = message.removeprefix("data: ")
    if data == "[DONE]":
        reading.done = True
        return
    chunk = json.loads(data)
    if choices := chunk.get("choices"):
        reading.stamps.append(time.perf_counter())
        reading.text += (choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0]["text"]) or ""
    elif usage := chunk.get("usage"):
        reading.output_tokens, reading.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, SAMPLING, {**SAMPLING, "ignore_eos": True}], ids=str)
@pytest.mark.parametrize("with_picture", [False, True])
async def test_openai_chat(server: Server, with_picture: bool, more: dict[str, Any]) -> None:  # noqa: F811
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    if with_picture:  # after the text, as its default is
        data = base64.b64encode(photo_like_jpeg(64, 48)).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
    reading = await bench(server, CHAT, chat_body(content, **more))
    assert reading.done
    assert reading.text == "a red circle"
    assert (reading.prompt_tokens, reading.output_tokens) == (3, 3)
    assert len(reading.stamps) >= 3
    (request,) = server.engine.requests.values()
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (8, bool(more.get("ignore_eos")))
    assert len(server.preprocessor.requests[0].media) == with_picture


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, SAMPLING, {"logprobs": 1}], ids=str)
async def test_openai_completions(server: Server, more: dict[str, Any]) -> None:  # noqa: F811
    reading = await bench(server, "/v1/completions", text_body(**more))
    assert reading.done
    assert reading.text == "a red circle"
    assert reading.output_tokens == 3
    (request,) = server.engine.requests.values()
    assert request.sampling.repetition_penalty == 1.0
    assert request.sampling.logprobs == more.get("logprobs")


async def test_prompts_as_token_ids(server: Server) -> None:  # noqa: F811
    reading = await bench(server, "/v1/completions", text_body(prompt=[5, 6, 7]))
    assert reading.done
    assert server.preprocessor.requests[0].prompt.token_ids == (5, 6, 7)  # type: ignore[union-attr]


async def test_the_model_is_found_when_none_is_named(server: Server) -> None:  # noqa: F811
    async with server.client() as client:
        found: httpx.Response = await client.get("/v1/models")
    model = found.json()["data"][0]
    assert model["id"] == MODEL
    assert "root" in model, "that client shows the root of the first model"
