"""Embeddings over NIXL, between replicas of a real Serve application; skipped where the package is absent."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import serve

from deployments.direct_store import DirectObjectStore, open_store
from deployments.errors import PayloadLostError
from tests.serve.app_process import running_app, total
from tests.serve.test_routing_app import ask, picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed"),
]

WIDTH = 64


class Owner:
    def __init__(self) -> None:
        self._store = open_store("nixl")

    async def put(self, rows: int, value: float, on_torch: bool) -> list[Any]:
        tensor = torch.full((rows, WIDTH), value, dtype=torch.bfloat16)
        payload = tensor if on_torch else tensor.view(torch.uint16).numpy()
        return [await asyncio.to_thread(self._store.put, payload)]

    def num_held(self) -> int:
        """Payloads that NIXL keeps for somebody."""
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return len(get_tensor_transport_manager("NIXL")._managed_meta_nixl)  # type: ignore[attr-defined]

    def pid(self) -> int:
        return os.getpid()


class Reader:
    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._store = DirectObjectStore("nixl", get_timeout_s=5.0)

    async def read(self, rows: int, value: float, on_torch: bool) -> bool:
        (ref,) = await self._owner.put.remote(rows, value, on_torch)
        array: np.ndarray = await self._store.get(ref)
        expected = torch.full((rows, WIDTH), value, dtype=torch.bfloat16).view(torch.uint16).numpy()
        return array.dtype == np.uint16 and np.array_equal(array, expected)

    async def many(self, number: int) -> list[bool]:
        return await asyncio.gather(*(self.read(1 + i % 7, float(i), i % 2 == 0) for i in range(number)))

    async def after_the_owner_s_end(self) -> str:
        (ref,) = await self._owner.put.remote(3, 1.0, True)
        os.kill(await self._owner.pid.remote(), signal.SIGKILL)
        await asyncio.sleep(1)
        try:
            await self._store.get(ref)
        except PayloadLostError as error:
            return error.code
        return "read"

    async def num_held(self) -> int:
        return int(await self._owner.num_held.remote())


@pytest.fixture(scope="module")
def reader() -> Iterator[Any]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    options = {"max_ongoing_requests": 64, "ray_actor_options": {"num_cpus": 0}}
    owner = serve.deployment(Owner).options(**options).bind()
    try:
        yield serve.run(serve.deployment(Reader).options(**options).bind(owner), route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


def test_what_is_put_is_read_by_another_replica_and_then_let_go(reader: Any) -> None:
    for _ in range(3):
        assert reader.many.remote(24).result(timeout_s=60) == [True] * 24
    held = -1
    for _ in range(50):
        held = reader.num_held.remote().result(timeout_s=10)
        if not held:
            break
        asyncio.run(asyncio.sleep(0.2))  # the hand-over's grace is 3 s
    assert held == 0


def test_a_payload_whose_owner_has_died_is_lost(reader: Any) -> None:
    assert reader.after_the_owner_s_end.remote().result(timeout_s=60) == "payload_lost"


def test_the_whole_application_answers_as_it_does_over_the_object_store(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    urls = [picture(50_000 + i) for i in range(6)]
    answers = {}
    for transfer in ("object_store", "nixl"):
        folder = tmp_path_factory.mktemp(transfer)
        with running_app(folder, args={"embedding_transfer": transfer}, replicas={"VisionEncoder": 2}) as app:
            replies = [ask(app, *urls[:2], text="What are these?", max_tokens=12, temperature=0) for _ in range(2)]
            replies += [ask(app, url, text="What is this?", max_tokens=12, temperature=0) for url in urls]
            assert {reply.status_code for reply in replies} == {200}
            answers[transfer] = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
            samples = app.samples()
            moved = total(samples, "embedding_transfer_bytes_total", backend=transfer, direction="get")
            assert moved == total(samples, "embedding_transfer_bytes_total", backend=transfer, direction="put") > 0
            assert total(samples, "embedding_transfer_seconds_count", backend=transfer, direction="get") == 6
    assert answers["nixl"] == answers["object_store"]
