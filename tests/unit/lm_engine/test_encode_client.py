from __future__ import annotations

import asyncio

import numpy as np
import torch

from cache_service.identity import EmbeddingIdentity, ItemIdentity
from deployments.errors import (
    InternalError,
    MediaError,
    OverloadedError,
    PayloadLostError,
    ReplicaLostError,
    SightlineError,
)
from deployments.lm_engine.embed_pool import EmbedPool
from deployments.lm_engine.embed_upload import EmbedUploader
from deployments.lm_engine.encode_client import EncodeClient
from deployments.lm_engine.engine import EncodeBatch
from deployments.lm_engine.plan import EncodeStart
from deployments.messages import EncodedItem, EncodeRequest, MediaItem
from tests.fakes import FakeEncoder, MemoryObjectStore
from tests.parity.rig import until

WIDTH = 8


class Recorder:
    def __init__(self) -> None:
        self.ready: dict[int, torch.Tensor] = {}
        self.failed: dict[int, SightlineError] = {}
        self.retries = 0

    def on_encoded(self, start: EncodeStart, embeddings: torch.Tensor) -> None:
        self.ready[start.ticket] = embeddings

    def on_encode_failed(self, start: EncodeStart, error: SightlineError) -> None:
        self.failed[start.ticket] = error

    def on_encode_retry(self) -> None:
        self.retries += 1


class Bench:
    def __init__(self, *, pool_bytes: int = 4096, **options: object) -> None:
        self.store = MemoryObjectStore()
        self.encoder = FakeEncoder(self.store, WIDTH)
        self.pool = EmbedPool(pool_bytes)
        self.recorder = Recorder()
        self.client = EncodeClient(
            self.encoder,
            self.store,
            EmbedUploader(self.pool, torch.device("cpu"), torch.float32),
            self.recorder,
            width=WIDTH,
            **options,  # type: ignore[arg-type]
        )

    async def settle(self) -> None:
        """Until nothing is in flight."""
        await until(lambda: not self.client.num_in_flight)
        self.pool.check_integrity()


def identity(number: int) -> EmbeddingIdentity:
    return EmbeddingIdentity(bytes([number]))


def batch(*numbers: int, deadline_s: float | None = None) -> EncodeBatch:
    starts = tuple(
        EncodeStart(
            identity(number),
            MediaItem(
                modality="image",
                identity=ItemIdentity(bytes([number])),
                grid=(1, 2, 2 * number),
                offset=0,
                num_slots=number,
                num_patches=4 * number,
            ),
            "request",
            ticket=number,
        )
        for number in numbers
    )
    return EncodeBatch("request", "tenant", deadline_s, starts)


async def test_items_of_a_sequence_travel_in_one_request() -> None:
    bench = Bench()
    bench.client.handle((), (batch(1, 2), batch(3)))
    await bench.settle()
    assert [len(request.items) for request in bench.encoder.requests] == [2, 1]
    assert bench.encoder.requests[0].namespace == "tenant"
    assert {ticket: rows.tolist() for ticket, rows in bench.recorder.ready.items()} == {
        n: [[n] * WIDTH] * n for n in (1, 2, 3)
    }


async def test_a_request_s_trace_context_travels_along() -> None:
    bench = Bench(trace_context=lambda request_id: {"x-request-id": f"of {request_id}"})
    bench.client.handle((), (batch(1),))
    await bench.settle()
    assert bench.encoder.requests[0].trace_context == {"x-request-id": "of request"}


async def test_a_lost_ref_is_asked_for_again_alone() -> None:
    bench = Bench()
    original = bench.store.get
    lost = iter([True])

    async def lose_once(ref: int) -> np.ndarray:
        if ref == 1 and next(lost, False):
            raise PayloadLostError("gone")
        return await original(ref)

    bench.store.get = lose_once  # type: ignore[method-assign]
    bench.client.handle((), (batch(1, 2),))
    await bench.settle()
    assert sorted(bench.recorder.ready) == [1, 2]
    assert [len(request.items) for request in bench.encoder.requests] == [2, 1]
    assert bench.recorder.retries == 1


async def test_tries_are_bounded() -> None:
    bench = Bench(max_tries=3)
    bench.encoder.errors = [ReplicaLostError("died")] * 5
    bench.client.handle((), (batch(1),))
    await bench.settle()
    error = bench.recorder.failed[1]
    assert isinstance(error, OverloadedError), "a lost replica would be tried again with another engine"
    assert error.code == "unavailable"
    assert len(bench.encoder.requests) == 3


async def test_a_replica_that_comes_back_in_time_is_enough() -> None:
    bench = Bench(max_tries=3)
    bench.encoder.errors = [ReplicaLostError("died")] * 2
    bench.client.handle((), (batch(1, 2),))
    await bench.settle()
    assert sorted(bench.recorder.ready) == [1, 2]
    assert not bench.recorder.failed
    assert bench.recorder.retries == 3  # both items after the first call, one after the second


async def test_no_retry_after_the_deadline() -> None:
    bench = Bench(clock=lambda: 100.0)
    bench.encoder.errors = [ReplicaLostError("died")]
    bench.client.handle((), (batch(1, deadline_s=100.01),))
    await bench.settle()
    assert list(bench.recorder.failed) == [1]
    assert len(bench.encoder.requests) == 1


