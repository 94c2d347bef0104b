"""The LM engine scales 1 → 2 → 1 by the work it has, on a real cluster with the shipped model, and no request fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from ray import serve

from app.serve import load_config
from tests.serve.conftest import ROOT, RunningServer, free_port, served

SEATS = 2
CLIENTS = 12
SCALE_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def autoscaled() -> Iterator[RunningServer]:
    """dev.yaml with an autoscaled engine of few seats, and delays that a test can wait for."""
    config = load_config(ROOT / "serve_configs" / "dev.yaml", free_port(), [f"lm_engine.max_num_seqs={SEATS}"])
    (engine,) = (d for d in config["applications"][0]["deployments"] if d["name"] == "LMEngine")
    del engine["num_replicas"]
    engine["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "metrics_interval_s": 1,
        "look_back_period_s": 3,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "policy": {"policy_function": "deployments.autoscaling:EnginePolicy", "policy_kwargs": {"drain_s": 5}},
    }
    with served(config) as running:
        yield running


def engines() -> int:
    """LM engine replicas that run, whether or not one more starts or stops."""
    (application,) = serve.status().applications.values()
    return application.deployments["LMEngine"].replica_states.get("RUNNING", 0)


async def wait_for_engines(count: int) -> None:
    deadline_s = time.monotonic() + SCALE_TIMEOUT_S
    while (running := await asyncio.to_thread(engines)) != count:
        assert time.monotonic() < deadline_s, f"{running} engines after {SCALE_TIMEOUT_S:g} s; expected {count}"
        await asyncio.sleep(0.25)


async def wait_for_answers(answers: list[httpx.Response], count: int) -> None:
    deadline_s = time.monotonic() + SCALE_TIMEOUT_S
    while len(answers) < count:
        assert time.monotonic() < deadline_s, f"{len(answers)} answers; expected {count}"
        await asyncio.sleep(0.1)


@asynccontextmanager
async def load_on(server: RunningServer) -> AsyncIterator[list[httpx.Response]]:
    """Clients that ask one question after another until the block ends; their answers."""
    answers: list[httpx.Response] = []
    stopped = asyncio.Event()
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 48,
        "ignore_eos": True,
    }

    async def ask(client: httpx.AsyncClient) -> None:
        while not stopped.is_set():
            answers.append(await client.post(f"{server.api}/chat/completions", json=body))

    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(ask(client))
        try:
            yield answers
        finally:
            stopped.set()


async def test_the_engine_follows_its_work_up_and_down_and_loses_no_request(autoscaled: RunningServer) -> None:
    assert engines() == 1
    async with load_on(autoscaled) as answers:
        await wait_for_engines(2)
        grown_at = len(answers)
        await wait_for_answers(answers, grown_at + 2 * CLIENTS)  # both replicas serve
    await wait_for_engines(1)
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers if a.status_code != 200][:3]
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {48}
