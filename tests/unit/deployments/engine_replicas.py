"""LM engine replicas behind Serve, as far as EngineHandle sees them: calls that take a while, break and are cancelled.

The replicas' way out is the engine's own (RequestStreams and the codec); what it generates is up to the test.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from deployments.delta_codec import encode
from deployments.errors import NotFoundError
from deployments.lm_engine.request_streams import RequestStreams
from deployments.messages import GenerateRequest, SamplingParams, SequenceDelta
from deployments.routing import Placer

Pause = Callable[[], Awaitable[None]]


def a_request(request_id: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(request_id.encode()),
        sampling=SamplingParams(max_tokens=8, temperature=0, n=n),
    )


def delta(position: int, *, last: bool = False, index: int = 0) -> SequenceDelta:
    return SequenceDelta(
        index=index, text=f"{position} ", token_ids=(position,), finish_reason="stop" if last else None
    )


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for what nothing announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class EngineReplica:
    def __init__(self, name: str) -> None:
        self.name = name
        self.aborted: list[str] = []
        self.streams = RequestStreams(self.aborted.append, open_timeout_s=60)
        self.calls: set[ServeCall] = set()
        self.channel_calls: list[ServeCall] = []

    def push(self, request_id: str, *deltas: SequenceDelta) -> None:
        """What a step made for a request."""
        for each in deltas:
            self.streams.push(request_id, each)

    async def submit(self, request: GenerateRequest) -> AsyncIterator[str]:
        self.streams.add(request)
        yield self.name

    async def stream(self, request_id: str, channel_id: str) -> AsyncIterator[None]:
        await self.streams.forward(request_id, channel_id)
        yield None

    async def read_channel(self, channel_id: str, replica: str) -> AsyncIterator[bytes]:
        if replica != self.name:
            raise NotFoundError("this is another replica")
        async with aclosing(self.streams.read_channel(channel_id)) as steps:
            async for batches in steps:
                for message in encode(batches):
                    yield message

    async def abort(self, request_id: str) -> AsyncIterator[None]:
        if self.streams.end(request_id):
            self.aborted.append(request_id)
        yield None


class ServeCall:
    """One call of a handle: items cross after a while, an error comes as an error, and it can be cancelled."""

    def __init__(self, fleet: Fleet, session: str, method: str, args: tuple[object, ...]) -> None:
        self._fleet, self._session, self.method, self._args = fleet, session, method, args
        self._items: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def __aiter__(self) -> ServeCall:
        return self

    async def __anext__(self) -> Any:
        item, error = await self._items.get()
        if error is not None:
            self._items.put_nowait((None, error))
            raise error
        return item

    def __await__(self) -> Any:
        return self.__anext__().__await__()

    def cancel(self) -> None:
        self._task.cancel()

    def break_off(self, error: Exception) -> None:
        """The connection is gone: the caller sees an error, the replica a cancelled call."""
        self._items.put_nowait((None, error))
        self._task.cancel()

    async def _run(self) -> None:
        replica: EngineReplica | None = None
        try:
            await self._fleet.pause()
            replica = self._fleet.route(self._session)
            replica.calls.add(self)
            if self.method == "read_channel":
                replica.channel_calls.append(self)
            async with aclosing(getattr(replica, self.method)(*self._args)) as items:
                async for item in items:
                    await self._fleet.pause()
                    self._items.put_nowait((item, None))
            await self._fleet.pause()
            self._items.put_nowait((None, StopAsyncIteration()))
        except asyncio.CancelledError:
            self._items.put_nowait((None, asyncio.CancelledError()))
        except Exception as error:
            self._items.put_nowait((None, error))
        finally:
            if replica is not None:
                replica.calls.discard(self)


class Fleet:
    """Replicas and the router in front of them. `handle` is what EngineHandle takes for a Serve handle."""

    def __init__(self, *names: str, seed: int | None = None) -> None:
        self.replicas = {name: EngineReplica(name) for name in names}
        self.sessions: list[tuple[str, str]] = []
        self._placer = Placer()
        self._placer.set_replicas(names)
        self._random = random.Random(seed) if seed is not None else None

    @property
    def handle(self) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, session_id: str, **options: object) -> Any:
        class Methods:
            def __getattr__(_, method: str) -> Any:  # noqa: N805
                return SimpleNamespace(remote=lambda *args: self._call(session_id, method, args))

        return Methods()

    def _call(self, session: str, method: str, args: tuple[object, ...]) -> ServeCall:
        self.sessions.append((method, session))
        return ServeCall(self, session, method, args)

    def route(self, session: str) -> EngineReplica:
        ranked = self._placer.rank(session, lambda name: len(self.replicas[name].calls))
        if not ranked:
            raise ActorUnavailableError("no replica", b"0" * 16)
        self._placer.keep(session, ranked[0])
        return self.replicas[ranked[0]]

    async def pause(self) -> None:
        """How long it takes to get from one process to another."""
        for _ in range(self._random.randrange(6) if self._random else 0):
            await asyncio.sleep(0)

    def where(self, request_id: str) -> EngineReplica:
        """The replica that has the request."""
        return self.route(f"/{request_id}")

    def leave(self, name: str) -> None:
        """The replica gets no new calls; those it has go on."""
        self._placer.set_replicas(self.replicas.keys() - {name})

    def kill(self, name: str) -> None:
        self.leave(name)
        for call in tuple(self.replicas[name].calls):
            call.break_off(ActorUnavailableError("died", b"0" * 16))
