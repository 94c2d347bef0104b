"""What every cache tier promises (cache_service/tier.py), run over each of them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from cache_service.memory_tier import MemoryTier
from cache_service.redis_tier import RedisTier
from cache_service.tier import CacheTier, LookupResult
from tests.redis.rig import Server, config, running_server

TTL_S = 0.2
MAX_BYTES = 200_000


@dataclass(frozen=True)
class Subject:
    tier: CacheTier
    settle: Callable[[], Awaitable[object]]
    """Waits until what was put or deleted is visible."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


@contextlib.asynccontextmanager
async def memory(request: pytest.FixtureRequest, ttl_s: float | None) -> AsyncIterator[Subject]:
    tier = MemoryTier(MAX_BYTES, ttl_s=ttl_s)
    yield Subject(tier, lambda: asyncio.sleep(0))
    tier.check_integrity()
    await tier.close()


@contextlib.asynccontextmanager
async def redis(request: pytest.FixtureRequest, ttl_s: float | None) -> AsyncIterator[Subject]:
    server: Server = request.getfixturevalue("server")
    options = {"max_bytes": MAX_BYTES, "max_value_bytes": 4096, "ttl_s": 3600.0 if ttl_s is None else ttl_s}
    tier = RedisTier.connect(config(server.url, **options), kind="embedding")
    yield Subject(tier, tier.flush)
    await tier.close()


TIERS = [pytest.param(memory, id="memory"), pytest.param(redis, id="redis", marks=pytest.mark.redis)]


@pytest.fixture(params=TIERS)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with request.param(request, None) as made:
        yield made


@pytest.fixture(params=TIERS)
async def short_lived(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with request.param(request, TTL_S) as made:
        yield made


def key() -> bytes:
    return os.urandom(32)


async def results(tier: CacheTier, *keys: bytes) -> list[LookupResult]:
    return [lookup.result for lookup in await tier.get_many(keys)]


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 50_000])
async def test_what_is_put_is_got_whole_and_read_only(subject: Subject, num_bytes: int) -> None:
    name, value = key(), os.urandom(num_bytes)
    assert await subject.tier.put(name, value)
    await subject.settle()
    (lookup,) = await subject.tier.get_many([name])
    assert lookup.result is LookupResult.HIT
    assert lookup.value == value
    assert lookup.value is not None
    assert lookup.value.readonly


async def test_views_are_values_too(subject: Subject) -> None:
    name, value = key(), os.urandom(9000)
    assert await subject.tier.put(name, memoryview(value)[1000:8000])
    await subject.settle()
    (lookup,) = await subject.tier.get_many([name])
    assert lookup.value == value[1000:8000]


async def test_answers_come_in_the_order_of_the_keys(subject: Subject) -> None:
    names = [key() for _ in range(6)]
    for position in (4, 0, 2):
        assert await subject.tier.put(names[position], b"%d" % position * (3000 * position + 1))
    await subject.settle()
    lookups = await subject.tier.get_many([*names, names[0]])
    assert [lookup.result is LookupResult.HIT for lookup in lookups] == [True, False, True, False, True, False, True]
    for position in (0, 2, 4):
        assert lookups[position].value == b"%d" % position * (3000 * position + 1)
    assert await subject.tier.get_many([]) == []


async def test_the_last_value_wins(subject: Subject) -> None:
    name = key()
    for value in (b"a" * 10_000, b"b", b"c" * 20_000, b"d" * 10_000):
        assert await subject.tier.put(name, value)
        await subject.settle()
        (lookup,) = await subject.tier.get_many([name])
        assert lookup.value == value


async def test_deleted_is_a_miss_and_unknown_keys_are_ignored(subject: Subject) -> None:
    small, large = key(), key()
    await subject.tier.put(small, b"v")
    await subject.tier.put(large, bytes(20_000))
    await subject.settle()
    for name in (small, large, key()):
        await subject.tier.delete(name)
    await subject.settle()
    assert await results(subject.tier, small, large) == [LookupResult.MISS] * 2


async def test_too_large_is_declined_and_changes_nothing(subject: Subject) -> None:
    name = key()
    assert not await subject.tier.put(name, bytes(MAX_BYTES + 1))
    await subject.settle()
    assert await results(subject.tier, name) == [LookupResult.MISS]


@pytest.mark.parametrize("num_bytes", [10, 20_000])
async def test_entries_expire(short_lived: Subject, num_bytes: int) -> None:
    name = key()
    await short_lived.tier.put(name, bytes(num_bytes))
    await short_lived.settle()
    await asyncio.sleep(2 * TTL_S)
    assert await results(short_lived.tier, name) == [LookupResult.MISS]


async def test_many_callers_at_once_get_their_own_values(subject: Subject) -> None:
    values = {key(): os.urandom(2000 + 500 * number) for number in range(10)}
    for name, value in values.items():
        assert await subject.tier.put(name, value)
    await subject.settle()

    async def read(name: bytes) -> bool:
        (lookup,) = await subject.tier.get_many([name])
        return lookup.value == values[name]

    assert all(await asyncio.gather(*(read(name) for name in [*values] * 10)))


async def test_a_closed_tier_answers_without_raising(subject: Subject) -> None:
    name = key()
    await subject.tier.put(name, b"v")
    await subject.tier.close()
    (result,) = await results(subject.tier, name)
    assert result in (LookupResult.MISS, LookupResult.ERROR)
    await subject.tier.put(name, b"v")
    await subject.tier.delete(name)
