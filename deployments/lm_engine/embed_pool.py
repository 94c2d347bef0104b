"""Host memory through which embeddings pass on their way to the device: a bounded number of bytes, handed out in turn.

    take ──▶ waits in line while there is no room ──▶ Lease ──claim──▶ filled, copied to the device ──release──▶ room
                                                        └── not claimed within the TTL: taken back, counted

Whoever has a lease needs nothing else from the pool to come to an end, so the line always moves and nobody waits for
ever. Bookkeeping only: the memory is somebody else's. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from deployments.errors import InternalError
from deployments.lm_engine.first_fit import FirstFit

_LOG = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes: what device copies and vector loads want at most."""


@dataclass(slots=True, eq=False)
class Lease:
    """Bytes [offset, offset + num_bytes) of the pool's memory, for whoever holds this."""

    offset: int
    num_bytes: int
    taken_s: float
    is_claimed: bool = False
    is_open: bool = True
    """Until it is released, or taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPoolStats:
    total_bytes: int = 0
    used_bytes: int = 0
    waiting: int = 0
    """Embeddings in line for room now."""
    expired: int = 0
    """Leases taken back because nobody claimed them: each one is a fault of ours. A total since the start."""


class EmbedPool:
    """Args:
    num_bytes: The budget.
    ttl_s: After which a lease that nobody has claimed is taken back.
    clock: Seconds of a monotonic clock.
    """

    def __init__(self, num_bytes: int, *, ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._space = FirstFit(num_bytes, alignment=ALIGNMENT)
        self._ttl_s, self._clock = ttl_s, clock
        self._line: deque[tuple[int, asyncio.Future[Lease]]] = deque()
        """Bytes wanted, first come first served; those who gave up are in it until their turn."""
        self._unclaimed: OrderedDict[int, Lease] = OrderedDict()
        """By offset, the one taken longest ago first."""
        self._open: dict[int, Lease] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._num_expired = 0

    @property
    def num_bytes(self) -> int:
        return self._space.num_bytes

    def stats(self) -> EmbedPoolStats:
        return EmbedPoolStats(
            total_bytes=self._space.num_bytes,
            used_bytes=self._space.used_bytes,
            waiting=sum(not future.done() for _, future in self._line),
            expired=self._num_expired,
        )

    def try_take(self, num_bytes: int) -> Lease | None:
        """A lease now, or None: there is no room, or others are in line.

        Raises:
            InternalError: It would not fit an empty pool; start-up has made sure that every item does.
        """
        self._check(num_bytes)
        self._take_back()
        self._serve()
        return None if self._line else self._allocate(num_bytes)

    async def take(self, num_bytes: int) -> Lease:
        """A lease as soon as there is room, first come first served. Whoever is cancelled leaves the line.

        Raises:
            InternalError: As for `try_take`.
        """
        lease = self.try_take(num_bytes)
        if lease is not None:
            return lease
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._line.append((num_bytes, future))
        self._wake_up_later()
        try:
            return await future
        except asyncio.CancelledError:
            # Both may come at once: a lease that was handed over, and the end of who waited for it.
            if future.done() and not future.cancelled():
                self.release(future.result())
            else:
                future.cancel()
                self._serve()  # the next in line may fit where this one did not
            raise

    def claim(self, lease: Lease) -> None:
        """The holder begins to use the memory; from now on it is never taken back.

        Raises:
            InternalError: It has been taken back.
        """
        if not lease.is_open:
            raise InternalError(f"an embedding's {lease.num_bytes} bytes of host memory were not claimed in time")
        lease.is_claimed = True
        self._unclaimed.pop(lease.offset, None)

    def release(self, lease: Lease) -> None:
        """Give the memory back, once nothing reads or writes it any more. Idempotent."""
        if lease.is_open:
            self._end(lease)
            self._serve()

    def check_integrity(self) -> None:
        """Raise AssertionError unless leases and space agree."""
        self._space.check_integrity()
        assert self._space.num_pieces == len(self._open), "leases and pieces disagree"
        sizes = sum(self._space.size_of(lease.num_bytes) for lease in self._open.values())
        assert sizes == self._space.used_bytes, "the leases' bytes do not add up"
        assert all(lease.is_open for lease in self._open.values()), "a lease has ended and is still listed"
        unclaimed = {offset for offset, lease in self._open.items() if not lease.is_claimed}
        assert unclaimed == self._unclaimed.keys(), "unclaimed leases disagree"

    # -- inside --------------------------------------------------------------------------------------------------------
    def _check(self, num_bytes: int) -> None:
        if self._space.size_of(num_bytes) > self._space.num_bytes:
            raise InternalError(
                f"an embedding of {num_bytes} bytes is larger than the pool, embed_pool_bytes {self._space.num_bytes}"
            )

    def _allocate(self, num_bytes: int) -> Lease | None:
        offset = self._space.allocate(num_bytes)
        if offset is None:
            return None
        lease = Lease(offset, num_bytes, self._clock())
        self._open[offset] = self._unclaimed[offset] = lease
        return lease

    def _serve(self) -> None:
        """Hand room to those in line, in their order; the first one that does not fit keeps the others waiting, or a
        large item would never get its turn."""
        while self._line:
            num_bytes, future = self._line[0]
            if not future.done():
                lease = self._allocate(num_bytes)
                if lease is None:
                    return
                future.set_result(lease)
            self._line.popleft()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, lease: Lease) -> None:
        lease.is_open = False
        self._space.free(lease.offset)
        del self._open[lease.offset]
        self._unclaimed.pop(lease.offset, None)

    def _take_back(self) -> None:
        """End what nobody claimed in time."""
        now_s = self._clock()
        while self._unclaimed:
            lease = next(iter(self._unclaimed.values()))
            if now_s - lease.taken_s < self._ttl_s:
                return
            self._num_expired += 1
            _LOG.error("an embedding's %d bytes of host memory were not claimed in %g s", lease.num_bytes, self._ttl_s)
            self._end(lease)

    def _wake_up_later(self) -> None:
        """While somebody waits, leases may have to be taken back though nothing else happens."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._ttl_s / 2, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._take_back()
        self._serve()
        if self._line:
            self._wake_up_later()
