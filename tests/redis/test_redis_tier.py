"""The Redis tier on a healthy server that holds all kinds of values under our names."""

import os
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from blake3 import blake3

from cache_service.codec import FORMAT_VERSION
from cache_service.identity import SCHEMA_VERSION
from cache_service.redis_layout import MANIFEST_BYTES, KeyLayout, is_manifest, split_value
from cache_service.redis_tier import RedisTier, open_link
from cache_service.tier import LookupResult
from cache_service.tiered import TieredCache
from tests.redis.rig import Server, config, decode, embedding, is_right, new_key, open_tier

pytestmark = pytest.mark.redis

LAYOUT = KeyLayout(kind="embedding")
CHUNKED = {"max_value_bytes": 1024}


def stored(server: Server) -> dict[bytes, bytes]:
    with server.admin() as admin:
        return {name: admin.get(name) for name in admin.keys("*")}  # type: ignore[misc,union-attr]


def corrupt(value: bytes, position: int) -> bytes:
    mutated = bytearray(value)
    mutated[position] ^= 0xFF
    return bytes(mutated)


def other_version(value: bytes) -> bytes:
    """A value of a later format whose checksum is right."""
    mutated = bytearray(value)
    mutated[4:6] = struct.pack("<H", FORMAT_VERSION + 1)
    mutated[8:40] = blake3(bytes(mutated[40:])).digest()
    return bytes(mutated)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "payload": lambda value: corrupt(value, -1),
    "shape": lambda value: corrupt(value, 112),
    "magic": lambda value: corrupt(value, 0),
    "version": other_version,
    "truncated": lambda value: value[:-1],
    "header only": lambda value: value[:160],
    "empty": lambda value: b"",
    "longer": lambda value: value + b"\0",
    "another key's": lambda value: embedding(new_key()),
    "another key's, other shape": lambda value: embedding(new_key(), rows=9),
    "somebody's pickle": lambda value: b"\x80\x04\x95" + value,
    "a manifest of nothing": lambda value: split_value(value, 256).head,
    "half a manifest": lambda value: split_value(value, 256).head[: MANIFEST_BYTES - 1],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_damaged_value_is_a_counted_miss_is_deleted_and_never_served(
    server: Server, damage: Callable[[bytes], bytes]
) -> None:
    key = new_key()
    async with open_tier(server.url) as tier:
        cache = TieredCache([tier], decode)
        with server.admin() as admin:
            admin.set(LAYOUT.value(key), damage(embedding(key)))
        assert await cache.get(key) is None
        seen = cache.stats.lookups
        assert seen["redis", LookupResult.CORRUPT] + seen["redis", LookupResult.MISS] == 1
        await tier.flush()
        if seen["redis", LookupResult.CORRUPT]:
            assert stored(server) == {}
        await cache.put(key, embedding(key))
        await tier.flush()
        hit = await cache.get(key)
        assert hit is not None
        assert is_right(key, hit.value)


@pytest.mark.parametrize("keys", [1, 3])
async def test_a_foreign_type_under_our_name_is_corrupt_and_harms_no_other_key(server: Server, keys: int) -> None:
    wanted = [new_key() for _ in range(keys)]
    async with open_tier(server.url) as tier:
        for key in wanted[1:]:
            await tier.put(key, embedding(key))
        await tier.flush()
        with server.admin() as admin:
            admin.rpush(LAYOUT.value(wanted[0]), "x")
        lookups = await tier.get_many(wanted)
        assert [lookup.result for lookup in lookups] == [LookupResult.CORRUPT] + [LookupResult.HIT] * (keys - 1)
        await tier.flush()
        assert len(stored(server)) == keys - 1
        assert tier.stats().breaker.failures_in_row == 0


async def test_other_schemas_prefixes_and_kinds_are_not_seen(server: Server) -> None:
    key = new_key()
    with server.admin() as admin:
        for layout in (
            KeyLayout(kind="embedding", schema=SCHEMA_VERSION + 1),
            KeyLayout(kind="embedding", prefix="other"),
            KeyLayout(kind="item"),
        ):
            admin.set(layout.value(key), embedding(key))
    async with open_tier(server.url) as tier:
        (lookup,) = await tier.get_many([key])
        assert lookup.result is LookupResult.MISS


async def test_every_key_has_the_ttl(server: Server) -> None:
    async with open_tier(server.url, ttl_s=100, **CHUNKED) as tier:
        await tier.put(new_key(), bytes(10))
        await tier.put(new_key(), bytes(5000))
        await tier.flush()
    with server.admin() as admin:
        ttls = [admin.ttl(name) for name in admin.keys("*")]  # type: ignore[union-attr]
    assert len(ttls) == 7
    assert all(90 < ttl <= 160 for ttl in ttls)  # type: ignore[operator]


