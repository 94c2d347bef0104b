import pytest

from cache_service.memory_tier import ENTRY_OVERHEAD_BYTES, MemoryTier
from cache_service.tier import LookupResult


async def test_counts_keys_values_and_book_keeping() -> None:
    tier = MemoryTier(10_000)
    await tier.put(b"k" * 32, bytes(1000))
    assert tier.stats().bytes == 32 + 1000 + ENTRY_OVERHEAD_BYTES
    assert not await tier.put(b"big", bytes(10_000))


async def test_bytes_are_not_copied_and_foreign_buffers_are() -> None:
    tier = MemoryTier(1_000_000)
    whole = bytes(range(200))
    buffer = bytearray(b"abc")
    await tier.put(b"whole", whole)
    await tier.put(b"view", memoryview(whole))
    await tier.put(b"part", memoryview(whole)[10:20])
    await tier.put(b"buffer", memoryview(buffer))
    buffer[:] = b"xyz"
    whole_hit, view_hit, part_hit, buffer_hit = await tier.get_many([b"whole", b"view", b"part", b"buffer"])
    for hit in (whole_hit, view_hit):
        assert hit.value is not None
        assert hit.value.obj is whole
    assert part_hit.value is not None
    assert part_hit.value.obj is not whole  # else ten bytes would keep two hundred alive
    assert buffer_hit.value == b"abc"
    for hit in (whole_hit, view_hit, part_hit, buffer_hit):
        assert hit.value is not None
        assert hit.value.readonly


async def test_close_forgets_everything() -> None:
    tier = MemoryTier(10_000)
    await tier.put(b"k", b"v")
    await tier.close()
    (lookup,) = await tier.get_many([b"k"])
    assert lookup.result is LookupResult.MISS
    tier.check_integrity()


def test_ttl_is_checked() -> None:
    with pytest.raises(ValueError, match="ttl_s = 0"):
        MemoryTier(1, ttl_s=0)
