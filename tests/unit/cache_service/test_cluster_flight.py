import asyncio

import pytest

from cache_service.cluster_flight import ClusterFlight, Lease
from cache_service.single_flight import Flight
from tests.unit.cache_service.tiers import DictLeases, DictTier

KEY = b"k"


class Rig:
    """One replica over a shared dict, with its computation and its publications in view."""

    def __init__(self, leases: DictLeases | None = None, **options: float) -> None:
        self.leases = leases or DictLeases(DictTier("redis"))
        self.values = self.leases.tier.values
        self.flight: ClusterFlight[bytes] = ClusterFlight(
            self.leases, **({"lease_s": 0.03, "first_poll_s": 0.001, "last_poll_s": 0.001} | options)
        )
        self.computed = 0
        self.published: list[Lease | None] = []
        self.gate = asyncio.Event()
        self.publish_gate = asyncio.Event()
        self.publish_gate.set()

    async def lookup(self) -> bytes | None:
        return self.values.get(KEY)

    async def compute(self) -> bytes:
        self.computed += 1
        await self.gate.wait()
        return b"value"

    async def publish(self, value: bytes, lease: Lease | None) -> None:
        await self.publish_gate.wait()
        self.published.append(lease)
        await self.leases.tier.put_fenced(KEY, value, None if lease is None else lease.token)

    async def run(self) -> Flight[bytes]:
        return await self.flight.run(KEY, lookup=self.lookup, compute=self.compute, publish=self.publish)


async def test_the_lease_is_kept_until_the_value_is_there() -> None:
    rig = Rig()
    rig.gate.set()
    rig.publish_gate.clear()
    assert await rig.run() == Flight(b"value", joined=False)  # the caller does not wait for the publication
    await asyncio.sleep(0.001)
    assert KEY in rig.leases.held
    other = Rig(rig.leases)
    waiting = asyncio.ensure_future(other.run())
    await asyncio.sleep(0.005)
    assert not waiting.done()
    rig.publish_gate.set()
    assert await waiting == Flight(b"value", joined=True)
    await rig.flight.close()
    assert rig.leases.held == {}
    assert (rig.flight.stats.leads, other.flight.stats.joins, other.computed) == (1, 1, 0)


async def test_a_value_published_between_look_up_and_lease_is_found() -> None:
    rig = Rig()
    rig.values[KEY] = b"published"
    assert await rig.run() == Flight(b"published", joined=True)
    await rig.flight.close()
    assert rig.leases.held == {}
    assert rig.computed == 0


async def test_a_long_computation_prolongs_its_lease() -> None:
    rig = Rig()
    running = asyncio.ensure_future(rig.run())
    while rig.leases.calls["extend"] < 2:  # noqa: ASYNC110 - beats come by the clock
        await asyncio.sleep(0.005)
    rig.gate.set()
    await running
    await rig.flight.close()
    beats = rig.leases.calls["extend"]
    await asyncio.sleep(0.03)
    assert rig.leases.calls["extend"] == beats


async def test_a_lost_lease_is_counted_and_its_write_refused() -> None:
    rig = Rig()
    running = asyncio.ensure_future(rig.run())
    await asyncio.sleep(0.002)
    rig.leases.expire(KEY)
    successor = await rig.leases.acquire(KEY, 1)
    assert successor is not None
    while not rig.flight.stats.lost:  # noqa: ASYNC110 - beats come by the clock
        await asyncio.sleep(0.005)
    rig.gate.set()
    assert (await running).value == b"value"
    await rig.flight.close()
    assert rig.values == {}
    assert rig.leases.held == {KEY: successor.token}  # not given back by the one that lost it


async def test_a_wait_is_bounded_and_then_computes_without_a_lease() -> None:
    rig = Rig(max_wait_s=0.01)
    await rig.leases.acquire(KEY, 1)
    rig.gate.set()
    assert await rig.run() == Flight(b"value", joined=False)
    await rig.flight.close()
    assert rig.published == [None]
    assert rig.flight.stats.timeouts == 1


async def test_a_store_that_goes_away_while_waiting_ends_the_wait() -> None:
    rig = Rig()
    await rig.leases.acquire(KEY, 1)
    running = asyncio.ensure_future(rig.run())
    await asyncio.sleep(0.005)
    rig.leases.down = True
    rig.gate.set()
    assert await running == Flight(b"value", joined=False)
    assert rig.flight.stats.unavailable == 1
    await rig.flight.close()


@pytest.mark.parametrize("gate_open", [True, False])
async def test_errors_and_cancellation_give_the_lease_back(gate_open: bool) -> None:
    rig = Rig()

    async def fail() -> bytes:
        if not gate_open:
            await asyncio.get_running_loop().create_future()
        raise RuntimeError("boom")

    running = asyncio.ensure_future(rig.flight.run(KEY, lookup=rig.lookup, compute=fail, publish=rig.publish))
    await asyncio.sleep(0.002)
    running.cancel()
    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        await running
    await rig.flight.close()
    assert rig.leases.held == {}
    assert rig.published == []
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    "options", [{"lease_s": 0}, {"max_wait_s": -1}, {"first_poll_s": 0}, {"first_poll_s": 2, "last_poll_s": 1}]
)
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="lease_s must be above 0"):
        ClusterFlight(DictLeases(DictTier("redis")), **options)
