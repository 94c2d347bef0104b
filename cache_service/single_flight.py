"""Compute a thing once at a time: callers that ask for a key which is being computed wait for that result.

    caller A ──lead──▶ task: compute() ──▶ result to all who wait
    caller B ──join──────┘        │
    caller C ──join───────────────┘   C leaves: nothing happens; the last one leaves: the task is cancelled

The computation runs in a task of its own, so a caller that is cancelled, the first one too, takes nothing away from
the others. Of one process; `cluster_flight.py` does the same across replicas.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Flight(Generic[V]):
    value: V
    joined: bool
    """True if another caller's computation gave the value."""


@dataclass(slots=True)
class SingleFlightStats:
    leads: int = 0
    joins: int = 0
    """Callers that were given another caller's result."""
    retries: int = 0
    """Callers that tried again after the computation they had joined failed."""
    timeouts: int = 0
    """Callers that waited their bound and then computed by themselves."""
    abandoned: int = 0
    """Computations cancelled since nobody waited any more."""


@dataclass(slots=True, eq=False)
class _Call(Generic[V]):
    task: asyncio.Task[V]
    waiters: int = 0


class SingleFlight(Generic[V]):
    """Args:
    is_final: Says of an error that it belongs to the key (a picture that cannot be decoded) and not to the attempt:
        joiners then get a copy of it and don't try again. By default no error is final.
    """

    def __init__(self, *, is_final: Callable[[Exception], bool] = lambda error: False) -> None:
        self._is_final = is_final
        self._calls: dict[Hashable, _Call[V]] = {}
        self.stats = SingleFlightStats()

    def __len__(self) -> int:
        """Computations under way that a new caller could join."""
        return len(self._calls)

    async def run(
        self, key: Hashable, compute: Callable[[], Awaitable[V]], *, timeout_s: float | None = None
    ) -> Flight[V]:
        """The value of `compute()`, or of an equal computation that is already under way.

        A leader gets its own computation's error. A joiner whose computation fails tries once more, as leader or
        joiner of a new one, and then gets that one's error. A joiner that has waited `timeout_s` computes by itself.
        """
        call = self._calls.get(key)
        if call is None:
            return Flight(await self._lead(key, compute), joined=False)
        done = await self._wait(key, call, timeout_s)
        if not done:
            self.stats.timeouts += 1
            return Flight(await compute(), joined=False)
        error = _error_of(call.task)
        if error is None:
            self.stats.joins += 1
            return Flight(call.task.result(), joined=True)
        if isinstance(error, Exception) and self._is_final(error):
            self.stats.joins += 1
            raise _private_copy(error)
        self.stats.retries += 1
        return await self._retry(key, compute, timeout_s)

    async def _retry(self, key: Hashable, compute: Callable[[], Awaitable[V]], timeout_s: float | None) -> Flight[V]:
        """Second and last try: errors of a joined computation are passed on, its cancellation is not."""
        call = self._calls.get(key)
        if call is None:
            return Flight(await self._lead(key, compute), joined=False)
        done = await self._wait(key, call, timeout_s)
        error = _error_of(call.task) if done else None
        if not done or isinstance(error, asyncio.CancelledError):
            self.stats.timeouts += not done
            return Flight(await compute(), joined=False)
        self.stats.joins += 1
        if error is not None:
            raise _private_copy(error)
        return Flight(call.task.result(), joined=True)

    async def _lead(self, key: Hashable, compute: Callable[[], Awaitable[V]]) -> V:
        self.stats.leads += 1
        call = _Call(asyncio.ensure_future(_as_coroutine(compute)))
        self._calls[key] = call
        call.task.add_done_callback(lambda task: self._finish(key, call))
        await self._wait(key, call, None)
        return call.task.result()

    async def _wait(self, key: Hashable, call: _Call[V], timeout_s: float | None) -> bool:
        """True once the computation ended, in whichever way; False after `timeout_s`. The last to leave cancels it."""
        call.waiters += 1
        try:
            # asyncio.wait, unlike awaiting the task, neither cancels it with us nor raises its error.
            done, _ = await asyncio.wait({call.task}, timeout=timeout_s)
            return bool(done)
        finally:
            call.waiters -= 1
            if call.waiters == 0 and not call.task.done():
                self.stats.abandoned += 1
                self._forget(key, call)  # before cancelling: who comes now must not join a dying computation
                call.task.cancel()

    def _finish(self, key: Hashable, call: _Call[V]) -> None:
        self._forget(key, call)
        if not call.task.cancelled():
            call.task.exception()  # mark as retrieved: nobody may be left to see it

    def _forget(self, key: Hashable, call: _Call[V]) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]


async def _as_coroutine(compute: Callable[[], Awaitable[V]]) -> V:
    return await compute()


def _error_of(task: asyncio.Task[V]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _private_copy(error: BaseException) -> BaseException:
    """Errors are amended on their way up (traceback, the request's field): each caller gets one of its own."""
    try:
        twin = copy.copy(error)
    except Exception:  # an exception whose constructor does not take its own args
        return error
    return twin.with_traceback(error.__traceback__)
