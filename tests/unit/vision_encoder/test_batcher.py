"""Rounds are formed from what waits; a failing round harms nobody after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InternalError, OverloadedError
from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.batcher import DynamicBatcher, Neighbour, round_size
from deployments.vision_encoder.encoder import Deliver
from deployments.vision_encoder.pace import Pace
from deployments.vision_encoder.packing import Capacity, Load
from deployments.vision_encoder.stats import EncoderStats

LIMIT = Capacity(slots=100, patches=400, items=4, segments=1_000, frames=50)
loads = st.builds(lambda slots, frames: Load(slots, slots * 4, slots, frames), st.integers(1, 120), st.integers(1, 20))


@given(st.lists(loads, min_size=1, max_size=12))
def test_a_round_is_the_longest_front_that_fits(queue: list[Load]) -> None:
    count = round_size(queue, LIMIT)
    assert 1 <= count <= len(queue)
    if count > 1:
        assert LIMIT.shortage(sum(queue[:count], Load()), count) is None
    if count < len(queue):
        assert LIMIT.shortage(sum(queue[: count + 1], Load()), count + 1) is not None


def test_an_empty_queue_is_an_empty_round() -> None:
    assert round_size([], LIMIT) == 0


class Recorder:
    """An encode function that records its rounds and waits for a gate."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []
        self.started, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def __call__(self, items: Sequence[VisionItem], deliver: Deliver) -> None:
        self.rounds.append([item.grid[0] for item in items])
        self.started.set()
        assert self.gate.wait(10)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for position, item in enumerate(items):
            deliver(position, np.full((1, 1), item.grid[0]))


def make(encode: Recorder, max_wait_s: float = 0.0, max_queued_items: int = 100) -> DynamicBatcher:
    return DynamicBatcher(encode, LIMIT, max_wait_s=max_wait_s, max_queued_items=max_queued_items, stats=EncoderStats())


def item(number: int) -> VisionItem:
    return VisionItem("image", (number, 2, 2), np.zeros((1, 1), np.uint8))


async def submit(batcher: DynamicBatcher, number: int, slots: int = 10) -> int:
    return int((await batcher.submit(item(number), Load(slots, slots * 4, 1, 1)))[0, 0])


async def until_running(encode: Recorder, rounds: int = 1) -> None:
    while len(encode.rounds) < rounds:
        await asyncio.to_thread(encode.started.wait, 10)
        encode.started.clear()


async def test_what_comes_while_a_round_runs_is_the_next_round() -> None:
    encode = Recorder()
    batcher = make(encode)
    encode.gate.clear()
    first = asyncio.create_task(submit(batcher, 1))
    await until_running(encode)
    rest = [asyncio.create_task(submit(batcher, number)) for number in range(2, 8)]
    await asyncio.sleep(0)
    encode.gate.set()
    assert await asyncio.gather(first, *rest) == [1, 2, 3, 4, 5, 6, 7]
    assert encode.rounds == [[1], [2, 3, 4, 5], [6, 7]]  # four items at most
    await batcher.close()


async def test_a_full_round_does_not_wait() -> None:
    encode = Recorder()
    batcher = make(encode, max_wait_s=1_000.0)
    tasks = [asyncio.create_task(submit(batcher, number, slots=50)) for number in range(3)]
    done, _ = await asyncio.wait(tasks[:2], timeout=10)
    assert len(done) == 2
    assert encode.rounds[0] == [0, 1]
    for task in tasks:
        task.cancel()
    await batcher.close()


async def test_company_that_comes_in_time_shares_the_round() -> None:
    encode = Recorder()
    batcher = make(encode, max_wait_s=0.2)
    assert await asyncio.gather(*(submit(batcher, number) for number in range(3))) == [0, 1, 2]
    assert encode.rounds == [[0, 1, 2]]
    await batcher.close()


async def test_cancelled_items_are_dropped_before_they_run() -> None:
    encode = Recorder()
    batcher = make(encode)
    encode.gate.clear()
    first = asyncio.create_task(submit(batcher, 1))
    await until_running(encode)
    gone, stays = asyncio.create_task(submit(batcher, 2)), asyncio.create_task(submit(batcher, 3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    encode.gate.set()
    assert await asyncio.gather(first, stays) == [1, 3]
    assert encode.rounds == [[1], [3]]
    assert batcher._stats.abandoned_items == 1
    await batcher.close()


async def test_a_round_that_raises_fails_its_items_and_the_next_one_is_served() -> None:
    encode = Recorder()
    encode.error = RuntimeError("broken")
    batcher = make(encode)
    with pytest.raises(InternalError, match="RuntimeError"):
        await submit(batcher, 1)
    assert await submit(batcher, 2) == 2
    await batcher.close()


async def test_a_full_queue_is_overload_and_closing_refuses_what_waits() -> None:
    encode = Recorder()
    batcher = make(encode, max_queued_items=1)
    encode.gate.clear()
    first = asyncio.create_task(submit(batcher, 1))
    await until_running(encode)
    second = asyncio.create_task(submit(batcher, 2))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="max_queued_items"):
        await submit(batcher, 3)
    closing = asyncio.create_task(batcher.close())
    await asyncio.sleep(0)
    encode.gate.set()
    await closing
    with pytest.raises(OverloadedError):
        await second
    with pytest.raises(OverloadedError):
        await submit(batcher, 4)
    first.cancel()


def beside(
    encode: Recorder, share: float, *, is_decoding: Callable[[], bool], stats: EncoderStats | None = None
) -> DynamicBatcher:
    """Every item is predicted to take as many seconds as its number; a round may have three."""
    neighbour = Neighbour(pace=Pace(share, 3.0), is_decoding=is_decoding, predict_s=lambda item: float(item.grid[0]))
    return DynamicBatcher(
        encode, LIMIT, max_wait_s=0.0, max_queued_items=100, stats=stats or EncoderStats(), neighbour=neighbour
    )


async def test_rounds_are_short_while_a_neighbour_decodes() -> None:
    encode = Recorder()
    batcher = beside(encode, 1.0, is_decoding=lambda: True)
    await asyncio.gather(*(submit(batcher, number) for number in (1, 2, 3, 4, 1)))
    assert encode.rounds == [[1, 2], [3], [4], [1]]
    await batcher.close()


async def test_rounds_are_whole_while_no_neighbour_decodes() -> None:
    encode = Recorder()
    batcher = beside(encode, 1e-9, is_decoding=lambda: False)
    await asyncio.gather(*(submit(batcher, number) for number in (1, 2, 3, 4)))
    await submit(batcher, 5)
    assert encode.rounds == [[1, 2, 3, 4], [5]]
    await batcher.close()


async def test_a_gap_ends_with_the_decoding() -> None:
    """The gap behind the first round would take years."""
    encode, decoding, stats = Recorder(), [True], EncoderStats()
    batcher = beside(encode, 1e-12, is_decoding=lambda: decoding[0], stats=stats)
    await submit(batcher, 1)
    second = asyncio.create_task(submit(batcher, 2))
    await asyncio.sleep(0.05)
    assert encode.rounds == [[1]]
    decoding[0] = False
    assert await second == 2
    assert stats.paced_seconds > 0
    await batcher.close()


async def test_closing_does_not_wait_for_a_gap() -> None:
    encode = Recorder()
    batcher = beside(encode, 1e-12, is_decoding=lambda: True)
    await submit(batcher, 1)
    second = asyncio.create_task(submit(batcher, 2))
    await asyncio.sleep(0)
    await batcher.close()
    with pytest.raises(OverloadedError):
        await second
    assert encode.rounds == [[1]]
