"""Waiting until an application that takes no new requests has finished those it has. Pure asyncio.

ask ─▶ all replicas answer, nothing under way ─▶ done
 ▲          │ else
 └─ wait ◀──┴── time is up, or the operator cannot wait ─▶ given up
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InFlight:
    """What is under way."""

    requests: int = 0
    """At the replicas that have answered."""
    silent_replicas: int = 0
    """Replicas that gave no answer in time; what they carry is not known."""

    def __add__(self, other: InFlight) -> InFlight:
        return InFlight(self.requests + other.requests, self.silent_replicas + other.silent_replicas)

    def __str__(self) -> str:
        silent = f", {self.silent_replicas} replicas do not answer" if self.silent_replicas else ""
        return f"{self.requests} requests under way{silent}"

    @property
    def is_over(self) -> bool:
        return not (self.requests or self.silent_replicas)


async def drain(
    ask: Callable[[], Awaitable[InFlight]],
    *,
    timeout_s: float,
    report: Callable[[float, InFlight], None],
    is_hurried: Callable[[], bool] = lambda: False,
    every_s: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> InFlight:
    """Ask until nothing is under way; returns what still is when the time is up.

    Args:
        ask: Tells all replicas to take nothing new, since one of them may have started just now, and what they carry.
        timeout_s: Seconds to wait at most; one answer is awaited in any case.
        report: Told of every answer, with the seconds since the start.
        is_hurried: Whether not to wait any longer.
    """
    began_s = clock()
    while True:
        in_flight = await ask()
        seconds = clock() - began_s
        report(seconds, in_flight)
        if in_flight.is_over or seconds >= timeout_s or is_hurried():
            return in_flight
        await sleep(min(every_s, max(0.01, timeout_s - seconds)))
