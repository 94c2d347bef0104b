"""When to stop asking a service that does not answer, and when to try again. Pure: no I/O, the clock is injected.

             `failure_threshold` failures in a row              `open_s` passed
    CLOSED ─────────────────────────────────────────▶ OPEN ───────────────────────▶ HALF_OPEN
       ▲                                                ▲                               │ one probe at a time
       └────────── probe succeeded ─────────────────────┼───────────────────────────────┤
                                                        └──── probe failed ─────────────┘

See M. Nygard, "Release It!", ch. 5.2. Results of calls that began before the breaker opened are taken as they come: a
late success does not close it (only a probe does), a late failure does not prolong it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStats:
    state: BreakerState
    failures_in_row: int
    times_opened: int
    probes: int


class CircuitBreaker:
    """Args:
    failure_threshold: Failures in a row that open a closed breaker.
    open_s: Rest before a probe, counted from the moment it opened or the last probe failed.
    probe_timeout_s: A probe without a result after this long counts as failed.
    start_open: Begin as OPEN with a probe due at once: nothing is sent before a first probe has succeeded.
    clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        failure_threshold: int = 3,
        open_s: float = 10.0,
        probe_timeout_s: float = 5.0,
        start_open: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failure_threshold < 1:
            raise ValueError(f"failure_threshold must be 1 or more: {failure_threshold = }")
        if open_s <= 0 or probe_timeout_s <= 0:
            raise ValueError(f"open_s and probe_timeout_s must be above 0: {open_s = }, {probe_timeout_s = }")
        self._failure_threshold = failure_threshold
        self._open_s = open_s
        self._probe_timeout_s = probe_timeout_s
        self._clock = clock
        self._failures_in_row = 0
        self._times_opened = 0
        self._probes = 0
        self._is_open = start_open
        self._probe_due_s = clock()
        self._probe_ends_s: float | None = None  # set while a probe is under way

    @property
    def state(self) -> BreakerState:
        if not self._is_open:
            return BreakerState.CLOSED
        probing = self._probe_ends_s is not None and self._clock() < self._probe_ends_s
        return BreakerState.HALF_OPEN if probing or self._clock() >= self._probe_due_s else BreakerState.OPEN

    def allows_calls(self) -> bool:
        """Whether ordinary calls may be made. Never mutates."""
        return not self._is_open

    def try_probe(self) -> bool:
        """Take the right to make one probe, if the breaker is open, has rested, and no other probe is under way.

        Whoever is given it reports with `probe_succeeded` or `probe_failed`.
        """
        now = self._clock()
        if not self._is_open or now < self._probe_due_s:
            return False
        if self._probe_ends_s is not None and now < self._probe_ends_s:
            return False
        self._probe_ends_s = now + self._probe_timeout_s
        self._probes += 1
        return True

    def call_succeeded(self) -> None:
        if not self._is_open:
            self._failures_in_row = 0

    def call_failed(self) -> None:
        self._failures_in_row += 1
        if not self._is_open and self._failures_in_row >= self._failure_threshold:
            self._is_open = True
            self._times_opened += 1
            self._rest()

    def probe_succeeded(self) -> None:
        self._is_open = False
        self._failures_in_row = 0
        self._probe_ends_s = None

    def probe_failed(self) -> None:
        self._failures_in_row += 1
        self._rest()

    def stats(self) -> BreakerStats:
        return BreakerStats(
            state=self.state,
            failures_in_row=self._failures_in_row,
            times_opened=self._times_opened,
            probes=self._probes,
        )

    def _rest(self) -> None:
        self._probe_due_s = self._clock() + self._open_s
        self._probe_ends_s = None
