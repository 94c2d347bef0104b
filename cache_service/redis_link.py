"""The way to a Redis server that may be slow, down, or refuse us: bounded, counted, and never in a request's way.

    call ──breaker closed?──▶ free slot ──▶ operation(client), all within `timeout_s` ──▶ result
              │ no: fail at once, and start a probe in the background if one is due
              ▼
    probe: opens `connections` connections with a PING on each, within `connect_timeout_s`; success closes the breaker

Every trouble leaves here as `LinkError`, translated once; the library's exceptions and the client come by constructor,
so this file knows no client library. Only the kind of a trouble is logged, at most once a minute: texts of the library
may hold addresses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from cache_service.circuit_breaker import CircuitBreaker

ClientT = TypeVar("ClientT")
T = TypeVar("T")

_LOG_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class LinkError(Exception):
    """The server could not be asked or did not answer as it should. Stays within the cache: callers see a miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkErrors:
    """What the client library raises."""

    failures: tuple[type[BaseException], ...]
    """All of its errors, and those of sockets and time-outs."""
    replies: tuple[type[BaseException], ...]
    """The server's own answers (out of memory, no permission): it is alive, so these don't open the breaker."""


@dataclass(slots=True)
class LinkStats:
    calls: int = 0
    failures: int = 0
    """Calls that failed on the way: time-outs, resets, refused connections, wrong passwords."""
    error_replies: int = 0
    skipped: int = 0
    """Calls not made since the breaker was open."""
    busy: int = 0
    """Calls that found no free connection within their time."""


class RedisLink(Generic[ClientT]):
    """Args:
    connect: Makes the library's client, which opens connections on use. Called again after the server was lost, since a
        client may have forgotten where else to look for it.
    probe: One round trip on a connection of its own.
    disconnect: Closes all connections.
    """

    def __init__(
        self,
        connect: Callable[[], ClientT],
        *,
        probe: Callable[[ClientT], Awaitable[object]],
        disconnect: Callable[[ClientT], Awaitable[object]],
        errors: LinkErrors,
        breaker: CircuitBreaker,
        connections: int,
        connect_timeout_s: float,
        name: str = "redis",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._client = connect()
        self._probe_once = probe
        self._disconnect = disconnect
        self._errors = errors
        self._breaker = breaker
        self._connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._name = name
        self._clock = clock
        self._slots = asyncio.Semaphore(connections)
        self._probe: asyncio.Task[bool] | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._probed = False  # whether a first probe has ended
        self._reported_down = False
        self._log_due_s = clock()
        self._closed = False
        self.stats = LinkStats()

    @property
    def breaker(self) -> CircuitBreaker:
        return self._breaker

    async def start(self) -> bool:
        """Wait for a first probe, so that early requests find open connections. False if the server isn't there: then
        it joins later by itself. Not needed before `call`."""
        self._probe_if_due()
        if self._probe is not None:
            await asyncio.wait({self._probe})
        return self._breaker.allows_calls()

    async def call(self, operation: Callable[[ClientT], Awaitable[T]], timeout_s: float, *, exempt: bool = False) -> T:
        """The operation's result, or LinkError within about `timeout_s`.

        Args:
            exempt: The call takes no slot, so that writes behind and leases don't hold up reads.
        """
        if self._closed:
            raise LinkError("closed")
        if not self._breaker.allows_calls():
            await self._await_first_probe(timeout_s)
        self.stats.calls += 1
        sent = False
        try:
            async with asyncio.timeout(timeout_s), nullcontext() if exempt else self._slots:
                sent = True
                result = await operation(self._client)
        except self._errors.replies as error:
            self._breaker.call_succeeded()
            self.stats.error_replies += 1
            self._log(error)
            raise LinkError(type(error).__name__) from None
        except self._errors.failures as error:
            if sent:
                self.stats.failures += 1
                self._breaker.call_failed()
                self._log(error)
            else:
                self.stats.busy += 1
            raise LinkError(type(error).__name__) from None
        self._breaker.call_succeeded()
        return result

    async def close(self) -> None:
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        self._drop_soon(self._client)
        await asyncio.wait(self._dropping)

    async def _await_first_probe(self, timeout_s: float) -> None:
        """With the breaker open: start a probe if one is due, and fail. Only the very first calls of a process wait for
        it, within their own bound: a server that has never been seen is more likely up than down."""
        self._probe_if_due()
        if not self._probed and self._probe is not None:
            await asyncio.wait({self._probe}, timeout=timeout_s)
        if not self._breaker.allows_calls():
            self.stats.skipped += 1
            raise LinkError("circuit breaker is open")

    def _probe_if_due(self) -> None:
        if not self._closed and self._breaker.try_probe():
            if self._probe is not None:
                self._probe.cancel()  # one that has outlived its time
            self._probe = asyncio.ensure_future(self._run_probe())

    async def _run_probe(self) -> bool:
        if self._probed:
            self._drop_soon(self._client)
            self._client = self._connect()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                # At the same time, so that each takes a connection of its own.
                pings = [asyncio.ensure_future(self._ping()) for _ in range(self._connections)]
                await _all_or_cancel(pings)
        except self._errors.failures as error:
            self._breaker.probe_failed()
            self._log(error)
            return False
        finally:
            self._probed = True
        self._breaker.probe_succeeded()
        if self._reported_down:
            self._reported_down = False
            logger.warning("cache tier %s: server answers again", self._name)
        return True

    def _drop_soon(self, client: ClientT) -> None:
        task = asyncio.ensure_future(self._drop(client))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _drop(self, client: ClientT) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._disconnect(client)
        except self._errors.failures as error:
            self._log(error)

    async def _ping(self) -> None:
        await self._probe_once(self._client)

    def _log(self, error: BaseException) -> None:
        now = self._clock()
        if now < self._log_due_s:
            return
        self._log_due_s = now + _LOG_EVERY_S
        self._reported_down = True
        logger.warning("cache tier %s: %s; requests go on without it", self._name, type(error).__name__)


async def _all_or_cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all tasks; when one fails or the wait is cancelled, none is left running."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
