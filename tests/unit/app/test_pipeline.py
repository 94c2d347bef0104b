from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from app.admission import AdmissionConfig
from app.observer import RequestTrace
from app.pipeline import Call, Pipeline
from cache_service.identity import ItemIdentity
from cache_service.tenants import Tenant, TenantLimits
from deployments.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    MediaError,
    OverloadedError,
    PayloadLostError,
    ReplicaLostError,
)
from deployments.messages import (
    GenerateRequest,
    GenerationStats,
    MediaInput,
    MediaItem,
    PreparedPrompt,
    PrepareRequest,
    SamplingParams,
    SequenceDelta,
)
from tests.fakes import FakeEngine, FakePreprocessor
from tests.unit.app.helpers import eventually, make_call, make_pipeline, make_trace


async def collect(pipeline: Pipeline, call: Call, trace: RequestTrace | None = None) -> str:
    text = ""
    async with aclosing(pipeline.generate(call, trace or make_trace())) as batches:
        async for batch in batches:
            text += "".join(delta.text for delta in batch)
    return text


async def test_the_whole_way() -> None:
    preprocessor, engine, trace = FakePreprocessor(), FakeEngine(), make_trace()
    pipeline = make_pipeline(preprocessor, engine)
    settled: list[bool] = []
    call = make_call(tenant=Tenant(name="acme"), cache_salt="s", priority=3)
    async with aclosing(pipeline.generate(call, trace, lambda: settled.append(True))) as batches:
        text = "".join([delta.text async for batch in batches for delta in batch])
    assert text == "a red circle"
    assert settled == [True]
    prepared, request = preprocessor.requests[0], engine.requests["r1"]
    assert (prepared.namespace, prepared.max_prompt_tokens) == ("tenant:acme", 63)
    assert (request.namespace, request.cache_salt, request.priority) == ("tenant:acme", "s", 3)
    assert request.deadline_s == prepared.deadline_s
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (3, 3)
    trace.close_stages()
    assert {"receive", "admission", "generation"} <= set(trace.stage_seconds)
    assert not engine.aborted
    assert pipeline.admission.stats.running == 0


async def test_nothing_holds_a_prompt_s_pixels_once_its_answer_has_begun() -> None:
    class Pixels:
        """What a ref in an item would keep alive."""

    pixels: list[weakref.ref[Pixels]] = []

    class MakesItems(FakePreprocessor):
        async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
            source = Pixels()
            pixels.append(weakref.ref(source))
            item = MediaItem(
                modality="image",
                identity=ItemIdentity(b"i"),
                grid=(1, 2, 2),
                offset=0,
                num_slots=1,
                num_patches=4,
                patches=source,
            )
            return PreparedPrompt(token_ids=self.token_ids, items=(item,))

    class Forgets(FakeEngine):
        """Keeps no request, as a handle to an engine elsewhere does not."""

        async def submit(self, request: GenerateRequest) -> None:
            await super().submit(replace(request, items=()))

    pipeline = make_pipeline(MakesItems(), Forgets())
    async with aclosing(pipeline.generate(make_call(), make_trace())) as batches:
        await anext(batches)
        gc.collect()
        assert [pixel() for pixel in pixels] == [None]
        assert "".join([delta.text async for batch in batches for delta in batch]) == " red circle"


@pytest.mark.parametrize(
    ("given", "param", "wanted"), [(8, "max_tokens", 8), (61, "max_tokens", 61), (999, None, 61), (1, None, 61)]
)
async def test_max_tokens_is_what_was_asked_or_what_is_left(given: int, param: str | None, wanted: int) -> None:
    engine = FakeEngine()
    call = make_call(sampling=SamplingParams(max_tokens=given), max_tokens_param=param)
    await collect(make_pipeline(engine=engine), call)
    assert engine.requests["r1"].sampling.max_tokens == wanted


async def test_a_tenants_limit_bounds_answers_without_max_tokens() -> None:
    engine = FakeEngine()
    tenant = Tenant(name="t", limits=TenantLimits(max_completion_tokens=5))
    await collect(make_pipeline(engine=engine), make_call(tenant=tenant, max_tokens_param=None))
    assert engine.requests["r1"].sampling.max_tokens == 5


async def test_too_long_is_told_with_the_numbers() -> None:
    call = make_call(sampling=SamplingParams(max_tokens=62), max_tokens_param="max_completion_tokens")
    with pytest.raises(
        ContextLengthError, match=r"is 62, but the prompt's 3 tokens leave 61 .* length of 64"
    ) as caught:
        await collect(make_pipeline(), call)
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(ContextLengthError, match="64 tokens; the model's context length is 64") as caught:
        await collect(make_pipeline(FakePreprocessor(tuple(range(64)))), make_call())
    assert caught.value.param == "messages"
    call = make_call(sampling=SamplingParams(max_tokens=2, min_tokens=3))
    with pytest.raises(InvalidRequestError) as minimum:
        await collect(make_pipeline(), call)
    assert minimum.value.param == "min_tokens"


@pytest.mark.parametrize("loss", [ReplicaLostError("gone"), PayloadLostError("gone")])
async def test_a_loss_before_the_first_delta_is_tried_again(loss: Exception) -> None:
    preprocessor, engine, trace = FakePreprocessor(), FakeEngine(), make_trace()
    engine.losses = [loss, loss]
    assert await collect(make_pipeline(preprocessor, engine), make_call(), trace) == "a red circle"
    assert list(engine.requests) == ["r1", "r1-1", "r1-2"]
    assert trace.attempts == 3
    assert len(preprocessor.requests) == (3 if isinstance(loss, PayloadLostError) else 1)
    assert engine.aborted == ["r1", "r1", "r1-1", "r1-1"], "by closing the stream, and by name"


