"""Items of many requests into rounds for the encode thread.

    submit ──▶ queue (first come, first served) ──round──▶ encode thread ──deliver──▶ each caller's future

An idle encoder starts at once, or after `max_wait_s`; behind a running round nobody waits longer than the round. What
a round may hold is decided by `round_size`, a pure function; how its items are packed into passes is the core's
business. Beside a language model on the same device `pace.Pace` keeps rounds short and apart while tokens are made.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from deployments.errors import InternalError, OverloadedError
from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.encoder import Deliver, Rows
from deployments.vision_encoder.pace import Pace
from deployments.vision_encoder.packing import Capacity, Load
from deployments.vision_encoder.stats import EncoderStats

Encode = Callable[[Sequence[VisionItem], Deliver], None]
_LOOK_AGAIN_S = 0.005
"""How often a paced batcher looks whether decoding has ended."""


def round_size(loads: Sequence[Load], limit: Capacity) -> int:
    """How many of the queued items, from the front, go into the next round: all that fit the limit, at least one."""
    total = Load()
    for count, load in enumerate(loads):
        total = total + load
        if count and limit.shortage(total, count + 1) is not None:
            return count
    return len(loads)


@dataclass(slots=True)
class _Waiting:
    item: VisionItem
    load: Load
    future: asyncio.Future[Rows]
    queued_s: float = field(default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A language model that decodes on the encoder's device."""

    pace: Pace
    is_decoding: Callable[[], bool]
    """Callable from the event loop; costs next to nothing."""
    predict_s: Callable[[VisionItem], float]
    """Device seconds of an item."""


class DynamicBatcher:
    """Args:
    encode: Runs in the batcher's own thread; calls `deliver` once for each item.
    limit: Most of a round.
    max_wait_s: How long the first item that reaches an idle encoder waits for company.
    num_threads: Torch CPU threads of the encode thread; 0 leaves the default.
    neighbour: Whom rounds leave time on the device; None if there is nobody.
    """

    def __init__(
        self,
        encode: Encode,
        limit: Capacity,
        *,
        max_wait_s: float,
        max_queued_items: int,
        stats: EncoderStats,
        num_threads: int = 0,
        neighbour: Neighbour | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._encode, self._limit, self._max_wait_s = encode, limit, max_wait_s
        self._max_queued_items, self._stats, self._clock = max_queued_items, stats, clock
        self._neighbour = neighbour
        self._queue: deque[_Waiting] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "encode", initializer=lambda: _use_threads(num_threads))

    def __len__(self) -> int:
        """Items waiting, not counting those in the running round."""
        return len(self._queue)

    async def submit(self, item: VisionItem, load: Load) -> Rows:
        """Rows of the item. Cancelling takes it out of the queue; a round that has started runs on.

        Raises:
            OverloadedError: Too many items wait already.
            SightlineError: Whatever the encoder says of this item.
        """
        if self._closed:
            raise OverloadedError("the vision encoder is shutting down", retry_after_s=1.0)
        if len(self._queue) >= self._max_queued_items:
            raise OverloadedError(
                f"{len(self._queue)} items wait for the vision encoder; at most {self._max_queued_items} may"
                " (max_queued_items)",
                retry_after_s=1.0,
            )
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        future: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(item, load, future, self._clock()))
        self._changed.set()
        return await future

    async def close(self) -> None:
        """Let the running round end, refuse what waits, and stop the thread."""
        self._closed = True
        self._changed.set()
        if self._task is not None:
            await self._task
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(OverloadedError("the vision encoder is shutting down", retry_after_s=1.0))
        self._queue.clear()
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        while not self._closed:
            if not self._queue:
                self._changed.clear()
                await self._changed.wait()
                await self._wait_for_company()
                continue
            is_decoding = await self._wait_for_turn()
            if self._closed:
                return
            batch = self._take_round(is_decoding)
            if batch:
                began_s = self._clock()
                await self._run_round(batch)
                if self._neighbour is not None:
                    self._neighbour.pace.spend(began_s, self._clock(), is_decoding)

    async def _wait_for_company(self) -> None:
        """Until the round is full or the oldest item has waited long enough."""
        while (
            not self._closed
            and self._queue
            and round_size([w.load for w in self._queue], self._limit) == len(self._queue)
        ):
            left_s = self._queue[0].queued_s + self._max_wait_s - self._clock()
            if left_s <= 0:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _wait_for_turn(self) -> bool:
        """Until the neighbour has had its time. Returns whether it decodes."""
        neighbour = self._neighbour
        if neighbour is None:
            return False
        began_s = self._clock()
        while is_decoding := neighbour.is_decoding():
            left_s = neighbour.pace.wait_s(self._clock(), is_decoding)
            if left_s <= 0 or self._closed:
                break
            await asyncio.sleep(min(left_s, _LOOK_AGAIN_S))
        self._stats.paced_seconds += self._clock() - began_s
        return is_decoding

    def _take_round(self, is_decoding: bool) -> list[_Waiting]:
        """The next round; items whose callers went away are dropped on the way."""
        live = [waiting for waiting in self._queue if not waiting.future.done()]
        self._stats.abandoned_items += len(self._queue) - len(live)
        count = round_size([waiting.load for waiting in live], self._limit)
        if self._neighbour is not None:
            predicted_s = [self._neighbour.predict_s(waiting.item) for waiting in live[:count]]
            count = self._neighbour.pace.take(predicted_s, is_decoding)
        self._queue = deque(live[count:])
        now = self._clock()
        self._stats.queue_seconds += sum(now - waiting.queued_s for waiting in live[:count])
        return live[:count]

    async def _run_round(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()

        def deliver(position: int, result: Rows | Exception) -> None:
            loop.call_soon_threadsafe(_resolve, batch[position].future, result)

        items = [waiting.item for waiting in batch]
        try:
            await loop.run_in_executor(self._thread, self._encode, items, deliver)
        except Exception as exc:
            # `encode` answers for each item; that it raised at all is a fault of ours. The next round is served.
            error = InternalError(f"the vision encoder failed: {type(exc).__name__}")
        else:
            error = InternalError("the vision encoder gave no answer for an item")
        await asyncio.sleep(0)  # deliveries that the thread scheduled before it returned come first
        for waiting in batch:
            _resolve(waiting.future, error)


def _use_threads(num_threads: int) -> None:
    if num_threads:
        torch.set_num_threads(num_threads)


def _resolve(future: asyncio.Future[Rows], result: Rows | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
