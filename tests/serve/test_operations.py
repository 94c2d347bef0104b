"""What operators do to a running application: roll out, scale down, shut down. No request that is served pays for it.

One cluster of one node, whose tests run in their order until one shuts it down; then `python -m app.serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import poison
from tests.serve.app_process import running_app
from tests.serve.cluster_app import ClusterApp, deployments_of, dev_config, running_cluster_app
from tests.serve.conftest import ROOT
from tests.serve.examples import load_examples
from tests.serve.load import load_on
from tests.serve.nodes import ENVIRONMENT
from tests.serve.streams import ask, long_streams, stream

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 300
LONG_STREAMS = 8
LONG_TOKENS = 1500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterApp]:
    folder = tmp_path_factory.mktemp("operations")
    with running_cluster_app(folder, dev_config(), workers=0) as app:
        yield app


def changed(config: dict[str, Any], replicas: int, **args: Any) -> dict[str, Any]:
    """The config with so many replicas of every deployment, and with options of the engine."""
    config = copy.deepcopy(config)
    for deployment in deployments_of(config).values():
        deployment["num_replicas"] = replicas
    config["applications"][0]["args"]["lm_engine"].update(args)
    return config


async def roll_out(cluster: ClusterApp, config: dict[str, Any]) -> None:
    await asyncio.to_thread(cluster.deploy, config)
    await asyncio.to_thread(cluster.wait_until, cluster.is_whole)


@asynccontextmanager
async def running_stop(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app.stop", "--address", address,
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_a_roll_out_fails_no_request(cluster: ClusterApp) -> None:
    base = cluster.config
    async with load_on(cluster.url, cluster.model) as load:
        await load.reaches(20)
        first = set(cluster.replicas())
        await roll_out(cluster, changed(base, 2))
        assert first < set(cluster.replicas()), "another number of replicas replaces none"
        both = set(cluster.replicas())
        await roll_out(cluster, changed(base, 2, max_num_seqs=48))
        assert not both & set(cluster.replicas()), "another argument replaces all"
        await load.reaches(REQUESTS)
    assert load.outcomes == {"right": len(load.ended)}, load.outcomes


async def test_scaling_down_cuts_no_stream(cluster: ClusterApp) -> None:
    assert set(cluster.running().values()) == {2}
    async with long_streams(cluster.url, cluster.model, LONG_STREAMS, LONG_TOKENS) as tasks:
        await roll_out(cluster, changed(cluster.config, 1))
        ended = await asyncio.gather(*tasks)
    assert Counter(outcome for outcome, _ in ended) == {"right": LONG_STREAMS}, ended


async def test_a_request_that_kills_its_replicas_is_tried_a_bounded_number_of_times(cluster: ClusterApp) -> None:
    deaths = poison.count_deaths()
    config = changed(cluster.config, 2)
    config["applications"][0]["import_path"] = "tests.serve.poison:build"
    await roll_out(cluster, config)
    example = load_examples()[0]
    for name in ("Preprocessor", "LMEngine"):
        body = {"model": cluster.model, "messages": example.messages, "cache_salt": poison.POISON + name}
        async with httpx.AsyncClient(base_url=cluster.url, timeout=240.0) as client:
            answer = await stream(client, body)
            assert (answer.failure, answer.loss) == ("503 unavailable", "")
            assert (await deaths.count.remote())[name] == 3
            assert await ask(client, cluster.model, example) == ("right", "")
        await asyncio.to_thread(cluster.wait_until, cluster.is_whole)


async def test_a_shutdown_that_is_interrupted_is_taken_back(cluster: ClusterApp) -> None:
    example = load_examples()[0]
    async with (
        long_streams(cluster.url, cluster.model, LONG_STREAMS, LONG_TOKENS) as tasks,
        httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client,
        running_stop(cluster.nodes.address) as stopping,
    ):
        assert stopping.stderr is not None
        await stopping.stderr.readline()
        assert await ask(client, cluster.model, example) == ("failed", "503 shutting_down")
        stopping.send_signal(signal.SIGINT)
        told = (await stopping.stderr.read()).decode()
        assert (await stopping.wait(), "takes requests again" in told) == (130, True), told
        assert await ask(client, cluster.model, example) == ("right", "")
        ended = await asyncio.gather(*tasks)
    assert Counter(outcome for outcome, _ in ended) == {"right": LONG_STREAMS}, ended


async def test_shutting_down_lets_streams_end_and_refuses_what_comes(cluster: ClusterApp) -> None:
    example = load_examples()[0]
    async with (
        long_streams(cluster.url, cluster.model, LONG_STREAMS, LONG_TOKENS) as tasks,
        httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client,
        running_stop(cluster.nodes.address) as stopping,
    ):
        assert stopping.stderr is not None
        first = (await stopping.stderr.readline()).decode()
        assert f"{LONG_STREAMS} requests under way" in first
        assert await ask(client, cluster.model, example) == ("failed", "503 shutting_down")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert not any(task.done() for task in tasks), "the streams were too short for this test"
        ended = await asyncio.gather(*tasks)
        told = (await stopping.stderr.read()).decode().splitlines()
        assert Counter(outcome for outcome, _ in ended) == {"right": LONG_STREAMS}, ended
        assert (await stopping.wait(), told[-1]) == (0, "stopped; every answer has come to its end")
    assert cluster.replicas() == {}
    async with running_stop(cluster.nodes.address) as again:
        assert again.stderr is not None
        assert "Serve does not run" in (await again.stderr.read()).decode()
        assert await again.wait() == 3


def test_the_launcher_ends_when_its_application_is_stopped_from_elsewhere(tmp_path: Path) -> None:
    with running_app(tmp_path, args={}, replicas={}) as app:
        command = [sys.executable, "-m", "app.stop", "--address", app.address]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        stopped = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert stopped.returncode == 0, stopped.stderr
        assert app.wait(60) == 0
        assert "Serve was shut down from elsewhere" in app.log.read_text()
