"""Leases and fencing on a real server."""

import asyncio

import pytest

from cache_service.cluster_flight import LeaseUnavailableError
from cache_service.redis_lease import RedisLeases
from cache_service.redis_tier import RedisTier
from cache_service.tier import LookupResult
from tests.redis.rig import Server, new_key, open_tier

pytestmark = pytest.mark.redis


def leases_of(tier: RedisTier) -> RedisLeases:
    return RedisLeases(tier.link, tier.layout, timeout_s=5)


async def test_one_holder_at_a_time_and_tokens_only_grow(server: Server) -> None:
    key, other = new_key(), new_key()
    async with open_tier(server.url) as a, open_tier(server.url) as b:
        here, there = leases_of(a), leases_of(b)
        granted = [
            one for one in await asyncio.gather(*(store.acquire(key, 60) for store in [here, there] * 10)) if one
        ]
        assert len(granted) == 1
        assert await there.acquire(other, 60)
        await there.release(granted[0])
        second = await there.acquire(key, 60)
        assert second is not None
        assert second.token > granted[0].token


async def test_it_expires_by_itself_and_is_prolonged_only_by_its_holder(server: Server) -> None:
    key = new_key()
    async with open_tier(server.url) as tier:
        leases = leases_of(tier)
        dead = await leases.acquire(key, 0.05)
        assert dead is not None
        await asyncio.sleep(0.1)
        assert not await leases.extend(dead, 60)
        alive = await leases.acquire(key, 20)
        assert alive is not None
        assert not await leases.extend(dead, 60)
        await leases.release(dead)  # somebody else's by now
        assert await leases.acquire(key, 60) is None
        assert await leases.extend(alive, 60)
        with server.admin() as admin:
            assert admin.pttl(tier.layout.lease(key)) > 20_000  # type: ignore[operator]


@pytest.mark.parametrize("num_bytes", [10, 5000])
async def test_a_stale_holder_cannot_write(server: Server, num_bytes: int) -> None:
    key = new_key()
    async with open_tier(server.url, max_value_bytes=1024) as tier:
        leases = leases_of(tier)
        stale = await leases.acquire(key, 0.02)
        await asyncio.sleep(0.05)
        fresh = await leases.acquire(key, 60)
        assert stale is not None
        assert fresh is not None
        assert await tier.put_fenced(key, b"f" * num_bytes, fresh.token)
        assert not await tier.put_fenced(key, b"s" * num_bytes, stale.token)
        (lookup,) = await tier.get_many([key])
        assert lookup.value == b"f" * num_bytes
        assert tier.stats().fenced_writes == 1
        assert tier.stats().dropped_writes == 0


async def test_a_late_but_newest_holder_may_still_write(server: Server) -> None:
    key = new_key()
    async with open_tier(server.url) as tier:
        lease = await leases_of(tier).acquire(key, 0.02)
        await asyncio.sleep(0.05)
        assert lease is not None
        assert await tier.put_fenced(key, b"v", lease.token)
        with server.admin() as admin:
            admin.flushall()  # a restart in between: nobody newer is known
        assert await tier.put_fenced(key, b"v", lease.token)
        (lookup,) = await tier.get_many([key])
        assert lookup.result is LookupResult.HIT


async def test_without_a_server_nobody_knows(own_server: Server) -> None:
    async with open_tier(own_server.url) as tier:
        await tier.start()
        own_server.kill()
        leases = leases_of(tier)
        with pytest.raises(LeaseUnavailableError):
            await leases.acquire(new_key(), 60)
        own_server.start()
