"""What the handles make of a replica's answers; Serve itself is replaced by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cache_service.identity import ItemIdentity
from deployments.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ReplicaLostError,
    SightlineError,
)
from deployments.handles import EncoderHandle, EngineHandle
from deployments.messages import DeltaBatch, EncodedItem, EncodeRequest, MediaItem, SequenceDelta
from deployments.routing import item_key, session_id


class ScriptedDeltas:
    """A streaming response: its batches, and then an error."""

    def __init__(self, error: SightlineError, batches: int) -> None:
        self._error, self._batches = error, batches
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[DeltaBatch]:
        for _ in range(self._batches):
            yield (SequenceDelta(text="a"),)
        raise self._error

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedHandle:
    def __init__(self, deltas: ScriptedDeltas) -> None:
        self._deltas = deltas
        self.sessions: list[str] = []

    def options(self, *, session_id: str, **options: Any) -> ScriptedHandle:
        self.sessions.append(session_id)
        return self

    @property
    def stream(self) -> ScriptedHandle:
        return self

    def remote(self, request_id: str) -> ScriptedDeltas:
        return self._deltas


async def failure_of(deltas: ScriptedDeltas) -> SightlineError:
    engine = EngineHandle(ScriptedHandle(deltas))  # type: ignore[arg-type]
    with pytest.raises(SightlineError) as caught:
        async for _ in engine.stream("r"):
            pass
    return caught.value


async def test_moved_session_counts_as_a_lost_replica() -> None:
    """An engine replica joined between submit and stream: the caller did nothing wrong and the step can be redone."""
    deltas = ScriptedDeltas(NotFoundError("there is no request with this id"), batches=0)
    assert isinstance(await failure_of(deltas), ReplicaLostError)
    assert deltas.cancelled


async def test_other_errors_stay_as_they_are() -> None:
    error = InvalidRequestError("no", param="x")
    assert await failure_of(ScriptedDeltas(error, batches=1)) is error


class Encoders:
    """Records which session each call names; answers with the item's own identity, or fails for one of them."""

    def __init__(self, failing: bytes | None = None) -> None:
        self.calls: list[tuple[str, tuple[MediaItem, ...]]] = []
        self._failing = failing

    def options(self, *, session_id: str) -> Any:
        async def remote(request: EncodeRequest) -> tuple[EncodedItem, ...]:
            self.calls.append((session_id, request.items))
            (item,) = request.items
            await asyncio.sleep(0.001 * (3 - len(self.calls)))  # the first call ends last
            if item.identity == self._failing:
                raise OverloadedError("full", retry_after_s=1.0)
            return (
                EncodedItem(identity=item.identity, num_slots=1, width=1, dtype="float32", embeddings=item.identity),
            )

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
    assert {session for session, _ in encoders.calls} == {session_id(item_key(item)) for item in wanted}


async def test_a_picture_that_fails_waits_for_the_others_to_be_cached() -> None:
    encoders = Encoders(failing=b"a" * 32)
    with pytest.raises(OverloadedError):
        await EncoderHandle(encoders).encode(EncodeRequest(request_id="r", items=items(b"a", b"b")))  # type: ignore[arg-type]
    assert len(encoders.calls) == 2


async def test_a_stream_names_its_request_and_nothing_else() -> None:
    handle = ScriptedHandle(ScriptedDeltas(InternalError("end"), batches=1))
    with pytest.raises(InternalError):
        async for _ in EngineHandle(handle).stream("r"):  # type: ignore[arg-type]
            pass
    assert handle.sessions == [session_id("", "r")]
