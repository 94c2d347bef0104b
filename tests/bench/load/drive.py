"""Sends prepared bodies in a closed or an open loop, from one process or spread over several."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import aiohttp
from tqdm import tqdm

from tests.bench.load.answer import Outcome
from tests.bench.load.client import ask, open_session
from tests.bench.load.workload import shard

LAG_PERIOD_S = 0.02
PROGRESS_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one process sends."""

    url: str
    bodies: Sequence[bytes]
    concurrency: int
    """In flight at once; 0 is any number, in an open loop."""
    arrivals_s: Sequence[float] | None = None
    """Open loop: when each body is sent, in seconds from the start."""
    seconds: float = float("inf")
    """No request begins later; those in flight are awaited."""
    timeout_s: float = 300.0
    """Of one request."""
    api_key: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class Result:
    outcomes: list[Outcome]
    lag_s: array[float]
    """How late the client's own event loop woke up, many times: near 0, or the client was the bottleneck."""


def split(load: Load, processes: int) -> list[Load]:
    """The same load as parts that run side by side; never more parts than requests or places."""
    most = min(len(load.bodies), load.concurrency or len(load.bodies))
    count = max(1, min(processes, most))
    return [
        Load(
            url=load.url,
            bodies=shard(load.bodies, index, count),
            concurrency=(load.concurrency + count - 1 - index) // count,
            arrivals_s=None if load.arrivals_s is None else shard(load.arrivals_s, index, count),
            seconds=load.seconds,
            timeout_s=load.timeout_s,
            api_key=load.api_key,
        )
        for index in range(count)
    ]


def drive(load: Load, processes: int, progress: str | None = None) -> Result:
    """Run the load to its end.

    Args:
        progress: Title of a progress bar; None shows none.
    """
    parts = split(load, processes)
    with tqdm(total=len(load.bodies), desc=progress, unit="request", disable=progress is None) as bar:
        if len(parts) == 1:
            return asyncio.run(run(load, bar.update))
        return _drive_processes(parts, bar)


async def run(load: Load, on_done: Callable[[], object] = lambda: None, start_s: float | None = None) -> Result:
    """Send everything from this event loop, from the instant `start_s` of the monotonic clock on."""
    outcomes: list[Outcome] = []
    lag_s: array[float] = array("d")
    async with open_session(load.timeout_s, load.api_key) as session:
        if start_s is not None:
            await asyncio.sleep(start_s - time.monotonic())
        start_s = time.monotonic()
        watch = asyncio.create_task(_watch_lag(lag_s))
        loop = _closed_loop if load.arrivals_s is None else _open_loop

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            on_done()

        try:
            await loop(session, load, start_s, done)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
    return Result(outcomes, lag_s)


async def _closed_loop(
    session: aiohttp.ClientSession, load: Load, start_s: float, done: Callable[[Outcome], None]
) -> None:
    """So many clients, each of which asks again as soon as it has its answer."""
    bodies = iter(load.bodies)

    async def client() -> None:
        for body in bodies:
            if time.monotonic() - start_s > load.seconds:
                return
            done(await ask(session, load.url, body))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, len(load.bodies))):
            group.create_task(client())


async def _open_loop(
    session: aiohttp.ClientSession, load: Load, start_s: float, done: Callable[[Outcome], None]
) -> None:
    """Requests begin when they are due, however many are still under way, up to the limit on those in flight."""
    assert load.arrivals_s is not None
    places = asyncio.Semaphore(load.concurrency) if load.concurrency else None

    async def request(body: bytes, due_s: float) -> None:
        try:
            outcome = await ask(session, load.url, body)
        finally:
            if places is not None:
                places.release()
        outcome.late_s = outcome.begun_s - due_s
        done(outcome)

    async with asyncio.TaskGroup() as group:
        for body, arrival_s in zip(load.bodies, load.arrivals_s, strict=True):
            if arrival_s > load.seconds:
                break
            await asyncio.sleep(start_s + arrival_s - time.monotonic())
            if places is not None:
                await places.acquire()
            group.create_task(request(body, start_s + arrival_s))


async def _watch_lag(lag_s: array[float]) -> None:
    while True:
        due_s = time.monotonic() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag_s.append(time.monotonic() - due_s)


# ---- several processes -----------------------------------------------------------------------------------------------
def _drive_processes(parts: Sequence[Load], bar: tqdm[Any]) -> Result:
    context = get_context("spawn")
    pipes, processes = [], []
    for part in parts:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_part, args=(theirs, part), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            _expect(pipe)  # its imports are done
        start_s = time.monotonic() + 0.2
        for pipe in pipes:
            pipe.send(start_s)
        results = list(_collect(pipes, bar))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    merged = Result([], array("d"))
    for result in results:
        merged.outcomes += result.outcomes
        merged.lag_s += result.lag_s
    return merged


def _collect(pipes: Sequence[Connection], bar: tqdm[Any]) -> list[Result]:
    """Progress and, at last, the result of every process."""
    results: list[Result] = []
    open_pipes = list(pipes)
    while open_pipes:
        for pipe in wait(open_pipes):
            assert isinstance(pipe, Connection)
            message = _expect(pipe)
            if isinstance(message, int):
                bar.update(message)
                continue
            results.append(message)
            open_pipes.remove(pipe)
    return results


def _expect(pipe: Connection) -> Any:
    try:
        message = pipe.recv()
    except EOFError:
        raise RuntimeError("a client process has died") from None
    return message


def _serve_part(pipe: Connection, load: Load) -> None:
    """Entry of a client process."""
    unreported = 0
    reported_s = 0.0

    def on_done() -> None:
        nonlocal unreported, reported_s
        unreported += 1
        if time.monotonic() - reported_s > PROGRESS_PERIOD_S:
            reported_s = time.monotonic()
            pipe.send(unreported)
            unreported = 0

    pipe.send(0)
    start_s = pipe.recv()
    gc.freeze()  # bodies are many and large, and no collection need ever look at them again
    result = asyncio.run(run(load, on_done, start_s))
    pipe.send(unreported)
    pipe.send(result)
