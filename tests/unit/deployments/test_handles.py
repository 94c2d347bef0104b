"""What the handles make of a replica's answers; Serve itself is replaced by a script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.errors import InvalidRequestError, NotFoundError, ReplicaLostError, SightlineError
from deployments.handles import EngineHandle
from deployments.messages import DeltaBatch, SequenceDelta


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
