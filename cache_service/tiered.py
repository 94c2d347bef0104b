"""Several tiers read as one cache: the nearest that has a good value answers, and those above it learn it.

        get ──▶ memory ──miss──▶ redis ──hit──▶ decode and verify ──▶ value
                  ▲                                  │ ok: promote        │ corrupt: delete, count, go on as a miss
                  └──────────────────────────────────┘

Knows neither what the values are (its `decode` does) nor how a tier stores them. A tier in trouble is a miss.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from cache_service.codec import CorruptValueError
from cache_service.tier import CacheTier, Lookup, LookupResult

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Direction = Literal["read", "write"]


class Decode(Protocol[T_co]):
    def __call__(self, key: bytes, value: memoryview, *, trusted: bool) -> T_co:
        """The meaning of a value, or CorruptValueError. Must be free of side effects: large values are decoded in a
        worker thread.

        Args:
            trusted: The value was verified before and has stayed in this process, so checksums need no second look.
        """


@dataclass(frozen=True, slots=True)
class CacheHit(Generic[T]):
    value: T
    tier: str
    """Name of the tier that answered."""


@dataclass(slots=True)
class TieredStats:
    lookups: Counter[tuple[str, LookupResult]] = field(default_factory=Counter)
    """Look-ups by (tier, result)."""
    bytes: Counter[tuple[str, Direction]] = field(default_factory=Counter)
    """Value bytes read from (hits only) and accepted by each tier."""


class TieredCache(Generic[T]):
    """Read-through over tiers, nearest first. Never raises for a tier's troubles or for what it finds in one.

    Args:
        tiers: May be empty: then everything is a miss.
        decode: Turns a stored value into what callers want and verifies it on the way.
        offload_bytes: Values at least this large are decoded in a thread: hashing 1 MiB holds the loop for 0.5 ms.
    """

    def __init__(self, tiers: Sequence[CacheTier], decode: Decode[T], *, offload_bytes: int = 1024 * 1024) -> None:
        self.tiers = tuple(tiers)
        self._decode = decode
        self._offload_bytes = offload_bytes
        self.stats = TieredStats()

    async def get(self, key: bytes) -> CacheHit[T] | None:
        return (await self.get_many((key,)))[0]

    async def get_many(self, keys: Sequence[bytes]) -> list[CacheHit[T] | None]:
        """One hit or None per key, in order; each tier is asked once, for what the tiers before it lacked."""
        found: dict[bytes, CacheHit[T]] = {}
        missing = list(dict.fromkeys(keys))
        for depth, tier in enumerate(self.tiers):
            if not missing:
                break
            lookups = await tier.get_many(missing)
            for key, lookup in zip(missing, lookups, strict=True):
                hit = await self._accept(depth, key, lookup)
                if hit is not None:
                    found[key] = hit
            missing = [key for key in missing if key not in found]
        return [found.get(key) for key in keys]

    async def put(self, key: bytes, value: bytes | memoryview, *, skip: CacheTier | None = None) -> bool:
        """Offer a value to every tier but `skip`; True if at least one took it. `value` must not change afterwards."""
        taken = [await self._put(tier, key, value) for tier in self.tiers if tier is not skip]
        return any(taken)

    def count_write(self, tier: CacheTier, value: bytes | memoryview, taken: bool) -> None:
        """Count a value that a caller offered to a tier by another way than `put`."""
        if taken:
            num_bytes = value.nbytes if isinstance(value, memoryview) else len(value)
            self.stats.bytes[tier.name, "write"] += num_bytes

    async def delete(self, key: bytes) -> None:
        for tier in self.tiers:
            await tier.delete(key)

    async def close(self) -> None:
        for tier in self.tiers:
            await tier.close()

    async def _accept(self, depth: int, key: bytes, lookup: Lookup) -> CacheHit[T] | None:
        tier = self.tiers[depth]
        result = lookup.result
        hit: CacheHit[T] | None = None
        if lookup.value is not None:
            try:
                hit = CacheHit(await self._decoded(tier, key, lookup.value), tier.name)
            except CorruptValueError:
                result = LookupResult.CORRUPT
                await tier.delete(key)
        self.stats.lookups[tier.name, result] += 1
        if hit is not None and lookup.value is not None:
            self.stats.bytes[tier.name, "read"] += lookup.value.nbytes
            for upper in self.tiers[:depth]:
                await self._put(upper, key, lookup.value)
        return hit

    def _decoded(self, tier: CacheTier, key: bytes, value: memoryview) -> Awaitable[T]:
        trusted = bool(getattr(tier, "in_process", False))
        if value.nbytes >= self._offload_bytes and not trusted:
            return asyncio.to_thread(self._decode, key, value, trusted=trusted)
        return _immediately(lambda: self._decode(key, value, trusted=trusted))

    async def _put(self, tier: CacheTier, key: bytes, value: bytes | memoryview) -> bool:
        taken = await tier.put(key, value)
        self.count_write(tier, value, taken)
        return taken


async def _immediately(call: Callable[[], T]) -> T:
    return call()
