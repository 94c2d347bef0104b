from __future__ import annotations

import asyncio

import pytest

from deployments.preprocessor.gather import gather_distinct


async def test_equal_keys_are_computed_once() -> None:
    calls: list[int] = []

    async def compute(index: int) -> int:
        calls.append(index)
        await asyncio.sleep(0)
        return index * 10

    assert await gather_distinct(["a", "b", "a", "c", "b"], compute) == [0, 10, 0, 30, 10]
    assert calls == [0, 1, 3]
    assert await gather_distinct([], compute) == []


async def test_first_failure_stops_the_rest() -> None:
    stopped = asyncio.Event()

    async def compute(index: int) -> None:
        if index == 1:
            await asyncio.sleep(0)
            raise ValueError(index)
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    with pytest.raises(ValueError, match="1"):
        await gather_distinct([0, 1, 2], compute)
    assert stopped.is_set()


async def test_lowest_index_wins_among_failures() -> None:
    async def compute(index: int) -> None:
        raise ValueError(f"number {index}")

    with pytest.raises(ValueError, match="number 0"):
        await gather_distinct([0, 1, 2], compute)


async def test_cancelling_stops_everything() -> None:
    stopped: list[int] = []

    async def compute(index: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(index)

    task = asyncio.create_task(gather_distinct([0, 1], compute))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == [0, 1]
