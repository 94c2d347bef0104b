"""The reading end of token streams: one stream per engine replica brings the deltas of all requests that are there.

    replica A ── channel: [(request, deltas), …] per step ──▶ inbox of each request ──▶ its reader
    replica B ── channel ──▶ …

A channel is opened by the first request on a replica, together with the request's own call, and closed a while after
its last one. Each opening has a new id, so what is late from an old one reaches nobody. Pure asyncio.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from deployments.delta_codec import decode
from deployments.errors import ReplicaLostError, SightlineError
from deployments.messages import DeltaBatch

logger = logging.getLogger(__name__)

OpenChannel = Callable[[str, str], AsyncGenerator[bytes, None]]
"""(replica, channel id) -> what it sends, encoded by delta_codec. Closing the iterator closes the channel."""


class DeltaChannels:
    """One per caller. Used by one event loop only.

    Args:
        open_channel: Opens a channel.
        linger_s: How long a channel without requests stays open. It must be short: a replica that leaves waits for it.
    """

    def __init__(self, open_channel: OpenChannel, *, linger_s: float) -> None:
        self._open_channel, self._linger_s = open_channel, linger_s
        self._channels: dict[str, _Channel] = {}

    @property
    def num_channels(self) -> int:
        return len(self._channels)

    def join(self, replica: str, request_id: str, num_choices: int) -> Inbox:
        """Where the request's deltas will arrive, once the replica sends them over `Inbox.channel_id`. `leave` it."""
        channel = self._channels.get(replica)
        if channel is None:
            channel = self._channels[replica] = _Channel(self, replica)
        return channel.join(request_id, num_choices)

    async def close(self) -> None:
        """Close all channels; whoever reads from one gets ReplicaLostError."""
        await asyncio.gather(*(channel.close() for channel in tuple(self._channels.values())))


class Inbox:
    """Deltas of one request, in the order in which they were made."""

    def __init__(self, channel: _Channel, request_id: str, num_choices: int) -> None:
        self._channel, self._request_id = channel, request_id
        self._unfinished = set(range(num_choices))
        self._batches: deque[DeltaBatch] = deque()
        self._error: SightlineError | None = None
        self._arrived = asyncio.Event()

    @property
    def channel_id(self) -> str:
        return self._channel.id

    @property
    def is_complete(self) -> bool:
        """The last delta of every choice is here, whether or not it has been read."""
        return not self._unfinished

    def put(self, batch: DeltaBatch) -> None:
        self._batches.append(batch)
        self._unfinished.difference_update(delta.index for delta in batch if delta.finish_reason is not None)
        self._arrived.set()

    def fail(self, error: SightlineError) -> None:
        """Nothing more will come. Means nothing to a request that is complete; the first error stands."""
        if self._error is None:
            self._error = error
            self._arrived.set()

    async def read(self) -> AsyncIterator[DeltaBatch]:
        """Batches until every choice has ended. Raises what the inbox failed with, after all that came before."""
        while True:
            while self._batches:
                yield self._batches.popleft()
            if self.is_complete:
                return
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    def leave(self) -> None:
        """Nobody reads any more. Idempotent."""
        self._channel.leave(self._request_id, self)


class _Channel:
    """Open from its making until `linger_s` after its last request, or until it breaks."""

    def __init__(self, owner: DeltaChannels, replica: str) -> None:
        self.id = uuid.uuid4().hex
        self._owner, self._replica = owner, replica
        self._inboxes: dict[str, Inbox] = {}
        self._closing: asyncio.TimerHandle | None = None
        # A context of its own: Serve cancels what was begun in a request's context when that request is cancelled.
        self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    def join(self, request_id: str, num_choices: int) -> Inbox:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        inbox = self._inboxes[request_id] = Inbox(self, request_id, num_choices)
        return inbox

    def leave(self, request_id: str, inbox: Inbox) -> None:
        if self._inboxes.get(request_id) is not inbox:
            return
        del self._inboxes[request_id]
        if not self._inboxes and not self._task.done():
            self._closing = asyncio.get_running_loop().call_later(self._owner._linger_s, self._end)

    async def close(self) -> None:
        self._end()
        await asyncio.wait((self._task,))

    def _end(self) -> None:
        self._forget()
        self._task.cancel()

    def _forget(self) -> None:
        """The next request opens another channel."""
        if self._owner._channels.get(self._replica) is self:
            del self._owner._channels[self._replica]

    async def _run(self) -> None:
        reason = "it was closed"
        try:
            async with aclosing(self._owner._open_channel(self._replica, self.id)) as messages:
                async for message in messages:
                    for request_id, batch in decode(message):
                        inbox = self._inboxes.get(request_id)
                        if inbox is not None:
                            inbox.put(batch)
            reason = "it has ended"
        except Exception as error:
            reason = str(error)
            logger.warning("the channel to the engine replica %s broke: %s", self._replica, error)
        finally:
            self._forget()
            for inbox in self._inboxes.values():
                inbox.fail(ReplicaLostError(f"the channel to the engine's replica broke: {reason}"))
