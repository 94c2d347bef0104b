"""A measured run from beginning to end: bodies, warm-up, counters before, load, counters after, figures."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp

from tests.bench.load.drive import Load, Result, drive
from tests.bench.load.figures import summarise
from tests.bench.load.prepare import bodies
from tests.bench.load.stages import FirstToken, first_token, read_counters
from tests.bench.load.workload import Workload

Cache = Literal["cold", "warm"]
WARM_UP_SEED = 100_000


class ServerError(Exception):
    """The server cannot be reached or does not say what it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def find(cls, url: str, model: str | None, api_key: str | None) -> Server:
        """The server at `url`; without a model's name, the first that it lists.

        Raises:
            ServerError: It does not answer, or lists no model.
        """
        url = url.rstrip("/").removesuffix("/v1")
        try:
            return cls(url=url, model=model or asyncio.run(_first_model(url, api_key)), api_key=api_key)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{url}/v1/models gives no model: {type(error).__name__} {error}") from error


async def _first_model(url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as session,
        session.get(f"{url}/v1/models", raise_for_status=True) as response,
    ):
        return str((await response.json())["data"][0]["id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    server: Server
    processes: int = 1
    """That send requests."""
    encode_processes: int = os.cpu_count() or 1
    """That make pictures, before the clock runs."""
    warm_up_rounds: int = 0
    cache: Cache = "cold"
    """`cold`: warm-up asks about other pictures and texts. `warm`: it asks the very same, so that every cache of the
    server that can hold them does."""
    seconds: float = float("inf")
    """No request begins later."""
    timeout_s: float = 300.0
    """Of one request."""
    count_tokens: Callable[[str], int] | None = None
    progress: bool = True

    def run(self, workload: Workload) -> dict[str, Any]:
        """Figures of a workload, ready for JSON."""
        work = self._bodies(workload)
        for number in range(self.warm_up_rounds):
            self._warm_up(workload, work, number)
        before = asyncio.run(read_counters(self.server.url, self.server.api_key))
        began_unix_s = time.time()
        result = self._send(workload, work, workload.name)
        figures = summarise(result, workload.out_tokens)
        figures["began_unix_s"] = round(began_unix_s, 3)
        figures["first_token"] = None
        if before is not None:
            wanted = before.requests + len(result.outcomes)
            after = asyncio.run(read_counters(self.server.url, self.server.api_key, wanted))
            try:
                if after is not None:
                    figures["first_token"] = _breakdown(first_token(after.since(before), result.outcomes))
            except ValueError as error:
                figures["first_token"] = str(error)
        return {
            "workload": workload.as_json(),
            "cache": self.cache,
            "warm_up_rounds": self.warm_up_rounds,
            "client_processes": self.processes,
            **figures,
        }

    def _warm_up(self, workload: Workload, work: Sequence[bytes], number: int) -> None:
        closed = replace(workload, rate_per_s=None, concurrency=workload.concurrency or 16)
        if self.cache == "cold":
            closed = replace(
                closed,
                requests=min(workload.requests, max(4, 2 * closed.concurrency)),
                seed=workload.seed + WARM_UP_SEED * (number + 1),
            )
            work = self._bodies(closed, progress=False)
        self._send(closed, work, f"{workload.name}, warm-up {number + 1}")

    def _bodies(self, workload: Workload, progress: bool = True) -> list[bytes]:
        return bodies(
            workload,
            self.server.model,
            processes=self.encode_processes,
            count_tokens=self.count_tokens,
            progress=progress and self.progress,
        )

    def _send(self, workload: Workload, work: Sequence[bytes], title: str) -> Result:
        load = Load(
            url=self.server.url,
            bodies=work,
            concurrency=workload.concurrency,
            arrivals_s=workload.arrivals_s(),
            seconds=self.seconds,
            timeout_s=self.timeout_s,
            api_key=self.server.api_key,
        )
        return drive(load, self.processes, title if self.progress else None)


def _breakdown(found: FirstToken | str) -> dict[str, object] | str:
    return found if isinstance(found, str) else found.as_json()
