"""Streaming load in the background of a test, and what became of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.serve.examples import load_examples
from tests.serve.streams import ask


@dataclass
class Load:
    ended: list[str] = field(default_factory=list)
    """`right`, or outcome and reason, of each request."""
    slowest_s: float = 0.0
    _grew: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, outcome: str, seconds: float) -> None:
        self.ended.append(outcome)
        self.slowest_s = max(self.slowest_s, seconds)
        self._grew.set()

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(self.ended)

    async def reaches(self, number: int, timeout_s: float = 240.0) -> None:
        """Return once so many requests have ended."""
        async with asyncio.timeout(timeout_s):
            while len(self.ended) < number:
                self._grew.clear()
                await self._grew.wait()


@asynccontextmanager
async def load_on(url: str, model: str, clients: int = 8) -> AsyncIterator[Load]:
    """Clients that ask the shipped model's questions one after the other until the block ends; half of the requests
    find nothing in the caches."""
    load, stopped = Load(), asyncio.Event()
    numbered = enumerate(itertools.cycle(load_examples()))

    async def work(client: httpx.AsyncClient) -> None:
        while not stopped.is_set():
            number, example = next(numbered)
            began_s = time.monotonic()
            outcome, what = await ask(client, model, example, f"fresh {number}" if number % 2 else None)
            load.add(f"{outcome}: {what}" if what else outcome, time.monotonic() - began_s)

    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client, asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(work(client))
        try:
            yield load
        finally:
            stopped.set()
