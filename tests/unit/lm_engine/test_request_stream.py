from __future__ import annotations

import asyncio

from deployments.errors import InternalError
from deployments.lm_engine.request_stream import RequestStream, fold
from deployments.messages import GenerationStats, SequenceDelta


def delta(text: str, token: int, **fields: object) -> SequenceDelta:
    return SequenceDelta(text=text, token_ids=(token,), **fields)  # type: ignore[arg-type]


async def test_a_slow_reader_gets_one_delta_per_choice() -> None:
    stream = RequestStream(2)
    for token, text in enumerate("abc"):
        stream.push(delta(text, token))
    stream.push(delta("x", 9, index=1))
    first, second = await stream.read()
    assert (first.index, first.text, first.token_ids) == (0, "abc", (0, 1, 2))
    assert (second.index, second.text) == (1, "x")


async def test_read_waits_for_something() -> None:
    stream = RequestStream(1)
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push(delta("a", 1))
    assert (await reader)[0].text == "a"


async def test_it_ends_with_its_last_choice_and_takes_nothing_after() -> None:
    stream = RequestStream(2)
    stream.push(delta("a", 1, finish_reason="stop"))
    stream.push(delta("late", 2))
    assert not stream.is_finished
    stream.end(SequenceDelta(finish_reason="error", error=InternalError("gone")))
    assert stream.is_finished
    assert not stream.is_drained
    first, second = await stream.read()
    assert (first.text, first.finish_reason, first.error) == ("a", "stop", None)
    assert isinstance(second.error, InternalError)
    assert stream.is_drained


def test_fold_keeps_the_last_words() -> None:
    stats = GenerationStats(prompt_tokens=1, completion_tokens=2)
    folded = fold([delta("a", 1), delta("b", 2, finish_reason="stop", stop_reason="b", stats=stats)])
    assert folded == SequenceDelta(text="ab", token_ids=(1, 2), finish_reason="stop", stop_reason="b", stats=stats)
