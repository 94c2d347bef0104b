from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission import Admission, AdmissionConfig
from cache_service.rate_limit import RateLimiter
from cache_service.tenants import Tenant, TenantLimits
from deployments.errors import NotReadyError, OverloadedError, RateLimitError

A, B, C = (Tenant(name=name) for name in "abc")


def make(running: int = 1, queued: int = 8, **options: Any) -> Admission:
    return Admission(AdmissionConfig(max_running_requests=running, max_queued_requests=queued, **options))


class Holder:
    """Holds a place until told to let go."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self.inside, self.leave = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(admission, tenant))

    async def _hold(self, admission: Admission, tenant: Tenant) -> None:
        async with admission.place(tenant):
            self.inside.set()
            await self.leave.wait()

    async def end(self) -> None:
        self.leave.set()
        await asyncio.gather(self.task, return_exceptions=True)


async def end_all(holders: list[Holder]) -> None:
    for holder in holders:
        holder.leave.set()
    await asyncio.gather(*(holder.task for holder in holders))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_full_server_queues_and_hands_over_in_order() -> None:
    admission = make()
    first, second, third = [Holder(admission, A) for _ in range(3)]
    await settle()
    assert (first.inside.is_set(), second.inside.is_set()) == (True, False)
    assert (admission.stats.running, admission.stats.queued) == (1, 2)
    await first.end()
    await settle()
    assert (second.inside.is_set(), third.inside.is_set()) == (True, False)
    await second.end()
    await third.end()
    assert (admission.stats.running, admission.stats.queued) == (0, 0)
    admission.check_integrity()


async def test_a_full_queue_refuses_at_once() -> None:
    admission = make(queued=1)
    holders = [Holder(admission, A), Holder(admission, A)]
    await settle()
    with pytest.raises(OverloadedError, match="1 requests are running and 1 are waiting") as caught:
        async with admission.place(B):
            pass
    assert caught.value.retry_after_s == 1
    assert admission.stats.refused_full == 1
    await end_all(holders)


async def test_closed_it_refuses_what_comes_and_lets_go_on_what_has_come() -> None:
    admission = make()
    running, queued = Holder(admission, A), Holder(admission, B)
    await settle()
    admission.is_closed = True
    with pytest.raises(NotReadyError, match="shutting down") as caught:
        async with admission.place(C):
            pass
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "shutting_down", 1)
    assert admission.in_flight == 2
    await running.end()
    await settle()
    assert queued.inside.is_set()
    await queued.end()
    assert admission.in_flight == 0
    admission.is_closed = False
    async with admission.place(C):
        assert admission.in_flight == 1


async def test_no_place_in_time_is_refused_and_leaves_nothing_behind() -> None:
    admission = make(queue_timeout_s=0.01)
    holder = Holder(admission, A)
    await settle()
    with pytest.raises(OverloadedError) as caught:
        async with admission.place(B):
            pass
    assert caught.value.code == "queue_timeout"
    assert admission.stats.queued == 0
    await holder.end()
    admission.check_integrity()


async def test_a_flood_waits_behind_itself() -> None:
    admission = make(running=2, queued=32)
    flood = [Holder(admission, A) for _ in range(10)]
    await settle()
    other = Holder(admission, B)
    await settle()
    assert not other.inside.is_set()
    await flood[0].end()
    await settle()
    assert other.inside.is_set(), "b has nothing running, so the next place is its own"
    await end_all([*flood, other])


async def test_equal_tenants_take_turns() -> None:
    admission = make(running=1, queued=32)
    order: list[str] = []

    async def work(tenant: Tenant) -> None:
        async with admission.place(tenant):
            order.append(tenant.name)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(tenant) for tenant in [A, A, A, A, B, B, C]))
    assert order == ["a", "b", "c", "a", "b", "a", "a"]


async def test_share_of_the_queue() -> None:
    admission = make(queued=8, max_queued_requests_per_tenant=1)
    holders = [Holder(admission, A), Holder(admission, A)]
    await settle()
    with pytest.raises(RateLimitError) as caught:
        async with admission.place(A):
            pass
    assert caught.value.code == "queue_share_exceeded"
    holders.append(Holder(admission, B))
    await settle()
    assert admission.stats.queued == 2
    await end_all(holders)


async def test_a_tenants_own_limits() -> None:
    now = [0.0]
    admission = Admission(AdmissionConfig(), RateLimiter(clock=lambda: now[0]))
    limited = Tenant(name="l", limits=TenantLimits(max_concurrent_requests=1, requests_per_minute=60))
    async with admission.place(limited):
        with pytest.raises(RateLimitError, match="1 in flight") as caught:
            async with admission.place(limited):
                pass
        assert caught.value.code == "concurrency_limit_exceeded"
    with pytest.raises(RateLimitError, match="60 a minute") as caught:
        async with admission.place(limited):
            pass
    assert caught.value.retry_after_s == pytest.approx(1.0)
    now[0] = 1.0
    async with admission.place(limited):
        pass
    assert (admission.stats.refused_tenant, admission.stats.refused_rate) == (1, 1)


async def test_cancelled_in_the_moment_of_the_hand_over() -> None:
    admission = make()
    first, second, third = [Holder(admission, A) for _ in range(3)]
    await settle()
    second.task.cancel()  # Its future is cancelled now, but it leaves the queue only when it runs again.
    first.leave.set()
    await settle()
    assert third.inside.is_set()
    await third.end()
    assert (admission.stats.running, admission.stats.queued) == (0, 0)
    admission.check_integrity()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 2**32))
def test_random_arrivals_and_cancellations_leave_nothing(running: int, queued: int, seed: int) -> None:
    asyncio.run(_storm(running, queued, random.Random(seed)))


async def _storm(running: int, queued: int, rng: random.Random) -> None:
    admission = make(running, queued)

    async def work(tenant: Tenant, steps: int) -> None:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(admission.place(tenant))
            except OverloadedError:
                return
            for _ in range(steps):
                await asyncio.sleep(0)

    tasks = []
    for _ in range(40):
        tasks.append(asyncio.create_task(work(rng.choice([A, B, C]), rng.randrange(4))))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
            admission.check_integrity()
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert (admission.stats.running, admission.stats.queued) == (0, 0)
    admission.check_integrity()


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"admission.max_running_requests is 0"):
        AdmissionConfig(max_running_requests=0)
    with pytest.raises(ValueError, match=r"admission.queue_timeout_s is 0"):
        AdmissionConfig(queue_timeout_s=0)
