"""Writes that happen after the answer has gone out: a queue bounded in bytes and in entries, and one worker.

The newest write is refused when the queue is full (the cache is then slower than the traffic, and dropping is right).
One entry per key: a later write or delete of a key replaces one that has not begun. No task exists while there is
nothing to do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One pending change of the store."""

    key: bytes
    value: bytes | memoryview | None
    """None deletes the key. Must not change while it is queued."""
    fence: int | None
    """Fencing token the store checks before it takes the value; None writes unconditionally."""
    done: asyncio.Future[bool]
    """Whether the store took it; never an exception."""

    @property
    def num_bytes(self) -> int:
        if self.value is None:
            return 0
        return self.value.nbytes if isinstance(self.value, memoryview) else len(self.value)


@dataclass(slots=True)
class WriteBehindStats:
    queued_entries: int = 0
    queued_bytes: int = 0
    """Of queued writes and the one under way."""
    written: int = 0
    refused: int = 0
    """Writes dropped since the queue was full."""
    failed: int = 0
    """Writes the store did not take."""


class WriteBehind:
    """Args:
    execute: Carries out one write and says whether the store took it; must not raise.
    max_bytes: Bound of values waiting or under way.
    max_entries: Bound of their number.
    """

    def __init__(self, execute: Callable[[Write], Awaitable[bool]], *, max_bytes: int, max_entries: int) -> None:
        self._execute = execute
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._queue: OrderedDict[bytes, Write] = OrderedDict()
        self._worker: asyncio.Task[None] | None = None
        self._current: Write | None = None
        self._closed = False
        self.stats = WriteBehindStats()

    def offer(self, key: bytes, value: bytes | memoryview | None, *, fence: int | None = None) -> Write | None:
        """Queue a change; None if it was refused. Must be called within a running event loop."""
        write = Write(key, value, fence, asyncio.get_running_loop().create_future())
        replaced = self._queue.get(key)
        freed_bytes, freed_entries = (0, 0) if replaced is None else (replaced.num_bytes, 1)
        fits = (
            self.stats.queued_bytes - freed_bytes + write.num_bytes <= self._max_bytes
            and self.stats.queued_entries - freed_entries < self._max_entries
        )
        if self._closed or not fits:
            self.stats.refused += 1
            return None
        if replaced is not None:
            del self._queue[key]
            self._settle(replaced, False)
        self._queue[key] = write
        self.stats.queued_entries += 1
        self.stats.queued_bytes += write.num_bytes
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return write

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; False if that takes longer than `timeout_s`."""
        if self._worker is None or self._worker.done():
            return True
        done, _ = await asyncio.wait({self._worker}, timeout=timeout_s)
        return bool(done)

    async def close(self, timeout_s: float) -> None:
        """Flush within a bound, drop the rest, take nothing more."""
        self._closed = True
        if not await self.flush(timeout_s) and self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        for write in [*([self._current] if self._current else []), *self._queue.values()]:
            self.stats.failed += 1
            self._settle(write, False)
        self._current = None
        self._queue.clear()

    async def _work(self) -> None:
        while self._queue:
            _, write = self._queue.popitem(last=False)
            self._current = write
            taken = await self._execute(write)
            self._current = None
            if taken:
                self.stats.written += 1
            else:
                self.stats.failed += 1
            self._settle(write, taken)

    def _settle(self, write: Write, taken: bool) -> None:
        self.stats.queued_entries -= 1
        self.stats.queued_bytes -= write.num_bytes
        if not write.done.done():
            write.done.set_result(taken)
