"""The engine behind its port: a real thread, a tiny model, transformers' tower behind the encoder port."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch

from cache_service.identity import ItemIdentity
from deployments.errors import (
    InternalError,
    InvalidRequestError,
    MediaError,
    NotFoundError,
    NotReadyError,
    PayloadLostError,
    ReplicaLostError,
)
from deployments.lm_engine.async_engine import AsyncEngine
from deployments.lm_engine.embed_pool import EmbedPool
from deployments.lm_engine.embed_upload import EmbedUploader
from deployments.lm_engine.plan import StepPlan
from deployments.lm_engine.request_stream import fold
from deployments.lm_engine.stats import SchedulerStats
from deployments.messages import EncodedItem, EncodeRequest, GrammarSpec, SequenceDelta
from tests.parity.conftest import MakeVlm, make_vlm  # noqa: F401 - a fixture
from tests.parity.rig import Picture, Prompt, Rig, TinyVlm, until


class Payload:
    """A ref that owns its value, so that a test can see when the last one is dropped."""

    def __init__(self, value: Any) -> None:
        self.value = value


class PayloadStore:
    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Payload] = weakref.WeakSet()
        self.losses = 0
        """Reads that will fail."""

    def put(self, value: Any) -> Payload:
        payload = Payload(value)
        self.alive.add(payload)
        return payload

    async def get(self, ref: Payload) -> Any:
        await asyncio.sleep(0)
        if self.losses:
            self.losses -= 1
            raise PayloadLostError("gone")
        return ref.value


class TowerEncoder:
    """transformers' tower behind the port; bfloat16 rows travel as uint16, as in production."""

    def __init__(self, vlm: TinyVlm, store: PayloadStore) -> None:
        self.vlm, self.store = vlm, store
        self.requests: list[EncodeRequest] = []
        self.gate: asyncio.Event | None = None
        self.errors: list[Exception] = []
        self.bad: set[ItemIdentity] = set()
        self.cancelled = 0
        self.dtype = "float32"

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        self.requests.append(request)
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.errors:
            raise self.errors.pop(0)
        if any(item.identity in self.bad for item in request.items):
            raise MediaError("bad picture")
        return tuple(self._encoded(item) for item in request.items)

    def _encoded(self, item: Any) -> EncodedItem:
        rows = self.vlm.encode(item.patches)
        array = rows.bfloat16().view(torch.uint16).numpy() if self.dtype == "bfloat16" else rows.numpy()
        array.flags.writeable = False  # as the object store's are
        return EncodedItem(
            identity=item.identity,
            num_slots=item.num_slots,
            width=rows.shape[1],
            dtype=self.dtype,  # type: ignore[arg-type]
            embeddings=self.store.put(array),
        )


class Bench:
    def __init__(self, vlm: TinyVlm, options: dict[str, Any], rig_options: dict[str, Any]) -> None:
        self.vlm, self.rig = vlm, Rig(vlm, **rig_options)
        self.store = PayloadStore()
        self.encoder = TowerEncoder(vlm, self.store)
        self.pool = EmbedPool(1 << 20)
        self.engine = AsyncEngine(
            self.rig.make_engine,
            self.encoder,
            self.store,
            EmbedUploader(self.pool, torch.device("cpu"), torch.float32),
            embed_width=vlm.lm.embed_width,
            grammars=self.rig.grammar_compiler(),
            **options,
        )

    async def generate(self, request_id: str, prompt: Prompt, num_tokens: int = 8, **options: Any) -> SequenceDelta:
        """First choice of a request, from submit to its last delta."""
        await self.engine.submit(self.rig.request(request_id, prompt, num_tokens, **options))
        return fold([delta async for batch in self.engine.stream(request_id) for delta in batch if delta.index == 0])

    async def has_stats(self, condition: Callable[[SchedulerStats], bool]) -> bool:
        return condition((await self.engine.stats()).scheduler)

    async def assert_idle(self) -> None:
        """Nothing is held: no stream, sequence, block, slot in use, encode or payload."""
        await until(lambda: not (self.engine._engine.has_work or self.engine._encode_client.num_in_flight))
        stats = (await self.engine.stats()).scheduler
        assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_held) == (0, 0, 0, 0)
        assert self.engine.num_streams == 0
        self.pool.check_integrity()
        assert self.pool.stats().used_bytes == 0
        gc.collect()
        assert not self.store.alive


