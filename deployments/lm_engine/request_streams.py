"""Every request's way out of the engine: one reader each in this process, or one reader for many over a channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from deployments.errors import InvalidRequestError, NotFoundError, SightlineError
from deployments.lm_engine.output_channel import OutputChannel
from deployments.lm_engine.request_stream import RequestStream
from deployments.messages import DeltaBatch, GenerateRequest, GenerationStats, SequenceDelta


class RequestStreams:
    """Used by one event loop only.

    Args:
        abort: Told the id of a request that still runs and that nobody will read.
        open_timeout_s: A stream or channel that nobody opens for so long is given up.
    """

    def __init__(self, abort: Callable[[str], None], *, open_timeout_s: float) -> None:
        self._abort, self._open_timeout_s = abort, open_timeout_s
        self._streams: dict[str, RequestStream] = {}
        self._channels: dict[str, OutputChannel] = {}

    def __len__(self) -> int:
        """Requests not yet read to their end."""
        return len(self._streams)

    @property
    def num_channels(self) -> int:
        return len(self._channels)

    # -- requests come and go ------------------------------------------------------------------------------------------
    def add(self, request: GenerateRequest) -> RequestStream:
        if request.request_id in self._streams:
            raise InvalidRequestError("a request with this id is running already", param="request_id")
        stream = self._streams[request.request_id] = RequestStream(request.sampling.n, request.trace_context)
        return stream

    def remove(self, request_id: str, stream: RequestStream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]

    def await_reader(self, request_id: str, stream: RequestStream) -> None:
        """The request is admitted, so somebody must open its stream soon."""
        asyncio.get_running_loop().call_later(self._open_timeout_s, self._drop_unopened, request_id, stream)

    def push(self, request_id: str, delta: SequenceDelta) -> None:
        """Deltas of requests that are not known any more are dropped."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.push(delta)

    def end(self, request_id: str) -> bool:
        """End a request as aborted, which its reader, if any, will see; False if it is not known."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        stream.end(SequenceDelta(finish_reason="abort"))
        if not stream.is_open:
            del self._streams[request_id]
        return True

    def end_all(self, error: SightlineError) -> None:
        for stream in tuple(self._streams.values()):
            stream.end(SequenceDelta(finish_reason="error", error=error))

    def trace_context(self, request_id: str) -> Mapping[str, str]:
        stream = self._streams.get(request_id)
        return {} if stream is None else stream.trace_context

    # -- readers -------------------------------------------------------------------------------------------------------
    async def read(self, request_id: str) -> AsyncGenerator[DeltaBatch, None]:
        """Deltas of one request until all its choices have ended; closing the iterator aborts the rest."""
        stream = self._open(request_id)
        try:
            while not stream.is_drained:
                yield await stream.read()
        finally:
            self._drop(request_id, stream)

    async def forward(self, request_id: str, channel_id: str) -> tuple[GenerationStats, ...]:
        """Send a request's deltas over a channel, which may be opened later; cancelling aborts the rest.

        Returns:
            Stats of its choices, once the channel's reader has taken the last delta.

        Raises:
            ReplicaLostError: The channel's reader went away, or nobody opened it.
        """
        stream = self._open(request_id)
        channel = self._channels.setdefault(channel_id, OutputChannel())
        if not channel.is_open:
            asyncio.get_running_loop().call_later(self._open_timeout_s, channel.cut_unopened)
        try:
            await channel.carry(request_id, stream)
        finally:
            self._drop(request_id, stream)
            self._drop_channel(channel_id, channel)
        return tuple(stream.stats)

    async def read_channel(self, channel_id: str) -> AsyncGenerator[list[tuple[str, DeltaBatch]], None]:
        """What the requests of a channel gain, step by step, without an end. Closing the iterator aborts them all."""
        channel = self._channels.setdefault(channel_id, OutputChannel())
        if channel.is_open:
            raise NotFoundError("the channel with this id is being read already")
        channel.is_open = True
        try:
            while True:
                yield await channel.read()
        finally:
            channel.is_open = False
            channel.cut()
            self._drop_channel(channel_id, channel)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _open(self, request_id: str) -> RequestStream:
        stream = self._streams.get(request_id)
        if stream is None or stream.is_open:
            raise NotFoundError("there is no request with this id, or its stream is being read already")
        stream.is_open = True
        return stream

    def _drop(self, request_id: str, stream: RequestStream) -> None:
        """The reader is done: forget the stream, and abort what still runs."""
        self.remove(request_id, stream)
        if not stream.is_finished:
            self._abort(request_id)

    def _drop_unopened(self, request_id: str, stream: RequestStream) -> None:
        if not stream.is_open:
            self._drop(request_id, stream)

    def _drop_channel(self, channel_id: str, channel: OutputChannel) -> None:
        if channel.is_unused and self._channels.get(channel_id) is channel:
            del self._channels[channel_id]
