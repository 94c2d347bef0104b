from __future__ import annotations

import asyncio

import numpy as np
import pytest
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
from deployments.lm_engine.encode_client import Embeddings, EncodeClient
from deployments.lm_engine.engine import EncodeBatch
from deployments.lm_engine.plan import EncodeStart
from deployments.messages import EncodedItem, EncodeRequest, MediaItem
from tests.fakes import FakeEncoder, MemoryObjectStore
from tests.parity.rig import until

WIDTH = 8


class Recorder:
    def __init__(self) -> None:
        self.ready: dict[int, Embeddings] = {}
        self.failed: dict[int, SightlineError] = {}
        self.retries = 0

    def on_encoded(self, start: EncodeStart, embeddings: Embeddings) -> None:
        self.ready[start.ticket] = embeddings

    def on_encode_failed(self, start: EncodeStart, error: SightlineError) -> None:
        self.failed[start.ticket] = error

    def on_encode_retry(self) -> None:
        self.retries += 1


class Bench:
    def __init__(self, **options: object) -> None:
        self.store = MemoryObjectStore()
        self.encoder = FakeEncoder(self.store, WIDTH)
        self.recorder = Recorder()
        self.client = EncodeClient(self.encoder, self.store, self.recorder, width=WIDTH, **options)  # type: ignore[arg-type]

    async def settle(self) -> None:
        """Until nothing is in flight."""
        await until(lambda: not self.client.num_in_flight)


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
    assert {ticket: e.to_tensor().shape for ticket, e in bench.recorder.ready.items()} == {
        n: (n, WIDTH) for n in (1, 2, 3)
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


@pytest.mark.parametrize("writable", [True, False])
def test_tensors_have_memory_of_their_own(writable: bool) -> None:
    rows = torch.arange(6.0).view(2, 3).bfloat16()
    array = rows.view(torch.uint16).numpy().copy()
    array.flags.writeable = writable
    tensor = Embeddings(array, "bfloat16").to_tensor()
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, rows)
    assert tensor.data_ptr() != array.ctypes.data