async def test_a_bad_item_is_found_and_fails_alone() -> None:
    bench = Bench()
    inner = bench.encoder.encode

    async def refuse_two(request: EncodeRequest) -> tuple[EncodedItem, ...]:
        if any(item.identity == bytes([2]) for item in request.items):
            raise MediaError("bad picture")
        return await inner(request)

    bench.encoder.encode = refuse_two  # type: ignore[method-assign]
    bench.client.handle((), (batch(1, 2, 3),))
    await bench.settle()
    assert sorted(bench.recorder.ready) == [1, 3]
    assert isinstance(bench.recorder.failed[2], MediaError)


async def test_wrong_shapes_and_counts_are_faults() -> None:
    bench = Bench()
    bench.encoder.width = WIDTH + 1
    bench.client.handle((), (batch(1),))
    await bench.settle()
    assert isinstance(bench.recorder.failed[1], InternalError)
    assert f"(1, {WIDTH + 1})" in bench.recorder.failed[1].message


async def test_foreign_exceptions_are_translated() -> None:
    bench = Bench()
    bench.encoder.errors = [ValueError("odd")]
    bench.client.handle((), (batch(1),))
    await bench.settle()
    assert isinstance(bench.recorder.failed[1], InternalError)


async def test_a_silent_encoder_counts_as_lost() -> None:
    bench = Bench(timeout_s=0.01, max_tries=1)
    bench.encoder.gate = asyncio.Event()
    bench.client.handle((), (batch(1),))
    await bench.settle()
    assert bench.recorder.failed[1].code == "unavailable"


async def test_a_call_is_cancelled_with_its_last_item() -> None:
    bench = Bench()
    bench.encoder.gate = asyncio.Event()
    bench.client.handle((), (batch(1, 2),))
    await asyncio.sleep(0.01)
    (task,) = bench.client._tasks
    bench.client.handle((identity(1),), ())
    await asyncio.sleep(0.01)
    assert not task.done()
    bench.client.handle((identity(2), identity(9)), ())
    await asyncio.sleep(0.01)
    assert task.cancelled()
    assert not bench.recorder.ready
    assert not bench.recorder.failed


async def test_a_cancelled_item_is_not_delivered_but_its_companion_is() -> None:
    bench = Bench()
    bench.encoder.gate = asyncio.Event()
    bench.client.handle((), (batch(1, 2),))
    await asyncio.sleep(0)
    bench.client.handle((identity(1),), ())
    bench.encoder.gate.set()
    await bench.settle()
    assert list(bench.recorder.ready) == [2]


async def test_close_leaves_nothing_running() -> None:
    bench = Bench()
    bench.encoder.gate = asyncio.Event()
    bench.client.handle((), (batch(1),))
    await asyncio.sleep(0.01)
    await bench.client.close()
    assert not bench.client._tasks


async def test_items_that_do_not_fit_the_pool_together_come_one_by_one() -> None:
    """One row of 8 float32 takes 256 bytes of the pool, all that there is."""
    bench = Bench(pool_bytes=256)
    bench.client.handle((), (batch(1, 2, 3), batch(4, 5)))
    await bench.settle()
    assert {ticket: rows[0, 0].item() for ticket, rows in bench.recorder.ready.items()} == {n: n for n in range(1, 6)}
    assert bench.pool.stats().used_bytes == 0


async def test_a_wait_for_room_is_no_loss_however_long() -> None:
    bench = Bench(pool_bytes=256, timeout_s=0.01)
    held = await bench.pool.take(256)
    bench.client.handle((), (batch(1, 2),))
    await asyncio.sleep(0.05)
    assert bench.pool.stats().waiting == 2
    bench.pool.release(held)
    await bench.settle()
    assert sorted(bench.recorder.ready) == [1, 2]
    assert bench.recorder.retries == 0


async def test_an_item_cancelled_while_it_waits_for_room_leaves_no_trace() -> None:
    bench = Bench(pool_bytes=256)
    held = await bench.pool.take(256)
    bench.client.handle((), (batch(1), batch(2)))
    await until(lambda: bench.pool.stats().waiting == 2)
    bench.client.handle((identity(1),), ())
    bench.pool.release(held)
    await bench.settle()
    assert list(bench.recorder.ready) == [2]
    assert bench.pool.stats().used_bytes == 0


async def test_an_item_is_handed_over_before_its_companion_has_arrived() -> None:
    bench = Bench()
    inner, gate = bench.store.get, asyncio.Event()

    async def slow_second(ref: int) -> np.ndarray:
        if ref == 2:
            await gate.wait()
        return await inner(ref)

    bench.store.get = slow_second  # type: ignore[method-assign]
    bench.client.handle((), (batch(1, 2),))
    await until(lambda: bool(bench.recorder.ready))
    assert list(bench.recorder.ready) == [1]
    gate.set()
    await bench.settle()
    assert list(bench.recorder.ready) == [1, 2]


async def test_a_payload_that_never_comes_is_asked_for_again() -> None:
    bench = Bench(timeout_s=0.01)
    inner = bench.store.get

    async def first_hangs(ref: int) -> np.ndarray:
        if ref == 1:
            await asyncio.Event().wait()
        return await inner(ref)

    bench.store.get = first_hangs  # type: ignore[method-assign]
    bench.client.handle((), (batch(1),))
    await bench.settle()
    assert list(bench.recorder.ready) == [1]
    assert [request.refresh for request in bench.encoder.requests] == [False, True]
