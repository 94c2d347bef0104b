"""Host memory is handed out in turn, never twice, and always comes back."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import InternalError
from deployments.lm_engine.embed_pool import ALIGNMENT, EmbedPool, Lease

UNIT = ALIGNMENT


async def in_line(pool: EmbedPool, *units: int) -> list[asyncio.Task[Lease]]:
    """Takers who wait, in this order."""
    tasks = [asyncio.create_task(pool.take(n * UNIT)) for n in units]
    await asyncio.sleep(0)
    assert pool.stats().waiting == len(units)
    return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lease_that_fits_is_there_at_once_and_does_not_overlap() -> None:
    pool = EmbedPool(4 * UNIT)
    leases = [await pool.take(UNIT) for _ in range(4)]
    assert sorted(lease.offset for lease in leases) == [0, UNIT, 2 * UNIT, 3 * UNIT]
    assert pool.stats().used_bytes == pool.stats().total_bytes == 4 * UNIT
    assert pool.try_take(1) is None


async def test_who_came_first_is_served_first_though_another_one_would_fit() -> None:
    pool = EmbedPool(4 * UNIT)
    small, large = await pool.take(UNIT), await pool.take(3 * UNIT)
    first, second = await in_line(pool, 4, 1)
    pool.release(small)
    await settle()
    assert not second.done(), "a large item would never get its turn"
    assert pool.try_take(UNIT) is None
    pool.release(large)
    await settle()
    assert first.done()
    assert not second.done()
    pool.release(first.result())
    assert (await second).offset == 0
    pool.check_integrity()


async def test_who_gives_up_leaves_the_line_to_the_next_at_once() -> None:
    pool = EmbedPool(2 * UNIT)
    held = await pool.take(UNIT)
    first, second = await in_line(pool, 2, 1)
    first.cancel()
    await settle()
    assert second.done()
    assert pool.stats().waiting == 0
    pool.release(held)
    pool.release(second.result())
    pool.check_integrity()
    assert pool.stats().used_bytes == 0


async def test_a_lease_handed_to_one_who_gives_up_at_the_same_moment_is_not_lost() -> None:
    pool = EmbedPool(UNIT)
    held = await pool.take(UNIT)
    first, second = await in_line(pool, 1, 1)
    pool.release(held)  # the first one's now, who does not know yet
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()


async def test_more_than_there_is_at_all_is_refused_instead_of_waited_for() -> None:
    pool = EmbedPool(2 * UNIT)
    with pytest.raises(InternalError, match=f"of {2 * UNIT + 1} bytes is larger than the pool, embed_pool_bytes"):
        await pool.take(2 * UNIT + 1)


async def test_releasing_twice_is_releasing_once() -> None:
    pool = EmbedPool(UNIT)
    old = await pool.take(UNIT)
    pool.release(old)
    new = await pool.take(UNIT)
    pool.release(old)
    assert pool.stats().used_bytes == UNIT
    pool.release(new)
    assert pool.stats().used_bytes == 0


async def test_what_nobody_claims_is_taken_back_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    pool = EmbedPool(2 * UNIT, ttl_s=10, clock=lambda: now[0])
    claimed, forgotten = await pool.take(UNIT), await pool.take(UNIT)
    pool.claim(claimed)
    now[0] = 9.9
    assert pool.try_take(UNIT) is None
    now[0] = 10
    assert (await pool.take(UNIT)).offset == forgotten.offset
    assert pool.stats().expired == 1
    assert "were not claimed" in caplog.text
    with pytest.raises(InternalError, match="not claimed in time"):
        pool.claim(forgotten)
    pool.release(forgotten)  # whose memory is another one's now
    assert pool.stats().used_bytes == 2 * UNIT
    pool.check_integrity()


async def test_who_waits_gets_what_is_taken_back_though_nothing_else_happens() -> None:
    pool = EmbedPool(UNIT, ttl_s=0.02)
    await pool.take(UNIT)
    async with asyncio.timeout(10):
        await pool.take(UNIT)
    assert pool.stats().expired == 1


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 24))
def test_whatever_the_order_all_are_served_and_all_comes_back(seed: int, num_units: int, num_takers: int) -> None:
    asyncio.run(asyncio.wait_for(_disorder(random.Random(seed), num_units, num_takers), 30))


async def _disorder(rng: random.Random, num_units: int, num_takers: int) -> None:
    """Takers of random sizes hold for a random while; some are cancelled anywhere, some never claim."""
    now = [0.0]
    pool = EmbedPool(num_units * UNIT, ttl_s=50, clock=lambda: now[0])
    in_use: set[int] = set()
    served, forgotten = 0, 0

    async def steps() -> None:
        for _ in range(rng.randrange(12)):
            now[0] += 0.01
            await asyncio.sleep(0)

    async def taker(num_bytes: int, forgets: bool) -> None:
        nonlocal served, forgotten
        await steps()
        lease = await pool.take(num_bytes)
        if forgets:
            forgotten += 1
            return
        pool.claim(lease)
        mine = set(range(lease.offset, lease.offset + lease.num_bytes, UNIT))
        try:
            assert not mine & in_use, "two have the same memory"
            in_use.update(mine)
            await steps()
            pool.check_integrity()
        finally:
            in_use.difference_update(mine)
            pool.release(lease)
        served += 1

    async def clock() -> None:
        while True:  # unclaimed leases are taken back in time, as the timer would see to
            now[0] += 1
            pool._on_timer()
            await asyncio.sleep(0)

    ticking = asyncio.create_task(clock())
    tasks = [
        asyncio.create_task(taker(rng.randint(1, num_units * UNIT), rng.random() < 0.1)) for _ in range(num_takers)
    ]
    leaving = [task for task in tasks if rng.random() < 0.3]
    for task in leaving:
        await steps()
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    now[0] += 100
    pool.try_take(1)
    ticking.cancel()
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
    assert served + forgotten + sum(isinstance(r, asyncio.CancelledError) for r in results) == num_takers
    assert pool.stats().waiting == 0
    assert pool.stats().expired == forgotten
    pool.check_integrity()
    assert pool.stats().used_bytes == UNIT  # of the last one asked for here
