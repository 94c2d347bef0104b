"""What the handles make of a replica's answers; Serve itself is replaced by a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.identity import ItemIdentity
from deployments.errors import (
    InvalidRequestError,
    MediaError,
    NotFoundError,
    OverloadedError,
    ReplicaLostError,
)
from deployments.handles import EncoderHandle, EngineHandle
from deployments.hedging import HedgingConfig
from deployments.messages import EncodedItem, EncodeRequest, MediaItem, SequenceDelta
from deployments.routing import item_key, replica_session, session_id
from tests.unit.deployments.engine_replicas import EngineReplica, Fleet, a_request, delta, until


class Response:
    """What a Serve handle's call returns: awaited for the answer, and cancelled by a call of its own."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.ensure_future(work)
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._task).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._task.cancel()


class Encoders:
    """Records which session each call names; answers with the item's own identity, or fails for one of them.

    Args:
        hanging: Items whose first call is never answered.
    """

    def __init__(self, failing: bytes | None = None, hanging: frozenset[bytes] = frozenset()) -> None:
        self.calls: list[tuple[str, tuple[MediaItem, ...]]] = []
        self.responses: list[Response] = []
        self._failing, self._hanging = failing, hanging

    def options(self, *, session_id: str) -> Any:
        async def answer(request: EncodeRequest) -> tuple[EncodedItem, ...]:
            (item,) = request.items
            if item.identity in self._hanging and not session_id.endswith("/"):
                await asyncio.Event().wait()
            await asyncio.sleep(0.001 * (3 - len(self.calls)))  # the first call ends last
            if item.identity == self._failing:
                raise OverloadedError("full", retry_after_s=1.0)
            return (
                EncodedItem(identity=item.identity, num_slots=1, width=1, dtype="float32", embeddings=item.identity),
            )

        def remote(request: EncodeRequest) -> Response:
            self.calls.append((session_id, request.items))
            self.responses.append(Response(answer(request)))
            return self.responses[-1]

        return SimpleNamespace(encode=SimpleNamespace(remote=remote))


def items(*names: bytes) -> tuple[MediaItem, ...]:
    return tuple(
        MediaItem(modality="image", identity=ItemIdentity(n * 32), grid=(1, 2, 2), offset=i, num_slots=1, num_patches=4)
        for i, n in enumerate(names)
    )


async def test_each_picture_goes_to_its_own_replica_and_comes_back_in_its_place() -> None:
    encoders = Encoders()
    wanted = items(b"a", b"b", b"c")
    answer = await EncoderHandle(encoders).encode(EncodeRequest(request_id="r", items=wanted))  # type: ignore[arg-type]
    assert [item.identity for item in answer] == [item.identity for item in wanted]
    assert [session.split("/")[0] for session, _ in encoders.calls] == [item_key(item) for item in wanted]
    assert len({session for session, _ in encoders.calls}) == 3


async def test_a_picture_that_fails_waits_for_the_others_to_be_cached() -> None:
    encoders = Encoders(failing=b"a" * 32)
    with pytest.raises(OverloadedError):
        await EncoderHandle(encoders).encode(EncodeRequest(request_id="r", items=items(b"a", b"b")))  # type: ignore[arg-type]
    assert len(encoders.calls) == 2


async def test_a_picture_whose_replica_hangs_is_asked_of_another_one_and_comes_back_in_its_place() -> None:
    encoders = Encoders(hanging=frozenset((b"b" * 32,)))
    handle = EncoderHandle(encoders, HedgingConfig(min_s=0.05, initial_s=0.05))  # type: ignore[arg-type]
    wanted = items(b"a", b"b", b"c")
    answer = await handle.encode(EncodeRequest(request_id="r", items=wanted))
    assert [item.identity for item in answer] == [item.identity for item in wanted]
    (_, asked_first, _, asked_again) = (session for session, _ in encoders.calls)
    assert asked_again == f"{asked_first}/"
    assert handle.hedges == {"won": 1}
    await until(lambda: encoders.responses[1].is_cancelled)


async def test_a_call_that_is_given_up_is_cancelled_at_the_replica() -> None:
    encoders = Encoders(hanging=frozenset((b"a" * 32,)))
    asked = asyncio.create_task(
        EncoderHandle(encoders).encode(EncodeRequest(request_id="r", items=items(b"a")))  # type: ignore[arg-type]
    )
    await until(lambda: encoders.responses)
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    await until(lambda: encoders.responses[0].is_cancelled)


# -- the engine's ------------------------------------------------------------------------------------------------------
@pytest.fixture
def fleet() -> Fleet:
    return Fleet("a", "b", "c")


@pytest.fixture
async def engine(fleet: Fleet) -> AsyncIterator[EngineHandle]:
    engine = EngineHandle(fleet.handle, linger_s=0.02)
    yield engine
    await engine.close()


async def settle() -> None:
    """Let all that can happen now happen."""
    for _ in range(20):
        await asyncio.sleep(0)


def reader(engine: EngineHandle, request_id: str) -> asyncio.Task[list[SequenceDelta]]:
    async def read() -> list[SequenceDelta]:
        return [each async for batch in engine.stream(request_id) for each in batch]

    return asyncio.create_task(read())


