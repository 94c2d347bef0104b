"""The ingress's page when some replicas answer, hang or die."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

import app.replicas
from app.replicas import Replicas
from deployments.metrics import ReplicaMetrics, Sample


class FakeReplica:
    def __init__(self, name: str) -> None:
        self.state = "answers"
        self.steps = 7
        self._metrics = ReplicaMetrics("LMEngine", name, self._samples)
        self.target: dict[str, Any] | None = None

    def _samples(self) -> list[Sample]:
        return [("engine_steps_total", (), self.steps)]

    async def call(self, method: str) -> Any:
        if self.state == "hangs":
            await asyncio.Event().wait()
        if self.state == "dies":
            raise RayActorError()
        return self._metrics.collect() if method == "metrics" else self.target


class FakeHandle:
    def __init__(self, *replicas: FakeReplica) -> None:
        self.replicas = list(replicas)

    def broadcast(self, method: str) -> Any:
        handle = self

        class Response:
            async def _fetch_replica_results_async(self) -> list[Any]:
                return [Result(replica) for replica in handle.replicas]

        class Result:
            def __init__(self, replica: FakeReplica) -> None:
                self._replica = replica

            async def get_async(self) -> Any:
                return await self._replica.call(method)

        return Response()


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.replicas, "ANSWER_TIMEOUT_S", 0.2)


def asking(handle: FakeHandle, **options: Any) -> Replicas:
    return Replicas({"LMEngine": cast("DeploymentHandle[Any]", handle)}, **options)


async def steps(replicas: Replicas) -> tuple[dict[str, float], set[str]]:
    """(the counter by replica, replicas whose page is old)."""
    counters: dict[str, float] = {}
    old: set[str] = set()
    for family in text_string_to_metric_families((await replicas.metrics_text()).decode()):
        for sample in family.samples:
            if sample.name == "sightline_engine_steps_total":
                counters[sample.labels["replica"]] = sample.value
            if sample.name == "sightline_metrics_age_seconds" and sample.value > 0:
                old.add(sample.labels["replica"])
    return counters, old


async def test_one_that_hangs_shows_its_last_values_and_the_others_their_new_ones() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    replicas = asking(FakeHandle(a, b))
    assert await steps(replicas) == ({"a": 7, "b": 7}, set())
    a.steps, b.state = 9, "hangs"
    assert await steps(replicas) == ({"a": 9, "b": 7}, {"b"})
    b.state, b.steps = "answers", 10
    assert await steps(replicas) == ({"a": 9, "b": 10}, set())


async def test_the_series_of_one_that_dies_end() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    handle = FakeHandle(a, b)
    replicas = asking(handle)
    await steps(replicas)
    b.state = "dies"
    assert await steps(replicas) == ({"a": 7}, set())
    handle.replicas = []
    assert await steps(replicas) == ({}, set())


async def test_targets_are_those_of_replicas_that_have_one() -> None:
    a, b, c = FakeReplica("a"), FakeReplica("b"), FakeReplica("c")
    a.target = {"targets": ["10.0.0.1:5"], "labels": {"replica": "a"}}
    c.state = "hangs"
    assert await asking(FakeHandle(a, b, c)).metrics_targets() == [a.target]


async def test_without_the_option_there_are_no_names_of_vllm() -> None:
    handle = FakeHandle(FakeReplica("a"))
    assert b"vllm:" not in await asking(handle).metrics_text()
