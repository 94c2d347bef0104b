"""Many requests' way out of the engine to one reader: what a step made for all of them is read at once."""

from __future__ import annotations

import asyncio

from deployments.errors import ReplicaLostError
from deployments.lm_engine.request_stream import RequestStream
from deployments.messages import DeltaBatch


class OutputChannel:
    """Used by the event loop only. A reader that is slow finds several steps folded together, as in RequestStream."""

    def __init__(self) -> None:
        self._carried: dict[str, asyncio.Future[None]] = {}
        """Requests, and what tells that the reader has taken their last delta."""
        self._ready: dict[str, RequestStream] = {}
        """Those with something to read, the one that has waited longest first."""
        self._arrived = asyncio.Event()
        self.is_open = False
        """A reader has taken the channel; there can be only one."""

    @property
    def is_unused(self) -> bool:
        return not (self.is_open or self._carried)

    async def carry(self, request_id: str, stream: RequestStream) -> None:
        """Let the reader have a request's deltas; returns once it has taken the last one.

        Raises:
            ReplicaLostError: The reader went away, or never came.
        """
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carried[request_id] = taken
        stream.on_arrival = lambda: self._note(request_id, stream)
        if stream.has_pending:
            self._note(request_id, stream)
        try:
            await taken
        finally:
            stream.on_arrival = None
            self._ready.pop(request_id, None)
            del self._carried[request_id]

    async def read(self) -> list[tuple[str, DeltaBatch]]:
        """What each request gained since the last call; waits until one has gained something."""
        while not self._ready:
            self._arrived.clear()
            await self._arrived.wait()
        ready, self._ready = self._ready, {}
        batches: list[tuple[str, DeltaBatch]] = []
        for request_id, stream in ready.items():
            batches.append((request_id, stream.take()))
            if stream.is_drained and not self._carried[request_id].done():
                self._carried[request_id].set_result(None)
        return batches

    def cut(self) -> None:
        """Nobody will read: what is carried comes to an end."""
        for taken in self._carried.values():
            if not taken.done():
                taken.set_exception(ReplicaLostError("nobody reads the channel of this request"))

    def cut_unopened(self) -> None:
        """`cut`, if nobody has taken the channel."""
        if not self.is_open:
            self.cut()

    def _note(self, request_id: str, stream: RequestStream) -> None:
        self._ready[request_id] = stream
        self._arrived.set()