async def test_requests_on_a_replica_share_one_channel_and_get_their_own_deltas(
    fleet: Fleet, engine: EngineHandle
) -> None:
    for i in range(12):
        await engine.submit(a_request(f"r{i}"))
    readers = [reader(engine, f"r{i}") for i in range(12)]
    await settle()
    for position in range(3):
        for i in range(12):
            fleet.where(f"r{i}").push(f"r{i}", delta(100 * i + position, last=position == 2))
        await settle()
    for i, each in enumerate(readers):
        assert [d.token_ids for d in await each] == [(100 * i + position,) for position in range(3)]
    opened = [session for method, session in fleet.sessions if method == "read_channel"]
    used = {fleet.where(f"r{i}").name for i in range(12)}
    assert len(used) > 1
    assert sorted(opened) == sorted(replica_session(name) for name in used)


async def test_a_step_is_one_message_whatever_number_of_requests(fleet: Fleet) -> None:
    fleet = Fleet("a")
    engine = EngineHandle(fleet.handle, linger_s=0.02)
    for i in range(12):
        await engine.submit(a_request(f"r{i}"))
    readers = [reader(engine, f"r{i}") for i in range(12)]
    await settle()
    messages: list[bytes] = []
    (call,) = fleet.replicas["a"].channel_calls
    put = call._items.put_nowait
    call._items.put_nowait = lambda item: (messages.append(item[0]), put(item))[1]  # type: ignore[method-assign]
    for position in range(3):
        for i in range(12):
            fleet.replicas["a"].push(f"r{i}", delta(position, last=position == 2))
        await settle()
    await asyncio.gather(*readers)
    assert len(messages) == 3
    await engine.close()


async def test_what_was_made_before_the_stream_is_read_comes_first(fleet: Fleet, engine: EngineHandle) -> None:
    await engine.submit(a_request("r", n=2))
    replica = fleet.where("r")
    replica.push("r", delta(0), delta(1, index=1), delta(2))
    deltas = reader(engine, "r")
    await settle()
    replica.push("r", delta(3, last=True), delta(4, last=True, index=1))
    assert [(d.index, d.token_ids) for d in await deltas] == [(0, (0, 2)), (1, (1,)), (0, (3,)), (1, (4,))]


async def test_an_idle_channel_closes_and_the_next_request_opens_another(fleet: Fleet, engine: EngineHandle) -> None:
    replicas = list(fleet.replicas.values())
    for request_id in ("first", "second"):
        await engine.submit(a_request(request_id))
        deltas = reader(engine, request_id)
        await settle()
        fleet.where(request_id).push(request_id, delta(0, last=True))
        assert len(await deltas) == 1
        await until(lambda: not any(replica.streams.num_channels or replica.calls for replica in replicas))
    assert [method for method, _ in fleet.sessions].count("read_channel") == 2


async def test_a_dead_replica_ends_its_requests_as_lost_and_no_others(fleet: Fleet, engine: EngineHandle) -> None:
    for i in range(12):
        await engine.submit(a_request(f"r{i}"))
    readers = {f"r{i}": reader(engine, f"r{i}") for i in range(12)}
    homes = {request_id: fleet.where(request_id).name for request_id in readers}
    await settle()
    fleet.kill("a")
    for request_id, name in homes.items():
        fleet.replicas[name].push(request_id, delta(0, last=True))
    results = dict(zip(readers, await asyncio.gather(*readers.values(), return_exceptions=True), strict=True))
    assert "a" in homes.values()
    for request_id, name in homes.items():
        if name == "a":
            assert isinstance(results[request_id], ReplicaLostError)
        else:
            assert results[request_id] == [delta(0, last=True)]


async def test_a_channel_that_breaks_aborts_its_requests_and_is_replaced(engine: EngineHandle, fleet: Fleet) -> None:
    await engine.submit(a_request("first"))
    first = reader(engine, "first")
    await settle()
    replica = fleet.where("first")
    replica.channel_calls[0].break_off(ConnectionError("reset"))
    with pytest.raises(ReplicaLostError):
        await first
    await settle()
    assert replica.aborted == ["first"]
    assert len(replica.streams) == 0
    await engine.submit(a_request("second"))
    second = reader(engine, "second")
    await settle()
    fleet.where("second").push("second", delta(0, last=True))
    assert await second == [delta(0, last=True)]


async def test_closing_one_stream_aborts_it_and_leaves_the_others_alone(fleet: Fleet) -> None:
    fleet = Fleet("a")
    engine = EngineHandle(fleet.handle, linger_s=0.02)
    replica = fleet.replicas["a"]
    await engine.submit(a_request("leaves"))
    await engine.submit(a_request("stays"))
    leaving, staying = engine.stream("leaves"), reader(engine, "stays")
    first = asyncio.ensure_future(anext(leaving))
    await settle()
    replica.push("leaves", delta(0))
    await first
    fleet.leave("a")  # no new call reaches it, and still it hears of it
    await leaving.aclose()  # type: ignore[attr-defined]
    await settle()
    assert replica.aborted == ["leaves"]
    replica.push("stays", delta(0, last=True))
    assert await staying == [delta(0, last=True)]
    await engine.close()


