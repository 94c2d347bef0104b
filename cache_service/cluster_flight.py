"""Compute a thing once at a time in the whole cluster: the replica that gets the lease computes, the others wait.

    miss ──▶ acquire lease ──got──▶ look again ──▶ compute (lease prolonged) ──▶ publish with token ──▶ release
                  │ held by another                                     (behind the caller's back)
                  ▼
             look up, every so often, until the value is there ──▶ joined
                  │ lease free again: its holder failed ──▶ acquire
                  │ `max_wait_s` passed                 ──▶ compute without a lease
             lease store down                           ──▶ compute without a lease

A holder that dies lets the lease expire; one that is stopped and wakes up late has its write refused by the token. All
of this saves work and nothing else depends on it: whatever fails, the caller computes.

Only one caller per key of a process should come here: `single_flight.py` stands before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cache_service.single_flight import Flight

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Lease:
    key: bytes
    token: int
    """Fencing token: larger than that of every earlier holder of the key."""


class LeaseUnavailableError(Exception):
    """Nobody can say who holds the lease; stays within the cache."""


class LeaseStore(Protocol):
    async def acquire(self, key: bytes, ttl_s: float) -> Lease | None:
        """The lease, or None while another holds it. Raises LeaseUnavailableError, as all methods do."""

    async def extend(self, lease: Lease, ttl_s: float) -> bool:
        """Hold it for `ttl_s` from now; False if it was lost."""

    async def release(self, lease: Lease) -> None:
        """Give it back; nothing happens if it was lost."""


@dataclass(slots=True)
class ClusterFlightStats:
    leads: int = 0
    """Computations under a lease."""
    joins: int = 0
    """Values that another replica computed while we waited."""
    timeouts: int = 0
    """Computations without a lease after `max_wait_s`."""
    unavailable: int = 0
    """Computations without a lease since the store did not answer."""
    lost: int = 0
    """Leases that ran out or were taken while we computed."""


class ClusterFlight(Generic[V]):
    """Args:
    lease_s: Life of a lease without prolonging: after a holder's death the others go on within that time.
    max_wait_s: Longest wait for another replica's value.
    first_poll_s: First pause between look-ups; doubles up to `last_poll_s`.
    """

    def __init__(
        self,
        leases: LeaseStore,
        *,
        lease_s: float = 3.0,
        max_wait_s: float = 5.0,
        first_poll_s: float = 0.01,
        last_poll_s: float = 0.1,
    ) -> None:
        if not (lease_s > 0 and max_wait_s >= 0 and 0 < first_poll_s <= last_poll_s):
            raise ValueError(
                f"lease_s must be above 0, max_wait_s 0 or more, first_poll_s above 0 and at most last_poll_s: "
                f"{lease_s = }, {max_wait_s = }, {first_poll_s = }, {last_poll_s = }"
            )
        self._leases = leases
        self._lease_s = lease_s
        self._max_wait_s = max_wait_s
        self._first_poll_s = first_poll_s
        self._last_poll_s = last_poll_s
        self._publishing: set[asyncio.Task[None]] = set()
        self.stats = ClusterFlightStats()

    async def run(
        self,
        key: bytes,
        *,
        lookup: Callable[[], Awaitable[V | None]],
        compute: Callable[[], Awaitable[V]],
        publish: Callable[[V, Lease | None], Awaitable[object]],
    ) -> Flight[V]:
        """The value that another replica computed meanwhile (`joined`), or `compute()`'s.

        Args:
            lookup: Looks into the shared tier; None if the value isn't there.
            compute: May raise; the lease is then given back and the error is the caller's.
            publish: Stores a computed value and returns once the store has it; runs after the caller has its value.
                Must not raise. Without a lease it writes unconditionally.
        """
        try:
            async with asyncio.timeout(self._max_wait_s):
                found, lease = await self._find_or_lease(key, lookup)
        except TimeoutError:
            self.stats.timeouts += 1
            found, lease = None, None
        except LeaseUnavailableError:
            self.stats.unavailable += 1
            found, lease = None, None
        if found is not None:
            self.stats.joins += 1
            return Flight(found, joined=True)
        if lease is None:
            value = await compute()
            self._spawn(self._publish(publish, value, None))
        else:
            value = await self._compute_leased(lease, compute, publish)
        return Flight(value, joined=False)

    async def close(self) -> None:
        """Wait for what is still being published; each is bounded by its own store."""
        while self._publishing:
            await asyncio.wait(self._publishing)

    async def _find_or_lease(
        self, key: bytes, lookup: Callable[[], Awaitable[V | None]]
    ) -> tuple[V | None, Lease | None]:
        """Exactly one of the value and the lease."""
        pause_s = self._first_poll_s
        while True:
            lease = await self._leases.acquire(key, self._lease_s)
            # With the lease, too: its last holder may have published between the caller's look-up and now.
            try:
                found = await lookup()
            except asyncio.CancelledError:
                if lease is not None:
                    self._spawn(self._release(lease))
                raise
            if found is not None:
                if lease is not None:
                    self._spawn(self._release(lease))
                return found, None
            if lease is not None:
                return None, lease
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._last_poll_s)

    async def _compute_leased(
        self,
        lease: Lease,
        compute: Callable[[], Awaitable[V]],
        publish: Callable[[V, Lease | None], Awaitable[object]],
    ) -> V:
        self.stats.leads += 1
        heartbeat = asyncio.ensure_future(self._prolong(lease))
        try:
            value = await compute()
        except BaseException:
            heartbeat.cancel()
            self._spawn(self._release(lease))
            raise
        self._spawn(self._publish(publish, value, lease, heartbeat))
        return value

    async def _prolong(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with contextlib.suppress(LeaseUnavailableError):  # the next beat may get through
                if not await self._leases.extend(lease, self._lease_s):
                    self.stats.lost += 1
                    return

    async def _publish(
        self,
        publish: Callable[[V, Lease | None], Awaitable[object]],
        value: V,
        lease: Lease | None,
        heartbeat: asyncio.Task[None] | None = None,
    ) -> None:
        try:
            await publish(value, lease)
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
            if lease is not None:
                await self._release(lease)

    async def _release(self, lease: Lease) -> None:
        with contextlib.suppress(LeaseUnavailableError):  # it expires
            await self._leases.release(lease)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)
