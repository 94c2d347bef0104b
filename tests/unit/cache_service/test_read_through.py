import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cache_service.cluster_flight import ClusterFlight
from cache_service.read_through import Found, ReadThrough
from cache_service.single_flight import SingleFlight
from cache_service.tiered import TieredCache
from tests.unit.cache_service.tiers import DictLeases, DictTier, decode_text, encode_text


class Replica:
    """One process's view: a memory tier of its own before what all share."""

    def __init__(self, shared: DictTier, leases: DictLeases) -> None:
        self.memory = DictTier("memory")
        self.cluster: ClusterFlight[str] = ClusterFlight(
            leases, lease_s=0.03, max_wait_s=5, first_poll_s=0.001, last_poll_s=0.001
        )
        self.reads = ReadThrough(
            TieredCache([self.memory, shared], decode_text),
            encode_text,
            flights=SingleFlight(),
            shared=shared,
            cluster=self.cluster,
        )

    async def get(self, key: bytes, compute: Callable[[], Awaitable[str]]) -> Found[str]:
        return await self.reads.get_or_compute(key, compute)


class Work:
    def __init__(self) -> None:
        self.calls = 0
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.calls += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return "value"


async def test_a_hundred_requests_at_two_replicas_compute_once() -> None:
    shared = DictTier("redis")
    leases = DictLeases(shared)
    replicas = [Replica(shared, leases) for _ in range(2)]
    work = Work()
    requests = [asyncio.ensure_future(replicas[number % 2].get(b"k", work)) for number in range(100)]
    await asyncio.sleep(0.01)
    work.gate.set()
    found = await asyncio.gather(*requests)
    assert work.calls == 1
    assert {one.value for one in found} == {"value"}
    origins = [one.origin for one in found]
    assert (origins.count("computed"), origins.count("joined")) == (1, 99)
    for replica in replicas:
        await replica.reads.close()
        assert replica.memory.values == shared.values
        assert (await replica.get(b"k", work)).origin == "memory"


async def test_a_leader_killed_mid_way_is_replaced_once() -> None:
    shared = DictTier("redis")
    leases = DictLeases(shared)
    living = Replica(shared, leases)
    again = Work()
    # What a killed process leaves behind: a lease that nobody prolongs.
    lease = await leases.acquire(b"k", 1)
    assert lease is not None
    requests = [asyncio.ensure_future(living.get(b"k", again)) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert again.calls == 0
    leases.expire(b"k")
    again.gate.set()
    assert {one.value for one in await asyncio.gather(*requests)} == {"value"}
    assert again.calls == 1
    # The dead one wakes up after all: its write is refused.
    await living.reads.close()
    assert not await shared.put_fenced(b"k", encode_text(b"k", "stale"), lease.token)
    assert shared.values[b"k"] == encode_text(b"k", "value")


async def test_a_failing_leader_gives_the_lease_back_and_another_replica_computes() -> None:
    shared = DictTier("redis")
    leases = DictLeases(shared)
    replicas = [Replica(shared, leases) for _ in range(2)]
    failing, working = Work(), Work()
    failing.error = RuntimeError("out of memory")
    first = asyncio.ensure_future(replicas[0].get(b"k", failing))
    await asyncio.sleep(0.005)
    second = asyncio.ensure_future(replicas[1].get(b"k", working))
    await asyncio.sleep(0.005)
    assert working.calls == 0
    failing.gate.set()
    working.gate.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        await first
    assert await second == Found("value", "computed")
    for replica in replicas:
        await replica.reads.close()
    assert leases.held == {}


async def test_shared_tier_and_leases_down_means_computing_at_once() -> None:
    shared = DictTier("redis")
    leases = DictLeases(shared)
    shared.down = leases.down = True
    replica = Replica(shared, leases)
    work = Work()
    work.gate.set()
    assert await replica.get(b"k", work) == Found("value", "computed")
    await replica.reads.close()
    assert replica.cluster.stats.unavailable == 1
    assert (await replica.get(b"k", work)).origin == "memory"


async def test_without_a_cluster_the_tiers_are_filled_directly() -> None:
    memory = DictTier("memory")
    reads = ReadThrough(TieredCache([memory], decode_text), encode_text, flights=SingleFlight())
    work = Work()
    work.gate.set()
    assert await reads.get_or_compute(b"k", work) == Found("value", "computed")
    await reads.close()
    assert await reads.get_or_compute(b"k", work) == Found("value", "memory")
    assert work.calls == 1


async def test_callers_own_errors_come_through() -> None:
    memory = DictTier("memory")
    reads = ReadThrough(TieredCache([memory], decode_text), encode_text, flights=SingleFlight())
    work = Work()
    work.error = RuntimeError("mine")
    work.gate.set()
    with pytest.raises(RuntimeError, match="mine"):
        await reads.get_or_compute(b"k", work)
    assert memory.values == {}


def test_half_a_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        ReadThrough(TieredCache([], decode_text), encode_text, flights=SingleFlight(), shared=DictTier("redis"))
