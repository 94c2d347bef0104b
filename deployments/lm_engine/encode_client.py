"""Pulls embeddings from the encoder for the engine. Runs on the event loop; knows no scheduler and no device.

Each batch is one call; its items are then fetched and uploaded side by side, each handed over as soon as it is there:
an item that waits for room must not keep what another one could give back. What is lost on the way (a ref, a replica)
is asked for again, alone, within a bounded number of tries and the request's deadline; what is wrong with one item of a
batch is found by asking for each item alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from cache_service.identity import EmbeddingIdentity
from deployments.errors import InternalError, OverloadedError, PayloadLostError, ReplicaLostError, SightlineError
from deployments.lm_engine.engine import EncodeBatch
from deployments.lm_engine.plan import EncodeStart
from deployments.messages import EncodedItem, EncodeRequest
from deployments.ports import ObjectStore, VisionEncoder

_FIRST_RETRY_S = 0.05
_RETRYABLE = (PayloadLostError, ReplicaLostError, OverloadedError)


class Uploader(Protocol):
    """Brings rows to the engine's device; see embed_upload.EmbedUploader."""

    async def upload(self, rows: np.ndarray | torch.Tensor, dtype: str) -> torch.Tensor:
        """A tensor with memory of its own, so that the object store's can be freed. May wait for room."""


class EncodeListener(Protocol):
    """Told what becomes of the encodes, on the event loop."""

    def on_encoded(self, start: EncodeStart, embeddings: torch.Tensor) -> None:
        """An item's embeddings [num_slots, width] are on the device."""

    def on_encode_failed(self, start: EncodeStart, error: SightlineError) -> None:
        """An item has no embeddings and will not get any."""

    def on_encode_retry(self) -> None:
        """An item is asked for again."""


