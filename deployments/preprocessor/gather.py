"""Concurrent work over a list in which some elements are equal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

V = TypeVar("V")


async def gather_distinct(keys: Sequence[Hashable], compute: Callable[[int], Awaitable[V]]) -> list[V]:
    """`[await compute(i) for i in range(len(keys))]`, all at once, and once only for equal keys.

    The first failure cancels the rest and waits for them to stop; of several failures the one with the lowest index
    is raised. Cancelling this cancels all.
    """
    first_index: dict[Hashable, int] = {}
    for index, key in enumerate(keys):
        first_index.setdefault(key, index)
    tasks = {index: asyncio.ensure_future(_call(compute, index)) for index in first_index.values()}
    try:
        if tasks:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    for task in tasks.values():
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [tasks[first_index[key]].result() for key in keys]


async def _call(compute: Callable[[int], Awaitable[V]], index: int) -> V:
    return await compute(index)
