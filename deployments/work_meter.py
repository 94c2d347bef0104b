"""How much work a replica has, gets and can do, in units of its own (pixels, patches). Pure arithmetic over a clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class CapacityEstimate:
    """Units of work per second that a replica can do, from what it did while it was busy.

    The best of the last windows of busy time counts: a window with little to do holds small batches, which tell how
    long one item takes and not what the replica is able to do.
    """

    def __init__(self, *, window_s: float = 1.0, num_windows: int = 8) -> None:
        self._window_s = window_s
        self._windows: deque[float] = deque(maxlen=num_windows)
        self._work = 0.0
        self._busy_s = 0.0

    def add(self, work: float, busy_s: float) -> None:
        """`work` units were completed during `busy_s` seconds of having work.

        A window ends with a completion: one that ended between two would give all work of a long round to the next.
        """
        self._work += work
        self._busy_s += busy_s
        if work and self._busy_s >= self._window_s:
            self._windows.append(self._work / self._busy_s)
            self._work = self._busy_s = 0.0

    @property
    def per_s(self) -> float:
        """0 until a whole window was measured with any work done in it."""
        return max(self._windows, default=0.0)


@dataclass(frozen=True, slots=True)
class WorkLoad:
    queued: float
    """Units that wait or are being worked on now."""
    arrived_per_s: float
    """Units that came per second since the last reading."""
    capacity_per_s: float
    """Units per second that this replica can do; 0 while unknown."""


class WorkMeter:
    """Counts work in and out. Not thread-safe: one event loop calls everything.

    Args:
        slots: Items that make progress at the same time; fewer of them in flight count as partly busy.
        clock: Seconds that never run backwards.
    """

    def __init__(self, slots: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; it must be at least 1")
        self._slots, self._clock = slots, clock
        self._capacity = CapacityEstimate()
        self._in_flight = 0
        self._queued = 0.0
        self._arrived = 0.0
        self._counted_s = self._read_s = self._progress_s = clock()

    @contextmanager
    def doing(self, work: float) -> Iterator[None]:
        """Around an item of `work` units, its wait included. One that raises was not done."""
        now = self._clock()
        self._count(now, 0.0)
        if not self._in_flight:
            self._progress_s = now
        self._in_flight += 1
        self._queued += work
        self._arrived += work
        done = 0.0
        try:
            yield
            done = work
        finally:
            now = self._clock()
            self._count(now, done)
            self._in_flight -= 1
            # Exactly 0 when nothing is left, whatever floating point made of the sum.
            self._queued = self._queued - work if self._in_flight else 0.0
            self._progress_s = now

    def read(self) -> WorkLoad:
        """The load now; `arrived_per_s` covers the time since the last call."""
        now = self._clock()
        self._count(now, 0.0)
        elapsed_s = now - self._read_s
        arrived_per_s = self._arrived / elapsed_s if elapsed_s > 0 else 0.0
        if elapsed_s > 0:
            self._arrived, self._read_s = 0.0, now
        return WorkLoad(self._queued, arrived_per_s, self._capacity.per_s)

    @property
    def stalled_s(self) -> float:
        """Seconds since any item came to an end, while there are items; 0 without work."""
        return self._clock() - self._progress_s if self._in_flight else 0.0

    def _count(self, now: float, done: float) -> None:
        busy = min(self._in_flight, self._slots) / self._slots
        self._capacity.add(done, (now - self._counted_s) * busy)
        self._counted_s = now
