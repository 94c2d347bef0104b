"""Requests' ways out: who may read, who is told when nobody does, and what a slow reader of a channel finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.errors import InvalidRequestError, NotFoundError, NotReadyError, ReplicaLostError
from deployments.lm_engine.request_streams import RequestStreams
from deployments.messages import DeltaBatch, GenerateRequest, GenerationStats, SamplingParams, SequenceDelta

Steps = AsyncIterator[list[tuple[str, DeltaBatch]]]


class Engine:
    """Streams, and who was aborted."""

    def __init__(self, open_timeout_s: float = 60) -> None:
        self.aborted: list[str] = []
        self.streams = RequestStreams(self.aborted.append, open_timeout_s=open_timeout_s)

    def submit(self, *request_ids: str, n: int = 1) -> None:
        for request_id in request_ids:
            request = GenerateRequest(
                request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=8, n=n)
            )
            self.streams.await_reader(request_id, self.streams.add(request))

    def forward(self, request_id: str, channel_id: str = "c") -> asyncio.Task[tuple[GenerationStats, ...]]:
        return asyncio.create_task(self.streams.forward(request_id, channel_id))

    def token(self, request_id: str, token: int, last: bool = False, index: int = 0) -> None:
        stats = GenerationStats(prompt_tokens=1, completion_tokens=token) if last else None
        reason = "stop" if last else None
        self.streams.push(
            request_id,
            SequenceDelta(index=index, text=str(token), token_ids=(token,), finish_reason=reason, stats=stats),  # type: ignore[arg-type]
        )

    def assert_idle(self) -> None:
        assert len(self.streams) == 0
        assert self.streams.num_channels == 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def tokens(step: list[tuple[str, DeltaBatch]]) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    return {request_id: [(d.index, d.token_ids) for d in batch] for request_id, batch in step}


async def test_a_step_of_many_requests_is_read_at_once() -> None:
    engine = Engine()
    engine.submit("a", "b")
    ends = [engine.forward("a"), engine.forward("b")]
    channel = engine.streams.read_channel("c")
    step = asyncio.ensure_future(anext(channel))
    await settle()
    engine.token("b", 1)
    engine.token("a", 2)
    assert tokens(await step) == {"b": [(0, (1,))], "a": [(0, (2,))]}
    engine.token("a", 3, last=True)
    engine.token("b", 4, last=True)
    await anext(channel)
    assert [stats.completion_tokens for each in ends for stats in await each] == [3, 4]
    await channel.aclose()
    engine.assert_idle()
    assert engine.aborted == []


async def test_a_slow_reader_finds_the_steps_folded_in_order() -> None:
    engine = Engine()
    engine.submit("a", "b", n=2)
    ends = [engine.forward("a"), engine.forward("b")]
    await settle()
    for token in range(4):
        engine.token("a", token, index=token % 2)
        engine.token("b", 10 + token)
    channel = engine.streams.read_channel("c")
    assert tokens(await anext(channel)) == {"a": [(0, (0, 2)), (1, (1, 3))], "b": [(0, (10, 11, 12, 13))]}
    assert not any(each.done() for each in ends)
    await channel.aclose()
    assert all(isinstance(each, ReplicaLostError) for each in await asyncio.gather(*ends, return_exceptions=True))


async def test_a_request_ends_when_its_last_delta_has_been_taken_and_not_before() -> None:
    engine = Engine()
    engine.submit("a")
    end = engine.forward("a")
    await settle()
    engine.token("a", 1, last=True)
    await settle()
    assert not end.done()
    channel = engine.streams.read_channel("c")
    await anext(channel)
    await end
    await channel.aclose()
    engine.assert_idle()


async def test_closing_a_channel_aborts_its_requests_and_no_others() -> None:
    engine = Engine()
    engine.submit("a", "b", "other", "done")
    ends = [engine.forward("a"), engine.forward("b"), engine.forward("done")]
    other = engine.forward("other", "another")
    channel = engine.streams.read_channel("c")
    step = asyncio.ensure_future(anext(channel))
    await settle()
    engine.token("done", 1, last=True)
    await step
    step = asyncio.ensure_future(anext(channel))
    await settle()
    step.cancel()  # as when the caller's process has died
    results = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(result) for result in results] == [ReplicaLostError, ReplicaLostError, tuple]
    assert sorted(engine.aborted) == ["a", "b"]
    assert not other.done()
    assert len(engine.streams) == 1
    other.cancel()
    await asyncio.gather(other, step, return_exceptions=True)
    engine.assert_idle()


async def test_cancelling_one_aborts_it_alone() -> None:
    engine = Engine()
    engine.submit("leaves", "stays")
    leaves, stays = engine.forward("leaves"), engine.forward("stays")
    channel = engine.streams.read_channel("c")
    step = asyncio.ensure_future(anext(channel))
    await settle()
    engine.token("leaves", 1)
    leaves.cancel()
    await settle()
    engine.token("leaves", 2)
    engine.token("stays", 3, last=True)
    found = tokens(await step)
    if "stays" not in found:
        found = tokens(await anext(channel))
    assert found == {"stays": [(0, (3,))]}
    await stays
    assert engine.aborted == ["leaves"]
    await channel.aclose()
    engine.assert_idle()


async def test_a_channel_nobody_opens_ends_its_requests() -> None:
    engine = Engine(open_timeout_s=0.01)
    engine.submit("a")
    with pytest.raises(ReplicaLostError):
        await engine.forward("a")
    assert engine.aborted == ["a"]
    engine.assert_idle()


async def test_a_channel_that_is_opened_in_time_stays() -> None:
    engine = Engine(open_timeout_s=0.01)
    engine.submit("a")
    end = engine.forward("a")
    channel = engine.streams.read_channel("c")
    step = asyncio.ensure_future(anext(channel))
    await asyncio.sleep(0.03)
    assert not end.done()
    assert engine.aborted == []
    engine.token("a", 1, last=True)
    await step
    await end
    await channel.aclose()
    engine.assert_idle()


async def test_there_is_one_reader_of_a_request_and_one_of_a_channel() -> None:
    engine = Engine()
    engine.submit("a")
    end = engine.forward("a")
    channel = engine.streams.read_channel("c")
    step = asyncio.ensure_future(anext(channel))
    await settle()
    for second in (engine.forward("a"), anext(engine.streams.read("a")), anext(engine.streams.read_channel("c"))):
        with pytest.raises(NotFoundError):
            await second
    with pytest.raises(InvalidRequestError, match="already"):
        engine.submit("a")
    engine.token("a", 1, last=True)
    await asyncio.gather(step, end)
    await channel.aclose()
    engine.assert_idle()


async def test_an_abort_and_the_engines_end_are_read_like_anything_else() -> None:
    engine = Engine()
    engine.submit("a", "b")
    ends = [engine.forward("a"), engine.forward("b")]
    channel = engine.streams.read_channel("c")
    step = asyncio.ensure_future(anext(channel))
    await settle()
    assert engine.streams.end("a")
    assert [(request_id, d.finish_reason) for request_id, (d,) in await step] == [("a", "abort")]
    engine.streams.end_all(NotReadyError("down"))
    ((request_id, (last,)),) = await anext(channel)
    assert request_id == "b"
    assert isinstance(last.error, NotReadyError)
    await asyncio.gather(*ends)
    await channel.aclose()
    engine.assert_idle()
    assert not engine.streams.end("a")


async def test_an_abort_between_submit_and_the_readers_coming() -> None:
    engine = Engine()
    engine.submit("a")
    assert engine.streams.end("a")
    with pytest.raises(NotFoundError):
        await engine.forward("a")
    engine.assert_idle()
