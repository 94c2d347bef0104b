"""A place for each request, reserved before any fetching or decoding. Knows nothing about HTTP or models.

    arrive ── over the tenant's own limits ──▶ 429
       │  ─── a place is free ────────▶ running (at most `max_running_requests`)
       │  ─── the queue is full ──────▶ 503 (429 if it is the tenant's own share that is full)
       ▼
    queue, one line per tenant ── waited `queue_timeout_s` ──▶ 503

A freed place goes to the tenant with the fewest running requests, and among equals to the one served longest ago: a
tenant that floods the server waits behind itself. Before a shutdown admission is closed: what has come in goes on, what
comes is refused. Numbers are per ingress replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from cache_service.rate_limit import Denial, RateLimiter
from cache_service.tenants import Tenant
from deployments.errors import NotReadyError, OverloadedError, RateLimitError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_running_requests: int = 1024
    """Requests past admission at once. Well above what the engine runs: requests that wait for a slow media host stand
    here too, and must not keep the others out."""
    max_queued_requests: int = 256
    """Requests waiting for a place, all tenants together."""
    max_queued_requests_per_tenant: int | None = None
    """Requests of one tenant waiting for a place; None leaves only the common bound."""
    queue_timeout_s: float = 30.0
    """Longest wait for a place."""

    def __post_init__(self) -> None:
        allowed = {
            "max_running_requests": self.max_running_requests >= 1,
            "max_queued_requests": self.max_queued_requests >= 0,
            "max_queued_requests_per_tenant": (self.max_queued_requests_per_tenant or 0) >= 0,
            "queue_timeout_s": self.queue_timeout_s > 0,
        }
        for name, good in allowed.items():
            if not good:
                raise ValueError(f"admission.{name} is {getattr(self, name)!r}; allowed: a positive number")


@dataclass(slots=True)
class AdmissionStats:
    running: int = 0
    queued: int = 0
    refused_rate: int = 0
    """A tenant sent more than its rate."""
    refused_tenant: int = 0
    """A tenant had its number at work already, or its share of the queue."""
    refused_full: int = 0
    refused_waited: int = 0


@dataclass(slots=True)
class _Line:
    """One tenant's requests."""

    running: int = 0
    last_start: int = 0
    """Number of this tenant's latest start among all starts; 0 before the first."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Admission:
    """All methods run on one event loop."""

    def __init__(self, config: AdmissionConfig, limiter: RateLimiter | None = None) -> None:
        self._config, self._limiter = config, limiter or RateLimiter()
        self._lines: dict[str, _Line] = {}
        self._num_starts = 0
        self.stats = AdmissionStats()
        self.is_closed = False
        """Whether all new requests are refused."""

    @property
    def in_flight(self) -> int:
        """Requests that hold a place or wait for one."""
        return self.stats.running + self.stats.queued

    def check_open(self) -> None:
        """Raises NotReadyError if admission is closed."""
        if self.is_closed:
            raise NotReadyError("The server is shutting down.", code="shutting_down", retry_after_s=1)

    @asynccontextmanager
    async def place(self, tenant: Tenant) -> AsyncIterator[None]:
        """Hold a place while the block runs. Raises RateLimitError or OverloadedError at once where none will be had,
        OverloadedError after `queue_timeout_s` where none came free, NotReadyError if admission is closed."""
        self.check_open()
        self._check_tenant(tenant)
        line = self._lines.setdefault(tenant.name, _Line())
        try:
            if self.stats.running < self._config.max_running_requests and not self.stats.queued:
                self._start(line)
            else:
                await self._wait(line)
            try:
                yield
            finally:
                self._stop(line)
        finally:
            self._forget_if_idle(tenant.name, line)
            self._limiter.release(tenant)

    def check_integrity(self) -> None:
        """Raises AssertionError if the counters disagree with the tenants' lines."""
        assert self.stats.running == sum(t.running for t in self._lines.values())
        assert self.stats.queued == sum(len(t.waiting) for t in self._lines.values())
        assert 0 <= self.stats.running <= self._config.max_running_requests
        assert not self.stats.queued or self.stats.running == self._config.max_running_requests

    def _check_tenant(self, tenant: Tenant) -> None:
        denial = self._limiter.admit(tenant)
        if denial.admitted:
            return
        if denial.denied is Denial.RATE:
            self.stats.refused_rate += 1
            raise RateLimitError(
                f"Too many requests: this key may send {denial.limit:g} a minute.", retry_after_s=denial.retry_after_s
            )
        self.stats.refused_tenant += 1
        raise RateLimitError(
            f"Too many requests at once: this key may have {denial.limit:g} in flight.",
            code="concurrency_limit_exceeded",
            retry_after_s=denial.retry_after_s,
        )

    async def _wait(self, line: _Line) -> None:
        share = self._config.max_queued_requests_per_tenant
        if share is not None and len(line.waiting) >= share:
            self.stats.refused_tenant += 1
            raise RateLimitError(
                f"Too many requests are waiting: this key may have {share} in the queue.",
                code="queue_share_exceeded",
                retry_after_s=1,
            )
        if self.stats.queued >= self._config.max_queued_requests:
            self.stats.refused_full += 1
            raise OverloadedError(
                f"The server is full: {self._config.max_running_requests} requests are running and "
                f"{self._config.max_queued_requests} are waiting.",
                retry_after_s=1,
            )
        turn = asyncio.get_running_loop().create_future()
        line.waiting.append(turn)
        self.stats.queued += 1
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                await turn
        except BaseException as error:
            self._leave_queue(line, turn)
            if isinstance(error, TimeoutError):
                self.stats.refused_waited += 1
                raise OverloadedError(
                    f"No place came free within {self._config.queue_timeout_s:g} seconds.",
                    code="queue_timeout",
                    retry_after_s=1,
                ) from None
            raise

    def _leave_queue(self, line: _Line, turn: asyncio.Future[None]) -> None:
        if turn in line.waiting:
            line.waiting.remove(turn)
            self.stats.queued -= 1
        elif not turn.cancelled():  # The place was handed over in the same moment: pass it on.
            self._stop(line)

    def _start(self, line: _Line) -> None:
        line.running += 1
        self.stats.running += 1
        self._num_starts += 1
        line.last_start = self._num_starts

    def _stop(self, line: _Line) -> None:
        line.running -= 1
        self.stats.running -= 1
        self._hand_over()

    def _hand_over(self) -> None:
        while self.stats.queued and self.stats.running < self._config.max_running_requests:
            waiting = (line for line in self._lines.values() if line.waiting)
            line = min(waiting, key=lambda line: (line.running, line.last_start))
            turn = line.waiting.popleft()
            self.stats.queued -= 1
            if not turn.done():  # Else its request was cancelled, and has not yet had the time to leave.
                self._start(line)
                turn.set_result(None)

    def _forget_if_idle(self, name: str, line: _Line) -> None:
        # A cancelled request may leave late, when its tenant has a new line already.
        if not line.running and not line.waiting and self._lines.get(name) is line:
            del self._lines[name]
