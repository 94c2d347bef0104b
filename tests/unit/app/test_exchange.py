from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.exchange import merge
from deployments.messages import DeltaBatch, SequenceDelta


class Generation:
    """Yields its texts; waits at each for a permit. Notes that it was closed."""

    def __init__(self, *texts: str, permits: int = 99, error: Exception | None = None) -> None:
        self._texts, self._permits, self._error = texts, asyncio.Semaphore(permits), error
        self.closed = False

    def allow(self) -> None:
        self._permits.release()

    async def run(self) -> AsyncGenerator[DeltaBatch, None]:
        try:
            for text in self._texts:
                await self._permits.acquire()
                yield (SequenceDelta(text=text),)
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


def number(prompt: int, batch: DeltaBatch) -> DeltaBatch:
    return [SequenceDelta(index=prompt, text=delta.text) for delta in batch]


async def test_all_of_every_generation_in_its_own_order() -> None:
    parts = [Generation("a", "b"), Generation(), Generation("c")]
    seen = [d async for batch in merge([part.run() for part in parts], number) for d in batch]
    assert sorted((d.index, d.text) for d in seen) == [(0, "a"), (0, "b"), (2, "c")]
    assert [d.text for d in seen if d.index == 0] == ["a", "b"]
    assert all(part.closed for part in parts)


async def test_nothing_is_handed_out_before_each_has_begun() -> None:
    slow = Generation("s", permits=0)
    merged = merge([Generation("a").run(), slow.run()], number)
    first = asyncio.ensure_future(anext(merged))
    await asyncio.sleep(0.01)
    assert not first.done()
    slow.allow()
    assert (await first)[0].text in "as"
    await merged.aclose()


@pytest.mark.parametrize("texts", [(), ("x",)])
async def test_one_error_ends_all(texts: tuple[str, ...]) -> None:
    waiting = Generation("w", "never", permits=1)
    parts = [waiting, Generation(*texts, error=ValueError("bad"))]
    with pytest.raises(ValueError, match="bad"):
        async for _ in merge([part.run() for part in parts], number):
            pass
    assert all(part.closed for part in parts)


async def test_closing_in_the_middle_closes_all() -> None:
    parts = [Generation("a", "b", permits=1), Generation("c", "d", permits=1)]
    merged = merge([part.run() for part in parts], number)
    await anext(merged)
    await merged.aclose()
    assert all(part.closed for part in parts)
