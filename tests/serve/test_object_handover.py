"""Objects handed from replica to replica through Ray's store, as MediaItem.source and .patches are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.handles import RayObjectStore
from deployments.messages import Ref

CONCURRENCY = 40


@dataclass(frozen=True)
class Parcel:
    ref: Ref


class Owner:
    def __init__(self) -> None:
        self._store = RayObjectStore(get_timeout_s=10.0)

    async def put(self, size: int) -> Parcel:
        return Parcel(await asyncio.to_thread(self._store.put, b"x" * size))

    async def size_of(self, parcel: Parcel) -> int:
        return len(await self._store.get(parcel.ref))


class Reader:
    def __init__(self, owner: DeploymentHandle) -> None:
        self._owner, self._store = owner, RayObjectStore()

    async def size_of(self, parcel: Parcel, *, at_owner: bool) -> int:
        if at_owner:
            return int(await self._owner.size_of.remote(parcel))
        return len(await self._store.get(parcel.ref))


class Caller:
    def __init__(self, owner: DeploymentHandle, reader: DeploymentHandle) -> None:
        self._owner, self._reader = owner, reader

    async def hand_over(self, size: int, *, at_owner: bool) -> int:
        async def once() -> int:
            parcel = await self._owner.put.remote(size)
            return int(await self._reader.size_of.remote(parcel, at_owner=at_owner))

        return sum(await asyncio.gather(*(once() for _ in range(CONCURRENCY))))


@pytest.fixture(scope="module")
def caller() -> Iterator[Any]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    options = {"max_ongoing_requests": 2 * CONCURRENCY, "ray_actor_options": {"num_cpus": 0}}
    owner = serve.deployment(Owner).options(**options).bind()
    reader = serve.deployment(Reader).options(**options).bind(owner)
    try:
        yield serve.run(serve.deployment(Caller).options(**options).bind(owner, reader), route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.parametrize("size", [100, 120_000], ids=["in_process_store", "shared_memory"])
@pytest.mark.parametrize("at_owner", [False, True], ids=["at_another_replica", "at_the_owner"])
def test_what_was_put_can_be_read_wherever_its_ref_travels(caller: Any, size: int, at_owner: bool) -> None:
    """About one in a hundred was freed on the way before the store held on to what it had put."""
    for _ in range(10):
        read = caller.hand_over.remote(size, at_owner=at_owner).result(timeout_s=60)
        assert read == CONCURRENCY * size