async def test_tries_are_bounded_and_then_the_server_is_unavailable() -> None:
    engine = FakeEngine()
    engine.losses = [ReplicaLostError("gone")] * 9
    with pytest.raises(OverloadedError) as caught:
        await collect(make_pipeline(engine=engine, max_attempts=2), make_call())
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "unavailable", 1)
    assert len(engine.losses) == 7


class DyingPreprocessor(FakePreprocessor):
    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        prepared = await super().prepare(request)
        if len(self.requests) == 1:
            raise ReplicaLostError("gone")
        return prepared


async def test_a_lost_preprocessor_is_tried_again() -> None:
    preprocessor = DyingPreprocessor()
    assert await collect(make_pipeline(preprocessor), make_call()) == "a red circle"
    assert len(preprocessor.requests) == 2


async def test_a_loss_after_the_first_delta_is_an_error() -> None:
    engine = FakeEngine()
    engine.script = ((SequenceDelta(text="a"),),)  # The stream ends without a finish reason.
    with pytest.raises(ReplicaLostError):
        await collect(make_pipeline(engine=engine), make_call())
    assert list(engine.requests) == ["r1"]


@pytest.mark.parametrize(
    ("delta", "error"),
    [
        (SequenceDelta(finish_reason="error", error=MediaError("bad")), MediaError),
        (SequenceDelta(finish_reason="error"), InternalError),
        (SequenceDelta(finish_reason="abort"), InternalError),
    ],
)
async def test_a_failed_choice_fails_the_request(delta: SequenceDelta, error: type[Exception]) -> None:
    engine = FakeEngine()
    engine.script = ((SequenceDelta(text="a"),), (delta,))
    with pytest.raises(error):
        await collect(make_pipeline(engine=engine), make_call())
    assert "r1" in engine.aborted


async def test_every_choice_is_waited_for() -> None:
    engine = FakeEngine()
    stats = GenerationStats(prompt_tokens=3, completion_tokens=2)
    end0, end1 = (SequenceDelta(index=i, text=str(i), finish_reason="stop", stats=stats) for i in range(2))
    engine.script = ((end0,), (end1,), (SequenceDelta(text="never read"),))
    trace = make_trace()
    call = make_call(sampling=SamplingParams(max_tokens=4, n=2))
    assert await collect(make_pipeline(engine=engine), call, trace) == "01"
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize("where", ["prepare", "submit"])
async def test_refusals_come_as_they_are_and_abort_nothing(where: str) -> None:
    preprocessor, engine = FakePreprocessor(), FakeEngine()
    error = InvalidRequestError("no", param="messages")
    if where == "prepare":
        preprocessor.error = error
    else:
        engine.submit_error = error
    pipeline = make_pipeline(preprocessor, engine)
    with pytest.raises(InvalidRequestError):
        await collect(pipeline, make_call())
    assert not engine.aborted
    assert pipeline.admission.stats.running == 0


async def test_the_deadline_ends_a_generation() -> None:
    engine = FakeEngine()
    engine.pause = asyncio.Event()
    with pytest.raises(DeadlineError, match=r"limit of 0\.02 seconds"):
        await collect(make_pipeline(engine=engine, request_timeout_s=0.02), make_call())
    assert "r1" in engine.aborted


async def test_the_deadline_covers_preparation_and_waiting() -> None:
    class Stuck(FakePreprocessor):
        cancelled = False

        async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            raise AssertionError

    stuck = Stuck()
    pipeline = make_pipeline(stuck, admission=AdmissionConfig(max_running_requests=1), request_timeout_s=0.05)
    results = await asyncio.gather(*(collect(pipeline, make_call()) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineError, DeadlineError]
    assert stuck.cancelled
    assert (pipeline.admission.stats.running, pipeline.admission.stats.queued) == (0, 0)


async def test_closing_aborts_the_generation_and_frees_the_place() -> None:
    engine = FakeEngine()
    pipeline = make_pipeline(engine=engine)
    generation = pipeline.generate(make_call(), make_trace())
    await anext(generation)
    assert pipeline.admission.stats.running == 1
    await generation.aclose()
    assert "r1" in engine.aborted
    assert pipeline.admission.stats.running == 0


async def test_cancelling_while_waiting_for_a_delta_aborts() -> None:
    engine = FakeEngine()
    engine.pause = asyncio.Event()
    pipeline = make_pipeline(engine=engine)
    task = asyncio.create_task(collect(pipeline, make_call()))
    await eventually(lambda: "r1" in engine.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pipeline.drain()
    assert "r1" in engine.aborted
    assert pipeline.admission.stats.running == 0


async def test_media_are_let_go_with_the_first_delta() -> None:
    media = (MediaInput(modality="image", param="p", url="data:x"),)
    generation: Any = make_pipeline().generate(make_call(media=media), make_trace())
    await anext(generation)
    assert generation.ag_frame.f_locals["call"].media == ()
    await generation.aclose()


async def test_no_place_means_no_work() -> None:
    preprocessor = FakePreprocessor()
    pipeline = make_pipeline(preprocessor, admission=AdmissionConfig(max_running_requests=1, max_queued_requests=0))
    held = pipeline.generate(make_call(), make_trace())
    await anext(held)
    with pytest.raises(OverloadedError):
        await collect(pipeline, replace(make_call(), engine_id="r2"))
    assert len(preprocessor.requests) == 1
    await held.aclose()


async def test_prepare_alone() -> None:
    preprocessor = FakePreprocessor()
    prepared = await make_pipeline(preprocessor).prepare(make_call(), make_trace())
    assert prepared.token_ids == (1, 2, 3)
    assert preprocessor.requests[0].max_prompt_tokens is None
