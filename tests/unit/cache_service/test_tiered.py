import threading

from cache_service.memory_tier import MemoryTier
from cache_service.tier import LookupResult
from cache_service.tiered import CacheHit, TieredCache
from tests.unit.cache_service.tiers import DictTier, decode_text, encode_text


async def test_the_nearest_tier_answers_and_those_above_it_learn() -> None:
    upper, middle, lower = (DictTier(name) for name in ("upper", "middle", "lower"))
    cache = TieredCache([upper, middle, lower], decode_text)
    lower.values[b"k"] = encode_text(b"k", "v")
    assert await cache.get(b"k") == CacheHit("v", "lower")
    assert await cache.get(b"k") == CacheHit("v", "upper")
    assert middle.values == upper.values == lower.values
    assert cache.stats.lookups == {
        ("upper", LookupResult.MISS): 1,
        ("middle", LookupResult.MISS): 1,
        ("lower", LookupResult.HIT): 1,
        ("upper", LookupResult.HIT): 1,
    }
    assert cache.stats.bytes == {
        ("lower", "read"): 3,
        ("upper", "write"): 3,
        ("middle", "write"): 3,
        ("upper", "read"): 3,
    }


async def test_each_tier_is_asked_once_for_what_the_others_lacked() -> None:
    upper, lower = DictTier("upper"), DictTier("lower")
    cache = TieredCache([upper, lower], decode_text)
    upper.values[b"a"] = encode_text(b"a", "1")
    lower.values[b"b"] = encode_text(b"b", "2")
    hits = await cache.get_many([b"a", b"b", b"c", b"a", b"b"])
    assert hits == [
        CacheHit("1", "upper"),
        CacheHit("2", "lower"),
        None,
        CacheHit("1", "upper"),
        CacheHit("2", "lower"),
    ]
    assert upper.asked == [[b"a", b"b", b"c"]]
    assert lower.asked == [[b"b", b"c"]]
    assert await cache.get_many([]) == []


async def test_corrupt_values_are_deleted_counted_and_looked_for_below() -> None:
    upper, lower = DictTier("upper"), DictTier("lower")
    cache = TieredCache([upper, lower], decode_text)
    upper.values[b"k"] = encode_text(b"other", "stolen")
    lower.values[b"k"] = encode_text(b"k", "right")
    assert await cache.get(b"k") == CacheHit("right", "lower")
    assert upper.values[b"k"] == encode_text(b"k", "right")
    lower.values[b"x"] = b"junk"
    assert await cache.get(b"x") is None
    assert b"x" not in lower.values
    assert b"x" not in upper.values
    assert cache.stats.lookups["upper", LookupResult.CORRUPT] == 1
    assert cache.stats.lookups["lower", LookupResult.CORRUPT] == 1
    assert cache.stats.lookups["lower", LookupResult.HIT] == 1


async def test_a_tier_in_trouble_is_a_counted_miss() -> None:
    upper, lower = DictTier("upper"), DictTier("lower")
    cache = TieredCache([upper, lower], decode_text)
    upper.down = True
    assert not await cache.get(b"k")
    assert await cache.put(b"k", encode_text(b"k", "v"))
    assert await cache.get(b"k") == CacheHit("v", "lower")
    assert cache.stats.lookups["upper", LookupResult.ERROR] == 2
    assert cache.stats.bytes["upper", "write"] == 0
    lower.full = True
    assert not await cache.put(b"other", b"")


async def test_without_tiers_everything_is_a_miss() -> None:
    cache = TieredCache([], decode_text)
    assert await cache.get(b"k") is None
    assert not await cache.put(b"k", b"v")
    await cache.delete(b"k")
    await cache.close()


async def test_delete_close_and_skip() -> None:
    upper, lower = DictTier("upper"), DictTier("lower")
    cache = TieredCache([upper, lower], decode_text)
    await cache.put(b"k", b"v", skip=upper)
    assert upper.values == {}
    await cache.delete(b"k")
    assert lower.values == {}
    await cache.close()
    assert upper.closed
    assert lower.closed


async def test_only_values_from_outside_are_verified_and_large_ones_off_the_loop() -> None:
    seen: list[tuple[bool, bool]] = []

    def decode(key: bytes, value: memoryview, *, trusted: bool) -> int:
        seen.append((trusted, threading.current_thread() is threading.main_thread()))
        return value.nbytes

    memory, outside = MemoryTier(10_000), DictTier("outside")
    cache = TieredCache([memory, outside], decode, offload_bytes=100)
    outside.values[b"small"], outside.values[b"large"] = bytes(99), bytes(100)
    for _ in range(2):
        for key in (b"small", b"large"):
            assert await cache.get(key)
    assert seen == [(False, True), (False, False), (True, True), (True, True)]
