"""The whole application as a newcomer meets it: the dev config, the shipped model, curl-like and `openai` clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import RunningServer
from tests.serve.examples import Example, load_examples
from tests.serve.object_store import bytes_in_use

EXAMPLES = load_examples()
PICTURE = next(example for example in EXAMPLES if example.name.startswith("describe"))


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def gauges(server: RunningServer) -> dict[tuple[str, str], float]:
    """(family, first label value) -> sum over replicas."""
    page = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            label = sample.labels.get("state") or sample.labels.get("tier") or ""
            key = sample.name.removeprefix("sightline_"), label
            found[key] = found.get(key, 0.0) + sample.value
    return found


def wait_until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to rest"
        time.sleep(0.1)


async def stream_text(client: openai.AsyncOpenAI, model: str, example: Example) -> str:
    stream = await client.chat.completions.create(
        model=model, messages=example.messages, temperature=0, max_tokens=96, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return "".join(pieces)


def test_it_is_alive_ready_and_says_what_it_serves(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert httpx.get(f"{server.url}/version").json()["version"]
    (model,) = httpx.get(f"{server.api}/models").json()["data"]
    assert model["id"] == server.model


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
async def test_the_shipped_examples_are_answered_right(
    server: RunningServer, client: openai.AsyncOpenAI, example: Example
) -> None:
    answer = await client.chat.completions.create(
        model=server.model, messages=example.messages, temperature=0, max_tokens=96
    )
    assert example.is_answered_by(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    has_picture = "image_url" in json.dumps(example.messages)
    assert (answer.usage.prompt_tokens_details.image_tokens > 0) == has_picture


async def test_a_stream_brings_the_same_text_in_several_pieces_and_usage_if_asked(
    server: RunningServer, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model=server.model, messages=PICTURE.messages, temperature=0, max_tokens=96, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert PICTURE.is_answered_by("".join(pieces))
    assert len(pieces) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens >= len(pieces)


async def test_a_repeat_is_served_from_the_caches(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=server.model, messages=PICTURE.messages, temperature=0, max_tokens=96
        )
        assert PICTURE.is_answered_by(answer.choices[0].message.content)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


async def test_64_concurrent_streams_all_answer_right_and_leave_nothing_behind(
    server: RunningServer, client: openai.AsyncOpenAI
) -> None:
    async def burst() -> None:
        work = [EXAMPLES[i % len(EXAMPLES)] for i in range(64)]
        texts = await asyncio.gather(*(stream_text(client, server.model, example) for example in work))
        wrong = {e.name: text for e, text in zip(work, texts, strict=True) if not e.is_answered_by(text)}
        assert not wrong

    def at_rest() -> bool:
        now = gauges(server)
        busy = [("scheduler_requests", "running"), ("scheduler_requests", "waiting"), ("kv_blocks", "used")]
        return not any(now[key] for key in [*busy, ("embedding_slots", "used"), ("requests_in_flight", "running")])

    await burst()
    wait_until(at_rest)
    after_one = bytes_in_use()
    for _ in range(2):
        await burst()
    # The same pictures again: whatever the store holds now, it held before (the encoder's cache keeps its embeddings).
    wait_until(lambda: at_rest() and bytes_in_use() <= after_one)


async def test_a_client_that_leaves_frees_what_its_request_held(server: RunningServer) -> None:
    body = {
        "model": server.model, "messages": PICTURE.messages, "stream": True, "max_tokens": 2000, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{server.api}/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if '"content":"' in line:
                assert gauges(server)["scheduler_requests", "running"] >= 1
                break
    wait_until(lambda: gauges(server)["scheduler_requests", "running"] == 0)
    wait_until(lambda: gauges(server)["kv_blocks", "used"] == 0)


async def test_a_bad_request_harms_nobody_else(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    async def bad() -> None:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": [part]}])
        assert caught.value.param == "messages[0].content[0].image_url"

    texts, *_ = await asyncio.gather(stream_text(client, server.model, PICTURE), *(bad() for _ in range(8)))
    assert PICTURE.is_answered_by(texts)
