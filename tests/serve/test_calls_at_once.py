"""Calls that one request makes at once, through Serve and the router of encoder and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.request_router import AffinityRouter
from deployments.routing import session_id

CALLS = 24


class Callee:
    async def double(self, number: int) -> int:
        await asyncio.sleep(0.01)
        return 2 * number

    async def wait(self) -> None:
        await asyncio.Event().wait()


class Caller:
    def __init__(self, callee: DeploymentHandle) -> None:
        self._callee = callee

    async def double_all(self, *, by_reference: bool, num_keys: int) -> list[int]:
        calls = (self._double(i, f"key {i % num_keys}", by_reference) for i in range(CALLS))
        return list(await asyncio.gather(*calls))

    async def double_beside_a_call_that_is_given_up(self) -> list[int]:
        given_up = asyncio.ensure_future(self._wait())
        doubling = asyncio.ensure_future(self.double_all(by_reference=True, num_keys=CALLS))
        await asyncio.sleep(0.02)
        given_up.cancel()
        return await doubling

    async def _double(self, number: int, key: str, by_reference: bool) -> int:
        handle = self._callee.options(session_id=session_id(key), _by_reference=by_reference)
        return int(await handle.double.remote(number))

    async def _wait(self) -> None:
        await self._callee.options(session_id=session_id("another")).wait.remote()


@pytest.fixture(scope="module")
def caller() -> Iterator[Any]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    options = {"max_ongoing_requests": 4 * CALLS, "ray_actor_options": {"num_cpus": 0}}
    router = RequestRouterConfig(request_router_class=AffinityRouter)
    callee = serve.deployment(Callee).options(num_replicas=2, request_router_config=router, **options).bind()
    try:
        yield serve.run(serve.deployment(Caller).options(**options).bind(callee), route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.parametrize("by_reference", [True, False], ids=["actor_calls", "grpc"])
@pytest.mark.parametrize("num_keys", [1, CALLS], ids=["of_one_key", "of_many_keys"])
def test_all_of_them_are_answered(caller: Any, by_reference: bool, num_keys: int) -> None:
    """They share the id of the request that makes them, by which Serve finds those that wait for a replica."""
    response = caller.double_all.remote(by_reference=by_reference, num_keys=num_keys)
    assert response.result(timeout_s=30) == [2 * i for i in range(CALLS)]


def test_one_that_is_given_up_takes_no_other_with_it(caller: Any) -> None:
    response = caller.double_beside_a_call_that_is_given_up.remote()
    assert response.result(timeout_s=30) == [2 * i for i in range(CALLS)]
