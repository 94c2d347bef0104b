"""A generation as an ASGI response: waits for the first deltas, then answers whole or as server-sent events.

Until the first deltas nothing is sent, so that whatever is wrong with a request has its own status, streamed or not.
A client that leaves, or that does not read, ends the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from app.connection import ClientConnection
from app.errors import as_sightline_error
from app.observer import RequestTrace
from app.openai_stream import KEEP_ALIVE, AnswerWriter, error_events
from deployments.errors import RequestAbortedError
from deployments.messages import DeltaBatch

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse:
    """Answers one request.

    Args:
        generation: Batches with choice indices as they stand in the answer; closed in every case.
        on_error: Told about errors that a stream cannot answer with a status.
        on_end: Called once, at the very end.
    """

    def __init__(
        self,
        generation: AsyncGenerator[DeltaBatch, None],
        writer: AnswerWriter,
        trace: RequestTrace,
        *,
        stream: bool,
        keep_alive_s: float,
        write_timeout_s: float,
        on_error: Callable[[BaseException], None],
        on_end: Callable[[], None],
    ) -> None:
        self._generation, self._writer, self._trace, self._stream = generation, writer, trace, stream
        self._keep_alive_s, self._write_timeout_s = keep_alive_s, write_timeout_s
        self._on_error, self._on_end = on_error, on_end
        self._last_write_s = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        try:
            async with ClientConnection(receive) as client, aclosing(self._generation):
                await client.run(self._answer_stream(send) if self._stream else self._answer_whole(send))
        finally:
            self._on_end()

    async def _answer_whole(self, send: Send) -> None:
        async for batch in self._generation:
            self._writer.keep(batch)
        body = self._writer.body(self._trace.usage, self._extension())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._start(send, headers)
        await self._write(send, body, more=False)

    async def _answer_stream(self, send: Send) -> None:
        first = await anext(self._generation)
        await self._start(send, _STREAM_HEADERS)
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._write(send, self._writer.events(first))
            async for batch in self._generation:
                events = self._writer.events(batch)
                if events:
                    await self._write(send, events)
            last = self._writer.last_events(self._trace.usage, self._extension())
        except RequestAbortedError:
            raise
        except Exception as error:
            self._on_error(error)
            last = error_events(as_sightline_error(error))
        finally:
            keep_alive.cancel()
        await self._write(send, last, more=False)

    def _extension(self) -> dict[str, object] | None:
        return self._trace.timings() if self._trace.wants_timings else None

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError):
            raise RequestAbortedError("The client does not read its answer.") from None
        self._last_write_s = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        if not self._keep_alive_s:
            return
        loop = asyncio.get_running_loop()
        while True:
            silent_s = loop.time() - self._last_write_s
            await asyncio.sleep(max(self._keep_alive_s - silent_s, 0.01))
            if loop.time() - self._last_write_s >= self._keep_alive_s:
                with contextlib.suppress(RequestAbortedError):  # The next write of the answer will say so.
                    await self._write(send, KEEP_ALIVE)


async def merge(
    generations: list[AsyncGenerator[DeltaBatch, None]], renumber: Callable[[int, DeltaBatch], DeltaBatch]
) -> AsyncGenerator[DeltaBatch, None]:
    """Several generations as one; nothing is handed out before each has its first batch. One's error ends all."""
    pending: dict[asyncio.Task[DeltaBatch | None], int] = {}
    try:
        for i, generation in enumerate(generations):
            pending[_next(generation)] = i
        tasks = list(pending)
        for done in asyncio.as_completed(tasks):
            await done
        while pending:
            done_tasks, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done_tasks:
                i, batch = pending.pop(task), task.result()
                if batch is not None:
                    pending[_next(generations[i])] = i
                    yield renumber(i, batch)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for generation in generations:
            await generation.aclose()


def _next(generation: AsyncGenerator[DeltaBatch, None]) -> asyncio.Task[DeltaBatch | None]:
    async def step() -> DeltaBatch | None:
        return await anext(generation, None)

    return asyncio.create_task(step())
