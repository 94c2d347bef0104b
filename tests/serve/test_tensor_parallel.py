"""The shipped model spread over two ranks on a real cluster: same answers, and a lost rank costs a restart of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import openai
import psutil
import pytest
from ray import serve

from app.serve import load_config
from tests.serve.conftest import ROOT, RunningServer, free_port, served
from tests.serve.examples import Example, load_examples

pytestmark = pytest.mark.slow

EXAMPLES = load_examples()
RESTART_S = 150.0


@pytest.fixture(scope="module")
def parallel() -> Iterator[RunningServer]:
    """dev.yaml over two CPU ranks, with a health check that a test can wait for."""
    overrides = ["lm_engine.tensor_parallel_size=2"]
    config = load_config(ROOT / "serve_configs" / "dev.yaml", free_port(), overrides)
    (engine,) = (d for d in config["applications"][0]["deployments"] if d["name"] == "LMEngine")
    engine |= {"health_check_period_s": 1, "health_check_timeout_s": 10}
    with served(config) as running:
        yield running


@pytest.fixture
async def client(parallel: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=parallel.api, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ranks() -> list[psutil.Process]:
    """Processes of ranks other than 0, under the cluster that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("ray::Rank" in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def engine_replicas() -> dict[str, int]:
    """LM engine replicas by state."""
    (application,) = serve.status().applications.values()
    return dict(application.deployments["LMEngine"].replica_states)


async def answer(client: openai.AsyncOpenAI, model: str, example: Example) -> str | None:
    response = await client.chat.completions.create(
        model=model, messages=example.messages, temperature=0, max_tokens=96
    )
    return response.choices[0].message.content


async def assert_answers(client: openai.AsyncOpenAI, model: str) -> None:
    """Each example as one device answers it, all at once."""
    texts = await asyncio.gather(*(answer(client, model, example) for example in EXAMPLES))
    for example, text in zip(EXAMPLES, texts, strict=True):
        assert example.is_answered_by(text), f"{example.name}: {text!r}"


async def is_answering(client: openai.AsyncOpenAI, model: str) -> bool:
    """Whether all examples are answered, rightly; errors of the server mean not yet."""
    try:
        await assert_answers(client, model)
    except openai.InternalServerError:
        return False
    return True


async def test_answers_are_those_of_one_device(client: openai.AsyncOpenAI, parallel: RunningServer) -> None:
    assert len(ranks()) == 1
    await assert_answers(client, parallel.model)


async def test_a_lost_rank_restarts_the_gang_and_answers_go_on(
    client: openai.AsyncOpenAI, parallel: RunningServer
) -> None:
    (lost,) = await asyncio.to_thread(ranks)
    running = asyncio.create_task(
        client.chat.completions.create(
            model=parallel.model,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=2000,
            extra_body={"ignore_eos": True},
        )
    )
    await asyncio.sleep(1.0)
    assert not running.done()
    lost.kill()
    with pytest.raises(openai.APIStatusError) as failure:  # it is told so, and does not hang
        await asyncio.wait_for(running, RESTART_S)
    assert failure.value.status_code in (500, 503)
    deadline_s = time.monotonic() + RESTART_S
    while not await is_answering(client, parallel.model):
        assert time.monotonic() < deadline_s, f"no answers {RESTART_S:g} s after a rank was lost"
        await asyncio.sleep(1.0)
    (found,) = await asyncio.to_thread(ranks)
    assert found.pid != lost.pid
    assert engine_replicas()["RUNNING"] == 1
