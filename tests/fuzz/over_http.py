"""Mutated chat requests against a running server, a few at once, with its health asked all along."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.fuzz import seeds
from tests.fuzz.mutate import Mutator
from tests.fuzz.run import Result, settled_rss_mib
from tests.fuzz.targets import mutate_request

CHAT = "/v1/chat/completions"
_HEADERS = {"content-type": "application/json"}


async def run_over_http(
    url: str,
    model: str,
    *,
    seed: int,
    count: int,
    deadline_s: float,
    at_once: int = 4,
    server_pid: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """A status of 500 or above other than 504, a broken answer, none within `deadline_s` and a late /health are faults.

    A request that lost its `max_tokens` may generate until the server's own deadline and then gets a 504, as it should;
    `deadline_s` lies beyond that.

    Args:
        server_pid: The server's main process; memory is summed over it and all below it.
    """
    rng = random.Random(seed)
    mutator, bodies = Mutator(rng), seeds.requests(model)
    result, start = Result("requests", seed), time.perf_counter()
    limits = httpx.Limits(max_connections=at_once + 1)
    async with httpx.AsyncClient(base_url=url, timeout=deadline_s, trust_env=False, limits=limits) as client:

        async def worker() -> None:
            while result.count < count:
                result.count += 1
                number = result.count
                if number == count // 5:
                    result.warm_rss_mib = tree_rss_mib(server_pid)
                await _send(client, mutate_request(mutator, rng, bodies), number, result)
                progress(number)

        health = asyncio.create_task(_watch_health(client, result))
        await asyncio.gather(*(worker() for _ in range(at_once)))
        health.cancel()
        await asyncio.gather(health, return_exceptions=True)
        result.seconds = time.perf_counter() - start
        await asyncio.sleep(1.0)
    result.end_rss_mib = tree_rss_mib(server_pid)
    return result


async def _send(client: httpx.AsyncClient, body: bytes, number: int, result: Result) -> None:
    began = time.perf_counter()
    try:
        answer = await client.post(CHAT, content=body, headers=_HEADERS)
    except httpx.HTTPError as error:
        result.add_fault(f"{number}: {error!r} {body[:2000]!r}")
        return
    finally:
        result.slowest_s = max(result.slowest_s, time.perf_counter() - began)
    result.outcomes[str(answer.status_code)] += 1
    if (answer.status_code >= 500 and answer.status_code != 504) or (
        answer.status_code >= 400 and "error" not in answer.text
    ):
        result.add_fault(f"{number}: {answer.status_code} {answer.text[:300]} {body[:2000]!r}")


async def _watch_health(client: httpx.AsyncClient, result: Result) -> None:
    while True:
        await asyncio.sleep(0.5)
        try:
            answer = await client.get("/health", timeout=5.0)
            result.outcomes["health " + str(answer.status_code)] += 1
            if answer.status_code != 200:
                result.add_fault(f"health: {answer.status_code}")
        except httpx.HTTPError as error:
            result.add_fault(f"health: {error!r}")


def tree_rss_mib(root: int | None) -> float:
    """Resident memory of a process and all its descendants; 0 without one. Shared pages count once per process."""
    return 0.0 if root is None else sum(settled_rss_mib(pid) for pid in descendants(root))


def descendants(root: int) -> list[int]:
    """`root` and every process below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # gone meanwhile
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, stack = [], [root]
    while stack:
        pid = stack.pop()
        found.append(pid)
        stack.extend(children.get(pid, ()))
    return found