class EncodeClient:
    """Args:
    width: Columns an embedding must have.
    max_tries: Calls for one item before its error stands.
    timeout_s: After which a call counts as lost, and so does a payload; a wait for room does not count.
    trace_context: A request's, by its id.
    clock: Unix time in seconds.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        store: ObjectStore,
        uploader: Uploader,
        listener: EncodeListener,
        *,
        width: int,
        max_tries: int = 3,
        timeout_s: float = 120.0,
        trace_context: Callable[[str], Mapping[str, str]] = lambda _: {},
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._encoder, self._store, self._uploader, self._listener = encoder, store, uploader, listener
        self._width, self._max_tries, self._timeout_s, self._clock = width, max_tries, timeout_s, clock
        self._trace_context = trace_context
        self._in_flight: dict[EmbeddingIdentity, tuple[int, asyncio.Task[None]]] = {}
        """Ticket and task of each item asked for."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def handle(self, cancelled: tuple[EmbeddingIdentity, ...], batches: tuple[EncodeBatch, ...]) -> None:
        """See engine.Encodes."""
        for identity in cancelled:
            self._cancel(identity)
        for batch in batches:
            self._start(batch, num_tries=0)

    async def close(self) -> None:
        """Cancel everything and wait until it is gone."""
        tasks = tuple(self._tasks)
        self._in_flight.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, batch: EncodeBatch, num_tries: int, delay_s: float = 0.0, *, refresh: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(self._encode(batch, num_tries, delay_s, refresh))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for start in batch.starts:
            self._in_flight[start.identity] = (start.ticket, task)

    def _cancel(self, identity: EmbeddingIdentity) -> None:
        """Forget an item; its call is cancelled once no other item needs it."""
        entry = self._in_flight.pop(identity, None)
        if entry is not None and not any(task is entry[1] for _, task in self._in_flight.values()):
            entry[1].cancel()

    async def _encode(self, batch: EncodeBatch, num_tries: int, delay_s: float, refresh: bool) -> None:
        """One call for a batch, and what follows from its results."""
        await asyncio.sleep(delay_s)
        request = EncodeRequest(
            request_id=batch.request_id,
            items=tuple(start.item for start in batch.starts),
            namespace=batch.namespace,
            deadline_s=batch.deadline_s,
            refresh=refresh,
            trace_context=self._trace_context(batch.request_id),
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                encoded = await self._encoder.encode(request)
            if len(encoded) != len(request.items):
                raise InternalError(f"the encoder answered {len(request.items)} items with {len(encoded)}")
        except Exception as exc:
            fault = self._fault(exc)
            for start in batch.starts:
                if self._is_wanted(start):
                    self._settle(batch, start, fault, num_tries + 1, whole_call=True)
            return
        fetches = [self._take(batch, *pair, num_tries + 1) for pair in zip(batch.starts, encoded, strict=True)]
        del encoded  # each payload is freed when its own fetch has ended
        await asyncio.gather(*fetches)

    async def _take(self, batch: EncodeBatch, start: EncodeStart, answer: EncodedItem, num_tries: int) -> None:
        """Fetch one item's embeddings, upload them and hand them over."""
        result: torch.Tensor | SightlineError
        try:
            async with asyncio.timeout(self._timeout_s):
                rows = await self._store.get(answer.embeddings)
            expected = (start.item.num_slots, self._width)
            if tuple(rows.shape) != expected:
                raise InternalError(f"the encoder sent embeddings of shape {tuple(rows.shape)}; expected {expected}")
            if not self._is_wanted(start):
                return
            result = await self._uploader.upload(rows, answer.dtype)
        except TimeoutError:
            result = PayloadLostError(f"embeddings did not arrive in {self._timeout_s:g} s")
        except Exception as exc:
            result = self._fault(exc)
        if self._is_wanted(start):
            self._settle(batch, start, result, num_tries, whole_call=False)

    def _is_wanted(self, start: EncodeStart) -> bool:
        """Whether it has not been cancelled."""
        return self._in_flight.get(start.identity, (None,))[0] == start.ticket

    def _fault(self, error: Exception) -> SightlineError:
        if isinstance(error, SightlineError):
            return error
        if isinstance(error, TimeoutError):
            return ReplicaLostError(f"the encoder gave no answer in {self._timeout_s:g} s")
        return InternalError(f"the encoder failed: {error!r}")

    def _settle(
        self,
        batch: EncodeBatch,
        start: EncodeStart,
        result: torch.Tensor | SightlineError,
        num_tries: int,
        *,
        whole_call: bool,
    ) -> None:
        """Hand over an item's result, or ask for the item again, alone."""
        if isinstance(result, torch.Tensor):
            del self._in_flight[start.identity]
            self._listener.on_encoded(start, result)
            return
        alone = EncodeBatch(batch.request_id, batch.namespace, batch.deadline_s, (start,))
        delay_s = result.retry_after_s or _FIRST_RETRY_S * 2 ** (num_tries - 1)
        is_transient = isinstance(result, _RETRYABLE)
        if is_transient and num_tries < self._max_tries and self._in_time(batch, delay_s):
            self._listener.on_encode_retry()
            # A ref that can no longer be read would only be handed out again from the encoder's memory.
            self._start(alone, num_tries, delay_s, refresh=isinstance(result, PayloadLostError))
        elif not is_transient and whole_call and len(batch.starts) > 1:
            self._start(alone, num_tries)  # one item may be bad: which one?
        else:
            del self._in_flight[start.identity]
            self._listener.on_encode_failed(start, _final(result))

    def _in_time(self, batch: EncodeBatch, delay_s: float) -> bool:
        return batch.deadline_s is None or self._clock() + delay_s < batch.deadline_s


def _final(error: SightlineError) -> SightlineError:
    """What a request is told. An item that has lost its encoders may be what kills them, so that no other engine shall
    try it on more of them: a lost replica is tried again by whoever hears of it."""
    if not isinstance(error, ReplicaLostError):
        return error
    message = "The server lost the encoders that worked on a picture of this request."
    return OverloadedError(message, code="unavailable", retry_after_s=1.0)