StartBench = Callable[..., Bench]


@pytest.fixture
def vlm(make_vlm: MakeVlm) -> TinyVlm:  # noqa: F811
    torch.set_num_threads(1)
    return make_vlm("qwen2_5_vl")


@pytest.fixture
async def start(vlm: TinyVlm) -> AsyncIterator[StartBench]:
    benches: list[Bench] = []

    def start_bench(rig: dict[str, Any] | None = None, **options: Any) -> Bench:
        bench = Bench(vlm, options, rig or {})
        benches.append(bench)
        bench.engine.start()
        return bench

    yield start_bench
    for bench in benches:
        await bench.engine.close()


@pytest.fixture
def prompt(vlm: TinyVlm) -> Prompt:
    return vlm.prompt("See ", Picture(1), " What is in the picture?")


async def test_concurrent_requests_get_their_own_answers(start: StartBench, vlm: TinyVlm) -> None:
    bench = start({"max_num_batched_tokens": 128, "num_gpu_blocks_override": 400})
    prompts = [vlm.prompt("See ", Picture(seed % 5 + 1), f" What is {seed % 7}?") for seed in range(64)]
    results = await asyncio.gather(*(bench.generate(f"r{i}", prompt) for i, prompt in enumerate(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == vlm.expected(prompt, 8)[0]
        assert result.finish_reason == "length"
        assert result.stats is not None
    await bench.assert_idle()


async def test_it_says_when_tokens_come(start: StartBench, prompt: Prompt) -> None:
    """An encoder on the same device asks."""
    bench = start()
    assert not bench.engine.is_decoding
    task = asyncio.create_task(bench.generate("r", prompt))
    await until(lambda: bench.engine.is_decoding)
    await task
    await until(lambda: not bench.engine.is_decoding)


async def test_items_of_a_request_are_asked_for_together(start: StartBench, vlm: TinyVlm) -> None:
    bench = start()
    prompt = vlm.prompt(Picture(1), " and ", Picture(2))
    await bench.generate("r", prompt)
    assert [len(request.items) for request in bench.encoder.requests] == [2]


async def test_bfloat16_rows_come_through(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    bench.encoder.dtype = "bfloat16"
    result = await bench.generate("r", prompt)
    assert result.error is None
    rows = bench.rig.store.rows(next(iter(bench.rig.store._tensors)), 0, 6)
    assert torch.equal(rows, vlm.encode(Picture(1)).bfloat16().float())


async def test_text_starts_while_the_picture_is_encoded(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    bench.encoder.gate = asyncio.Event()
    task = asyncio.create_task(bench.generate("r", prompt))
    await until(lambda: bench.has_stats(lambda stats: stats.scheduled_tokens >= prompt.items[0].offset))
    bench.encoder.gate.set()
    assert list((await task).token_ids) == vlm.expected(prompt, 8)[0]


async def test_closing_the_stream_stops_everything(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    bench.encoder.gate = asyncio.Event()
    await bench.engine.submit(bench.rig.request("r", prompt, 500))
    stream = bench.engine.stream("r")
    reader = asyncio.ensure_future(anext(stream))
    await until(lambda: bool(bench.encoder.requests))
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await stream.aclose()
    await bench.assert_idle()
    assert bench.encoder.cancelled == 1


async def test_an_encode_that_others_need_goes_on(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    bench.encoder.gate = asyncio.Event()
    await bench.engine.submit(bench.rig.request("leaves", prompt))
    stays = asyncio.create_task(bench.generate("stays", prompt))
    await until(lambda: bench.has_stats(lambda stats: stats.running == 2))
    await bench.engine.abort("leaves")
    await asyncio.sleep(0.05)
    bench.encoder.gate.set()
    assert list((await stays).token_ids) == vlm.expected(prompt, 8)[0]
    await bench.assert_idle()


async def test_breaking_off_midway_frees_blocks(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    await bench.engine.submit(bench.rig.request("r", prompt, 1000))
    stream = bench.engine.stream("r")
    assert (await anext(stream))[0].token_ids
    await stream.aclose()
    await bench.assert_idle()


async def test_abort_ends_the_reader(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    await bench.engine.submit(bench.rig.request("r", prompt, 1000, n=2))
    stream = bench.engine.stream("r")
    await anext(stream)
    await bench.engine.abort("r")
    rest = [delta async for batch in stream for delta in batch]
    assert {delta.index: delta.finish_reason for delta in rest} == {0: "abort", 1: "abort"}
    await bench.engine.abort("unknown")
    await bench.assert_idle()


async def test_a_slow_reader_sees_the_same_text(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    await bench.engine.submit(bench.rig.request("r", prompt, 30))
    batches = []
    async for batch in bench.engine.stream("r"):
        batches.append(batch)
        await asyncio.sleep(0.05)
    result = fold([delta for batch in batches for delta in batch])
    assert list(result.token_ids) == vlm.expected(prompt, 30)[0]
    assert result.text == vlm.tokenizer.decode(list(result.token_ids))
    assert all(len(batch) == 1 for batch in batches)


async def test_many_requests_come_over_one_channel(start: StartBench, vlm: TinyVlm) -> None:
    bench = start({"max_num_batched_tokens": 128, "num_gpu_blocks_override": 400})
    prompts = [vlm.prompt("See ", Picture(seed % 3 + 1), f" What is {seed}?") for seed in range(16)]
    for i, prompt in enumerate(prompts):
        await bench.engine.submit(bench.rig.request(f"r{i}", prompt, 8))
    ends = [asyncio.create_task(bench.engine.forward(f"r{i}", "channel")) for i in range(16)]
    found: dict[str, list[SequenceDelta]] = {}
    largest = 0
    async with aclosing(bench.engine.read_channel("channel")) as steps:
        async for step in steps:
            largest = max(largest, len(step))
            for request_id, batch in step:
                found.setdefault(request_id, []).extend(batch)
            if sum(deltas[-1].finish_reason is not None for deltas in found.values()) == 16:
                break
    assert largest > 1
    for i, prompt in enumerate(prompts):
        assert list(fold(found[f"r{i}"]).token_ids) == vlm.expected(prompt, 8)[0]
        assert [stats.completion_tokens for stats in await ends[i]] == [8]
    await bench.assert_idle()


async def test_closing_a_channel_frees_what_its_requests_hold(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    for request_id in ("a", "b"):
        await bench.engine.submit(bench.rig.request(request_id, prompt, 1000))
    ends = [asyncio.create_task(bench.engine.forward(request_id, "channel")) for request_id in ("a", "b")]
    steps = bench.engine.read_channel("channel")
    await anext(steps)
    await steps.aclose()
    assert all(isinstance(each, ReplicaLostError) for each in await asyncio.gather(*ends, return_exceptions=True))
    await bench.assert_idle()


async def test_a_stream_nobody_opens_is_dropped(start: StartBench, prompt: Prompt) -> None:
    bench = start(open_timeout_s=0.01)
    await bench.engine.submit(bench.rig.request("r", prompt, 1000))
    await asyncio.sleep(0.05)
    await bench.assert_idle()
    with pytest.raises(NotFoundError):
        await anext(bench.engine.stream("r"))


async def test_refusals_come_before_anything_is_streamed(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    bad_regex = GrammarSpec(kind="regex", value="[")
    for options in ({"grammar": bad_regex}, {"logit_bias": ((10**6, 1.0),)}):
        with pytest.raises(InvalidRequestError):
            await bench.engine.submit(bench.rig.request("r", prompt, **options))
    with pytest.raises(InvalidRequestError):
        await bench.engine.submit(bench.rig.request("r", prompt, 10**6))
    await bench.engine.submit(bench.rig.request("r", prompt))
    with pytest.raises(InvalidRequestError, match="already"):
        await bench.engine.submit(bench.rig.request("r", prompt))
    assert [delta async for batch in bench.engine.stream("r") for delta in batch]
    await bench.assert_idle()


async def test_structured_output(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    grammar = GrammarSpec(kind="choice", value='["red", "blue"]')
    result = await bench.generate("r", prompt, 20, grammar=grammar, n=2, temperature=1.0)
    assert result.text in ("red", "blue")


async def test_lost_payloads_and_replicas_are_asked_for_again(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    bench.store.losses = 1
    bench.encoder.errors = [ReplicaLostError("died")]
    result = await bench.generate("r", prompt)
    assert list(result.token_ids) == vlm.expected(prompt, 8)[0]
    assert (await bench.engine.stats()).encode_retries == 2
    await bench.assert_idle()


async def test_an_encoder_that_stays_away_ends_its_request_only(
    start: StartBench, vlm: TinyVlm, prompt: Prompt
) -> None:
    bench = start(max_encode_tries=2)
    bench.encoder.errors = [ReplicaLostError("died")] * 2
    text = vlm.prompt("The quick brown fox")
    lost, fine = await asyncio.gather(bench.generate("lost", prompt), bench.generate("text", text))
    assert lost.error is not None
    assert lost.error.code == "unavailable"
    assert list(fine.token_ids) == vlm.expected(text, 8)[0]
    await bench.assert_idle()


async def test_a_bad_picture_is_the_callers_error(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    bad = vlm.prompt("x", Picture(9), "y", Picture(8))
    bench.encoder.bad.add(bad.items[1].identity)
    broken, fine = await asyncio.gather(bench.generate("bad", bad), bench.generate("good", prompt))
    assert isinstance(broken.error, MediaError)
    assert list(fine.token_ids) == vlm.expected(prompt, 8)[0]
    await bench.assert_idle()


async def test_a_failed_step_is_survived(start: StartBench, vlm: TinyVlm, prompt: Prompt) -> None:
    bench = start()
    run = bench.rig.runner.run

    def fail_once(plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        bench.rig.runner.run = run  # type: ignore[method-assign]
        raise RuntimeError("device on fire")

    bench.rig.runner.run = fail_once  # type: ignore[method-assign]
    assert isinstance((await bench.generate("first", prompt)).error, InternalError)
    bench.engine.check_health()
    assert list((await bench.generate("second", prompt)).token_ids) == vlm.expected(prompt, 8)[0]
    await bench.assert_idle()


async def test_an_engine_that_only_fails_is_unhealthy_and_says_so(start: StartBench, vlm: TinyVlm) -> None:
    bench = start({"max_num_seqs": 1})

    def fail(plan: StepPlan) -> torch.Tensor:
        raise RuntimeError("device lost")

    bench.rig.runner.run = fail  # type: ignore[method-assign]
    text = vlm.prompt("hello")
    results = await asyncio.gather(*(bench.generate(f"r{i}", text) for i in range(8)))
    assert all(isinstance(result.error, InternalError) for result in results)
    bench.engine._thread.join(10)
    with pytest.raises(InternalError, match="thread has ended"):
        bench.engine.check_health()
    with pytest.raises(NotReadyError):
        await bench.engine.submit(bench.rig.request("late", text))
    with pytest.raises(NotReadyError):
        await bench.engine.stats()


async def test_a_stuck_step_is_unhealthy(start: StartBench, vlm: TinyVlm) -> None:
    bench = start(stall_s=0.05)
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    run = bench.rig.runner.run

    def stick(plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return run(plan, previous)

    bench.rig.runner.run = stick  # type: ignore[method-assign]
    bench.engine.check_health()
    task = asyncio.create_task(bench.generate("r", vlm.prompt("hello")))
    await asyncio.sleep(0.2)
    with pytest.raises(InternalError, match="took no step"):
        bench.engine.check_health()
    release.set()
    await task
    bench.engine.check_health()


async def test_close_ends_readers(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    bench.encoder.gate = asyncio.Event()
    task = asyncio.create_task(bench.generate("r", prompt))
    await until(lambda: bool(bench.encoder.requests))
    await bench.engine.close()
    assert isinstance((await task).error, NotReadyError)
    with pytest.raises(NotReadyError):
        await bench.engine.submit(bench.rig.request("late", prompt))


async def test_the_prefix_cache_can_be_reset(start: StartBench, prompt: Prompt) -> None:
    bench = start()
    await bench.generate("first", prompt)
    assert await bench.engine.reset_prefix_cache() > 0
    stats = (await bench.generate("second", prompt)).stats
    assert stats is not None
    assert stats.cached_tokens == 0
