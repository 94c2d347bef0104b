"""The Redis tier on a server that is slow, gone, or refuses us: nothing raises, nothing waits, nothing wrong is served.

Bounds on waiting are checked against hangs that would last for ever. Where an answer is expected the tests ask until
there is one, so no assertion depends on how fast a machine is.
"""

import asyncio
import logging
import random
import time
from typing import Any

import pytest

from cache_service.circuit_breaker import BreakerState
from cache_service.redis_tier import RedisTier
from cache_service.tier import LookupResult
from cache_service.tiered import TieredCache
from tests.redis.rig import (
    ChaosProxy,
    Mode,
    Server,
    decode,
    embedding,
    is_right,
    new_key,
    open_tier,
    running_proxy,
    running_server,
    until,
)

pytestmark = pytest.mark.redis

QUICK: dict[str, Any] = {
    "read_timeout_s": 0.1,
    "write_timeout_s": 0.1,
    "connect_timeout_s": 0.2,
    "breaker_failures": 3,
    "breaker_open_s": 0.05,
}
FAR_TOO_LONG_S = 10.0  # a look-up that hangs would be far above, and one that is bounded far below


async def lookup(tier: RedisTier, key: bytes) -> LookupResult:
    started = time.monotonic()
    (answer,) = await tier.get_many([key])
    assert time.monotonic() - started < FAR_TOO_LONG_S
    return answer.result


async def until_it_answers(tier: RedisTier, key: bytes) -> LookupResult:
    async with asyncio.timeout(20):
        while (result := await lookup(tier, key)) is LookupResult.ERROR:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)
    return result


async def until_up(tier: RedisTier) -> None:
    async with asyncio.timeout(20):
        while not await tier.start():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)


async def store(server: Server, *keys: bytes) -> None:
    """Put the right values there by a way that has all the time it needs."""
    async with open_tier(server.url) as tier:
        for key in keys:
            assert await tier.put_fenced(key, embedding(key), None)


async def test_start_without_a_server_and_join_when_it_comes() -> None:
    server = Server()
    server.start()
    server.kill()
    key = new_key()
    async with open_tier(server.url, **QUICK) as tier:
        assert not await tier.start()
        assert await lookup(tier, key) is LookupResult.ERROR
        assert await tier.put(key, embedding(key))  # taken in, and dropped when its turn comes
        assert await tier.flush()
        assert tier.stats().dropped_writes == 1
        server.start()
        try:
            assert await until_it_answers(tier, key) is LookupResult.MISS
            await store(server, key)
            assert await until_it_answers(tier, key) is LookupResult.HIT
        finally:
            server.kill()


@pytest.mark.parametrize("mode", ["reset", "blackhole", "garbage"])
async def test_a_server_that_misbehaves_is_left_alone_and_found_again(server: Server, mode: Mode) -> None:
    key = new_key()
    await store(server, key)
    async with running_proxy(server.port) as proxy, open_tier(proxy.url, **QUICK) as tier:
        assert await until_it_answers(tier, key) is LookupResult.HIT
        proxy.mode = mode
        while tier.stats().breaker.state is BreakerState.CLOSED:
            assert await lookup(tier, key) is LookupResult.ERROR
        assert tier.stats().breaker.times_opened >= 1
        failures = tier.stats().link.failures
        for _ in range(100):  # free of charge now
            assert await lookup(tier, key) is LookupResult.ERROR
        assert tier.stats().link.failures == failures
        assert await tier.put(key, b"dropped")
        assert await tier.flush()
        proxy.mode = "pass"
        assert await until_it_answers(tier, key) is LookupResult.HIT


async def test_a_slow_server_costs_one_bound_and_is_no_danger_afterwards(server: Server) -> None:
    """Answers that come after their reader has gone must not reach the next one."""
    keys = [new_key() for _ in range(20)]
    async with running_proxy(server.port) as proxy, open_tier(proxy.url, **QUICK) as tier:
        cache = TieredCache([tier], decode)
        await store(server, *keys)
        await until_up(tier)
        proxy.delay_s = 60.0
        assert await lookup(tier, keys[0]) is LookupResult.ERROR
        proxy.delay_s = 0.1  # about the bound: some answers come just before it, some just after
        for _ in range(3):
            for key, hit in zip(keys, await asyncio.gather(*(cache.get(key) for key in keys)), strict=True):
                assert hit is None or is_right(key, hit.value)
            await asyncio.sleep(0.1)
        proxy.delay_s = 0.0
        await until_it_answers(tier, keys[0])
        for key in keys:
            hit = await cache.get(key)
            assert hit is None or is_right(key, hit.value)
        assert cache.stats.lookups["redis", LookupResult.CORRUPT] == 0