async def test_no_string_is_longer_than_allowed_and_rewriting_leaves_no_parts(server: Server) -> None:
    key = new_key()
    async with open_tier(server.url, **CHUNKED) as tier:
        for value in (os.urandom(5000), os.urandom(3000), b"small", os.urandom(2000)):
            await tier.put(key, value)
            await tier.flush()
            (lookup,) = await tier.get_many([key])
            assert lookup.value == value
            names = stored(server)
            assert max(map(len, names.values())) <= 1024
            if value != b"small":  # a plain write does not look for parts: they expire
                assert len(names) == -(-len(value) // (1024 - MANIFEST_BYTES)) + (len(value) == 2000) * 3
        await tier.delete(key)
        await tier.flush()
        (lookup,) = await tier.get_many([key])
        assert lookup.result is LookupResult.MISS


async def test_oversize_values_can_be_skipped(server: Server) -> None:
    async with open_tier(server.url, oversize="skip", **CHUNKED) as tier:
        assert not await tier.put(new_key(), bytes(1025))
        assert await tier.put(new_key(), bytes(1024))
        await tier.flush()
        assert tier.stats().dropped_writes == 1
    assert len(stored(server)) == 1


async def test_a_value_that_looks_like_a_manifest_is_declined(server: Server) -> None:
    async with open_tier(server.url) as tier:
        assert not await tier.put(new_key(), split_value(bytes(500), 256).head)


class Interposed:
    """A link that does something between two calls."""

    def __init__(self, link: Any, between: Callable[[int], None]) -> None:
        self._link, self._between, self._calls = link, between, 0

    async def call(self, operation: Callable[[Any], Awaitable[Any]], timeout_s: float, **options: Any) -> Any:
        self._between(self._calls)
        self._calls += 1
        return await self._link.call(operation, timeout_s, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


@pytest.mark.parametrize("how", ["delete a part", "expire a part", "truncate a part", "swap the parts", "delete all"])
async def test_eviction_between_the_two_steps_of_a_read(server: Server, how: str) -> None:
    key = new_key()
    value = embedding(key, rows=40)
    async with open_tier(server.url, **CHUNKED) as writer:
        await writer.put(key, value)
        await writer.flush()
    parts = sorted(name for name in stored(server) if b":c:" in name)
    assert len(parts) == 5

    def between(call: int) -> None:
        if call != 1:
            return
        with server.admin() as admin:
            if how == "delete a part":
                admin.delete(parts[2])
            elif how == "expire a part":
                admin.pexpire(parts[-1], 0)
            elif how == "truncate a part":
                admin.set(parts[0], admin.get(parts[0])[:-1])  # type: ignore[index]
            elif how == "swap the parts":
                first, second = admin.get(parts[0]), admin.get(parts[1])
                admin.set(parts[0], second)
                admin.set(parts[1], first)
            else:
                admin.flushall()

    options = config(server.url, **CHUNKED)
    link = Interposed(open_link(options), between)
    tier = RedisTier(options, kind="embedding", link=link)  # type: ignore[arg-type]
    cache = TieredCache([tier], decode)
    assert await cache.get(key) is None
    expected = LookupResult.CORRUPT if how in ("truncate a part", "swap the parts") else LookupResult.MISS
    assert cache.stats.lookups == {("redis", expected): 1}
    await tier.flush()
    if expected is LookupResult.CORRUPT:
        assert LAYOUT.value(key) not in stored(server)
    await tier.close()


async def test_replaced_between_the_two_steps_is_a_miss_not_a_mixture(server: Server) -> None:
    key = new_key()
    async with open_tier(server.url, **CHUNKED) as writer:
        await writer.put(key, os.urandom(5000))
        await writer.flush()
        other = split_value(os.urandom(5000), 1024)

        def between(call: int) -> None:
            if call == 1:
                with server.admin() as admin:
                    for name in stored(server):
                        admin.delete(name)
                    admin.set(LAYOUT.value(key), other.head)
                    for number, part in enumerate(other.rest, start=1):
                        admin.set(LAYOUT.part(key, other.manifest.write_id, number), bytes(part))

        options = config(server.url, **CHUNKED)
        tier = RedisTier(options, kind="embedding", link=Interposed(open_link(options), between))  # type: ignore[arg-type]
        (lookup,) = await tier.get_many([key])
        assert lookup.result is LookupResult.MISS
        await tier.close()


async def test_counters(server: Server) -> None:
    key = new_key()
    async with open_tier(server.url) as tier:
        await tier.get_many([key])
        await tier.put(key, bytes(100))
        await tier.flush()
        await tier.get_many([key, new_key()])
        stats = tier.stats()
    assert (stats.hits, stats.misses, stats.errors, stats.corrupt) == (1, 2, 0, 0)
    assert (stats.bytes_in, stats.bytes_out, stats.dropped_writes) == (100, 100, 0)


async def test_server_out_of_memory_drops_writes_and_goes_on_serving(own_server: Server) -> None:
    key = new_key()
    async with open_tier(own_server.url) as tier:
        await tier.put(key, embedding(key))
        await tier.flush()
        with own_server.admin() as admin:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", 1)
        for _ in range(5):
            assert not await tier.put_fenced(new_key(), bytes(100), None)
        (lookup,) = await tier.get_many([key])
        assert lookup.result is LookupResult.HIT
        assert tier.stats().dropped_writes == 5
        assert tier.stats().link.failures == 0


async def test_manifest_is_what_the_operator_sees_first(server: Server) -> None:
    key = new_key()
    async with open_tier(server.url, **CHUNKED) as tier:
        await tier.put(key, embedding(key, rows=40))
        await tier.flush()
    head = stored(server)[LAYOUT.value(key)]
    assert is_manifest(head)
    assert head[MANIFEST_BYTES : MANIFEST_BYTES + 4] == b"SLCV"