async def test_a_replica_that_leaves_finishes_what_it_has(fleet: Fleet, engine: EngineHandle) -> None:
    await engine.submit(a_request("r"))
    deltas = reader(engine, "r")
    await settle()
    replica = fleet.where("r")
    fleet.leave(replica.name)
    replica.push("r", delta(0))
    await settle()
    replica.push("r", delta(1, last=True))
    assert await deltas == [delta(0), delta(1, last=True)]
    await until(lambda: not replica.calls)  # nor does the idle channel hold it


async def test_moved_session_counts_as_a_lost_replica(fleet: Fleet, engine: EngineHandle) -> None:
    """The replica left between submit and stream: the caller did nothing wrong and the step can be redone."""
    await engine.submit(a_request("r"))
    fleet.leave(fleet.where("r").name)
    with pytest.raises(ReplicaLostError):
        await reader(engine, "r")
    assert not any(len(replica.streams) and replica.calls for replica in fleet.replicas.values())


async def test_an_abort_ends_the_stream_with_abort(fleet: Fleet, engine: EngineHandle) -> None:
    await engine.submit(a_request("r", n=2))
    deltas = reader(engine, "r")
    await settle()
    await engine.abort("r")
    assert [d.finish_reason for d in await deltas] == ["abort", "abort"]
    await engine.abort("unknown")


async def test_errors_of_a_sequence_come_as_they_are(fleet: Fleet, engine: EngineHandle) -> None:
    await engine.submit(a_request("r"))
    deltas = reader(engine, "r")
    await settle()
    fleet.where("r").push("r", SequenceDelta(finish_reason="error", error=MediaError("no", param="x")))
    (last,) = await deltas
    assert isinstance(last.error, MediaError)
    assert last.error.param == "x"


async def test_refusals_open_nothing(fleet: Fleet, engine: EngineHandle) -> None:
    await engine.submit(a_request("r"))
    with pytest.raises(InvalidRequestError, match="already"):
        await engine.submit(a_request("r"))
    with pytest.raises(NotFoundError):
        await reader(engine, "unknown")
    assert {method for method, _ in fleet.sessions} == {"submit"}


async def test_calls_name_their_request_and_nothing_else(fleet: Fleet, engine: EngineHandle) -> None:
    await engine.submit(a_request("r"))
    deltas = reader(engine, "r")
    await settle()
    fleet.where("r").push("r", delta(0, last=True))
    await deltas
    await engine.abort("r")
    own = [(method, session) for method, session in fleet.sessions if method in ("stream", "abort")]
    assert own == [("stream", session_id("", "r")), ("abort", session_id("", "r"))]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_whatever_the_timing_nothing_is_lost_and_nobody_hangs(seed: int, num_requests: int, kill: bool) -> None:
    """Requests come and go at random while channels linger for no time at all, readers leave and a replica dies."""
    asyncio.run(asyncio.wait_for(_disorder(random.Random(seed), num_requests, kill), 30))


async def _disorder(rng: random.Random, num_requests: int, kill: bool) -> None:
    fleet = Fleet("a", "b", seed=rng.randrange(2**32))
    engine = EngineHandle(fleet.handle, linger_s=0)
    lost: list[str] = []

    async def steps(most: int) -> None:
        for _ in range(rng.randrange(most)):
            await asyncio.sleep(0)

    async def generate(replica: EngineReplica, request_id: str, num_tokens: int) -> None:
        for position in range(num_tokens):
            await steps(4)
            replica.push(request_id, delta(position, last=position == num_tokens - 1))

    async def one(request_id: str) -> None:
        await steps(80)
        num_tokens, leaves_after = rng.randint(1, 8), rng.choice((None, None, rng.randint(0, 8)))
        seen: list[int] = []
        generating: asyncio.Task[None] | None = None
        deltas = engine.stream(request_id)
        try:
            await engine.submit(a_request(request_id))
            generating = asyncio.create_task(generate(fleet.where(request_id), request_id, num_tokens))
            await steps(10)
            async for batch in deltas:
                seen += [token_id for each in batch for token_id in each.token_ids]
                await steps(3)
                if leaves_after is not None and len(seen) >= leaves_after:
                    break
            else:
                assert seen == list(range(num_tokens))
        except ReplicaLostError:
            lost.append(request_id)
        finally:
            assert seen == list(range(len(seen)))
            await deltas.aclose()  # type: ignore[attr-defined]
            with suppress(ReplicaLostError):
                await engine.abort(request_id)
            if generating is not None:
                await generating

    async def killer() -> None:
        await steps(100)
        fleet.kill("a")

    works = [one(f"r{i}") for i in range(num_requests)]
    await asyncio.gather(*works, *([killer()] if kill else ()))
    await until(lambda: not any(replica.calls for replica in fleet.replicas.values()))
    assert kill or not lost
    survivors = [replica for replica in fleet.replicas.values() if not (kill and replica.name == "a")]
    assert not any(len(replica.streams) or replica.streams.num_channels for replica in survivors)
    assert engine.num_channels == 0