async def test_killed_and_restarted_under_load() -> None:
    """No call raises, none hangs, nothing wrong is served, and in the end everything works again."""
    keys = [new_key() for _ in range(30)]
    stop = asyncio.Event()
    served = wrong = slow = 0

    async def client(cache: TieredCache[Any], seed: int) -> None:
        nonlocal served, wrong, slow
        choose = random.Random(seed)
        while not stop.is_set():
            started = time.monotonic()
            picked = choose.sample(keys, 3)
            for key, hit in zip(picked, await cache.get_many(picked), strict=True):
                if hit is None:
                    await cache.put(key, embedding(key, rows=choose.choice([4, 40])))
                else:
                    served += 1
                    wrong += not is_right(key, hit.value)
            slow += time.monotonic() - started > FAR_TOO_LONG_S
            await asyncio.sleep(0.001)

    with running_server() as server:
        async with open_tier(server.url, max_value_bytes=1024, **QUICK) as tier:
            cache = TieredCache([tier], decode)
            clients = [asyncio.ensure_future(client(cache, seed)) for seed in range(8)]
            for _ in range(2):
                before = served
                await until(lambda before=before: served > before + 50)  # type: ignore[misc]
                server.kill()
                errors = tier.stats().errors
                await until(lambda errors=errors: tier.stats().errors > errors + 20)  # type: ignore[misc]
                server.start()
            before = served
            await until(lambda: served > before + 50)
            stop.set()
            await asyncio.gather(*clients)
            stats = tier.stats()
    assert (wrong, slow) == (0, 0)
    assert stats.breaker.times_opened >= 2
    assert stats.corrupt == 0


async def test_a_password_we_lack_counts_as_down_and_is_logged_once_without_secrets(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key()
    with own_server.admin() as admin:
        admin.config_set("requirepass", "the-right-one")
    url = f"redis://:hunter2@127.0.0.1:{own_server.port}"
    with caplog.at_level(logging.DEBUG, logger="cache_service"):
        async with open_tier(url, **QUICK) as tier:
            assert not await tier.start()
            for _ in range(200):
                assert await lookup(tier, key) is LookupResult.ERROR
                await asyncio.sleep(0.001)
            assert tier.stats().breaker.probes > 1
    assert len(caplog.records) == 1
    assert "AuthenticationError" in caplog.text
    assert "hunter2" not in caplog.text
    assert str(own_server.port) not in caplog.text


async def test_a_password_set_during_use_and_taken_back(own_server: Server) -> None:
    key = new_key()
    async with open_tier(own_server.url, **QUICK) as tier:
        await store(own_server, key)
        assert await until_it_answers(tier, key) is LookupResult.HIT
        with own_server.admin() as admin:
            admin.config_set("requirepass", "new")
        with own_server.admin(password="new") as admin:
            admin.client_kill_filter(_type="normal", skipme=True)  # sessions that were let in before stay in
            while tier.stats().breaker.state is BreakerState.CLOSED:
                assert await lookup(tier, key) is LookupResult.ERROR
            admin.config_set("requirepass", "")
        assert await until_it_answers(tier, key) is LookupResult.HIT


async def test_a_permission_we_lack_is_an_error_and_the_server_is_still_alive(own_server: Server) -> None:
    with own_server.admin() as admin:
        admin.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+ping", "+get"])
    key = new_key()
    async with open_tier(f"redis://reader:pw@127.0.0.1:{own_server.port}") as tier:
        assert await tier.start()
        assert await lookup(tier, key) is LookupResult.MISS
        for _ in range(5):
            assert not await tier.put_fenced(key, b"v", None)
        assert await lookup(tier, key) is LookupResult.MISS
        assert tier.stats().link.error_replies == 5
        assert tier.stats().breaker.state is BreakerState.CLOSED


async def test_no_request_waits_for_a_probe_of_a_server_known_to_be_down(server: Server) -> None:
    async with running_proxy(server.port) as proxy:
        proxy.mode = "blackhole"
        async with open_tier(proxy.url, **(QUICK | {"connect_timeout_s": 60.0})) as tier:
            started = time.monotonic()
            for _ in range(10):
                assert await lookup(tier, new_key()) is LookupResult.ERROR
            assert time.monotonic() - started < FAR_TOO_LONG_S


async def test_more_readers_than_connections_are_served_in_turn(server: Server) -> None:
    keys = [new_key() for _ in range(40)]
    async with running_proxy(server.port) as proxy, open_tier(proxy.url, connections=2) as tier:
        await store(server, *keys)
        results = await asyncio.gather(*(lookup(tier, key) for key in keys))
        assert set(results) == {LookupResult.HIT}
        assert proxy.connections <= 2


async def test_cancelled_readers_leave_nothing_behind(server: Server) -> None:
    keys = [new_key() for _ in range(20)]
    async with running_proxy(server.port) as proxy, open_tier(proxy.url, connections=2) as tier:
        cache = TieredCache([tier], decode)
        await store(server, *keys)
        proxy.delay_s = 0.02
        for round_number in range(5):
            readers = [asyncio.ensure_future(cache.get(key)) for key in keys]
            await asyncio.sleep(0.005 * round_number)
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
        proxy.delay_s = 0.0
        for key in keys:
            hit = await cache.get(key)
            assert hit is not None
            assert is_right(key, hit.value)


async def test_closing_is_bounded_and_leaves_no_task(server: Server) -> None:
    before = asyncio.all_tasks()
    proxy = ChaosProxy(server.port)
    await proxy.start()
    async with open_tier(proxy.url, **QUICK) as tier:
        await until_up(tier)
        proxy.mode = "blackhole"
        for _ in range(20):
            await tier.put(new_key(), bytes(1000))
    await proxy.close()
    assert asyncio.all_tasks() == before
    assert tier.stats().dropped_writes == 20
