"""The client's side of a connection: work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.body import Receive
from deployments.errors import RequestAbortedError

T = TypeVar("T")


class ClientConnection:
    """Watches one connection from the end of its request body on. Use as an async context manager."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClientConnection:
        self._gone = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._gone is not None
        self._gone.cancel()
        await asyncio.gather(self._gone, return_exceptions=True)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the client leaves first, `work` is cancelled, its clean-up is awaited, and
        RequestAbortedError is raised."""
        assert self._gone is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await _ended(task)
        if not task.cancelled() and task.exception() is None:
            return task.result()
        raise RequestAbortedError("The client closed the connection.")

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _ended(task: asyncio.Future[Any]) -> None:
    """Return once the task has ended. Who is cancelled while waiting is so only then: the task's clean-up uses things
    that the caller is about to close."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
