"""The whole path of a cached value: own flights, tiers, the cluster's flights, and only then the work.

    get_or_compute(key) ─▶ single flight in this process ─▶ tiers, nearest first ─▶ lease in the cluster ─▶ compute
                                  joined                       memory / redis            joined            computed

Knows neither what is computed nor where values live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cache_service.cluster_flight import ClusterFlight, Lease
from cache_service.single_flight import SingleFlight
from cache_service.tier import CacheTier
from cache_service.tiered import TieredCache

T = TypeVar("T")


class FencedTier(CacheTier, Protocol):
    """A tier that all replicas share."""

    async def put_fenced(self, key: bytes, value: bytes | memoryview, token: int | None) -> bool:
        """Store, and return once that is done or given up; refuse if a newer token was handed out for the key."""


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    value: T
    origin: str
    """`computed`, `joined`, or the name of the tier that had it."""


class ReadThrough(Generic[T]):
    """Args:
    cache: Tiers, nearest first.
    encode: The bytes of a computed value, as `cache` decodes them; called in a worker thread.
    flights: Joins callers of this process.
    shared: The tier of `cache` that all replicas share, and
    cluster: the flights over it; both or neither.
    join_timeout_s: Longest wait for another caller of this process before computing; None waits.
    """

    def __init__(
        self,
        cache: TieredCache[T],
        encode: Callable[[bytes, T], bytes],
        *,
        flights: SingleFlight[Found[T]],
        shared: FencedTier | None = None,
        cluster: ClusterFlight[T] | None = None,
        join_timeout_s: float | None = None,
    ) -> None:
        if (shared is None) != (cluster is None) or (shared is not None and shared not in cache.tiers):
            raise ValueError("a shared tier, one of the cache's, and the cluster's flights go together")
        self.cache = cache
        self.flights = flights
        self.cluster = cluster
        self._encode = encode
        self._shared = shared
        self._join_timeout_s = join_timeout_s
        self._storing: set[asyncio.Task[None]] = set()

    async def get_or_compute(self, key: bytes, compute: Callable[[], Awaitable[T]]) -> Found[T]:
        """The value of `key`, from wherever it is had first. Raises what `compute` raises, and nothing of its own."""
        flight = await self.flights.run(key, lambda: self._find(key, compute), timeout_s=self._join_timeout_s)
        return Found(flight.value.value, "joined") if flight.joined else flight.value

    async def close(self) -> None:
        """Finish storing what was computed; does not close the tiers."""
        while self._storing:
            await asyncio.wait(self._storing)
        if self.cluster is not None:
            await self.cluster.close()

    async def _find(self, key: bytes, compute: Callable[[], Awaitable[T]]) -> Found[T]:
        hit = await self.cache.get(key)
        if hit is not None:
            return Found(hit.value, hit.tier)
        if self.cluster is None:
            value = await compute()
            self._store_soon(key, value)
            return Found(value, "computed")
        flight = await self.cluster.run(
            key,
            lookup=lambda: self._lookup(key),
            compute=compute,
            publish=lambda value, lease: self._store(key, value, lease),
        )
        return Found(flight.value, "joined" if flight.joined else "computed")

    async def _lookup(self, key: bytes) -> T | None:
        hit = await self.cache.get(key)
        return None if hit is None else hit.value

    def _store_soon(self, key: bytes, value: T) -> None:
        task = asyncio.ensure_future(self._store(key, value, None))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store(self, key: bytes, value: T, lease: Lease | None) -> None:
        """Own tiers first, so that the next caller here finds it; then the shared one, under the lease's token."""
        encoded = await asyncio.to_thread(self._encode, key, value)
        await self.cache.put(key, encoded, skip=self._shared)
        if self._shared is not None:
            taken = await self._shared.put_fenced(key, encoded, None if lease is None else lease.token)
            self.cache.count_write(self._shared, encoded, taken)
