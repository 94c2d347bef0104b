"""The ports over Ray Serve handles, and the object store over Ray's. The one place that translates Ray's exceptions.

Transport is a choice per handle. Calls that carry refs take Ray's default transport: a ref serialised into a gRPC
handle's arguments is pinned for ever. Token streams carry no refs and go over gRPC (`_by_reference=False`), which moves
several times as many items per second. Both must reach the replica that holds the request, so submit, stream and abort
of one request name it in their session id, and the router (request_router.py) sends them where the first one went. What
is generated comes over one more stream per replica, which all requests share (delta_channel.py).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import ray
from ray import exceptions as ray_exceptions
from ray.serve import exceptions as serve_exceptions
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.delta_channel import DeltaChannels, Inbox
from deployments.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    PayloadLostError,
    ReplicaLostError,
    RequestAbortedError,
    SightlineError,
)
from deployments.hedging import Answer, Hedger, HedgingConfig, Outcome
from deployments.messages import (
    DeltaBatch,
    EncodedItem,
    EncodeRequest,
    GenerateRequest,
    MediaItem,
    PreparedPrompt,
    PrepareRequest,
    Ref,
)
from deployments.routing import item_key, other_session, prompt_key, replica_session, session_id

RETRY_AFTER_S = 1.0

_LOST = (
    serve_exceptions.ReplicaUnavailableError,
    ray_exceptions.RayActorError,
    ray_exceptions.ActorPlacementGroupRemoved,
    ray_exceptions.LocalRayletDiedError,
    ray_exceptions.NodeDiedError,
    ray_exceptions.ObjectRefStreamEndOfStreamError,
    ray_exceptions.OutOfMemoryError,
    ray_exceptions.RpcError,
    ray_exceptions.WorkerCrashedError,
)
"""Ray's and Serve's ways of saying that a replica, or what it runs on, has gone. OutOfMemoryError is Ray's killing of a
process when its node runs short of memory; ObjectRefStreamEndOfStreamError an answer that ended before its value."""
_LOST_CODES = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Ray's and Serve's exceptions as SightlineErrors; `what` names the call in messages for the log.

    A SightlineError raised in the replica comes back as itself. Cancellation passes through untouched. Whatever means
    that a process or its machine has gone is one error, ReplicaLostError, however Ray came to know of it.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise
    except ray_exceptions.RayTaskError as exc:
        # Before SightlineError: Ray makes a class that is both, and that no other process can read.
        cause = exc.cause
        while isinstance(cause, ray_exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, SightlineError):
            raise cause from None
        if isinstance(cause, Exception):
            with translated(what):
                raise cause from exc
        raise InternalError(f"{what}: {exc}") from exc
    except SightlineError:
        raise
    except serve_exceptions.BackPressureError as exc:
        raise OverloadedError(f"{what}: the queue is full", code="queue_full", retry_after_s=RETRY_AFTER_S) from exc
    except serve_exceptions.RequestCancelledError as exc:
        raise RequestAbortedError(f"{what}: cancelled") from exc
    except serve_exceptions.DeploymentUnavailableError as exc:
        raise NotReadyError(f"{what}: no replica can serve", retry_after_s=RETRY_AFTER_S) from exc
    except _LOST as exc:
        raise ReplicaLostError(f"{what}: the replica is gone") from exc
    except serve_exceptions.RayServeException as exc:
        # Serve wraps the death of an actor that a call depends on.
        if isinstance(exc.__cause__, _LOST):
            raise ReplicaLostError(f"{what}: the replica is gone") from exc
        raise InternalError(f"{what}: {type(exc).__name__}: {exc}") from exc
    except grpc.RpcError as exc:
        # Errors of the replica's own come as messages, so that a status tells of the connection or of its server.
        code = exc.code() if isinstance(exc, grpc.aio.AioRpcError) else None
        if code in _LOST_CODES:
            raise ReplicaLostError(f"{what}: the connection to the replica broke: {code}") from exc
        raise InternalError(f"{what}: {code}: {exc}") from exc
    except ray_exceptions.ObjectStoreFullError as exc:
        raise OverloadedError(f"{what}: the object store is full", retry_after_s=RETRY_AFTER_S) from exc
    except (ray_exceptions.ObjectLostError, ray_exceptions.GetTimeoutError) as exc:
        raise PayloadLostError(f"{what}: a payload can no longer be read") from exc
    except Exception as exc:
        raise InternalError(f"{what}: {type(exc).__name__}: {exc}") from exc


class RayObjectStore:
    """ports.ObjectStore over Ray's shared-memory store: a get of a NumPy array is a read-only view, not a copy.

    Args:
        handover_s: How long an object outlives its `put` whether or not anyone holds a ref. Ray frees an object as soon
            as its owner has dropped the ref and no borrower has registered, and a ref nested in a replica's answer can
            lose that race: of 600 answers at a concurrency of 40, between 1 and 9 referred to an object that was gone.
        get_timeout_s: After which an object counts as lost. Ray reports a freed object to a borrower, but lets its
            owner wait for ever.
    """

    def __init__(self, *, handover_s: float = 3.0, get_timeout_s: float = 30.0) -> None:
        self._get_timeout_s = get_timeout_s
        self._handover = _Handover(handover_s)

    def put(self, value: Any) -> Ref:
        with translated("object store put"):
            ref = self._store(value)
        self._handover.hold(ref)
        return ref

    def _store(self, value: Any) -> ray.ObjectRef:
        return ray.put(value)

    async def get(self, ref: Ref) -> Any:
        with translated("object store get"):
            try:
                async with asyncio.timeout(self._get_timeout_s):
                    return await ref
            except TimeoutError:
                raise PayloadLostError(f"object store get: no answer in {self._get_timeout_s:g} s") from None


class _Handover:
    """Holds things for a while; may be used from any thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held: deque[tuple[float, object]] = deque()
        self._lock = threading.Lock()
        self._has_timer = False

    def hold(self, thing: object) -> None:
        with self._lock:
            self._held.append((time.monotonic() + self._seconds, thing))
            self._wake_up_later()

    def _release(self) -> None:
        released: list[object] = []  # dropped after the lock: what a ref's end sets off is not known here
        with self._lock:
            self._has_timer = False
            while self._held and self._held[0][0] <= time.monotonic():
                released.append(self._held.popleft())
            self._wake_up_later()

    def _wake_up_later(self) -> None:
        if self._held and not self._has_timer:
            # Not at each thing's own time: a busy store would start a thread for each.
            delay_s = max(self._seconds / 4, self._held[0][0] - time.monotonic())
            timer = threading.Timer(delay_s, self._release)
            timer.daemon = True
            timer.start()
            self._has_timer = True


class LocalObjectStore(RayObjectStore):
    """For two stages in one process: what is put stays here as it is; refs from other processes still resolve."""

    def put(self, value: Any) -> Ref:
        return _LocalRef(value)

    async def get(self, ref: Ref) -> Any:
        return ref.value if isinstance(ref, _LocalRef) else await super().get(ref)


@dataclass(frozen=True, slots=True, eq=False)
class _LocalRef:
    value: Any


class PreprocessorHandle:
    """ports.Preprocessor over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        with translated("preprocessor.prepare"):
            return await self._handle.prepare.remote(request)

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> Ref:
        with translated("preprocessor.make_patches"):
            # Nested in a list: a bare ref returned by a replica would be resolved into the array on the way.
            (ref,) = await self._handle.make_patches.remote(item, deadline_s)
            return ref


class EncoderHandle:
    """ports.VisionEncoder over a Serve handle: each item goes to the replica that its identity names.

    The pictures of one request are so spread over replicas, and each replica has its own pictures in memory. What a
    replica does not answer for long is asked of the next one on the ring as well; see hedging.py.
    """

    def __init__(self, handle: DeploymentHandle, hedging: HedgingConfig | None = None) -> None:
        self._handle = handle
        self._hedger = Hedger(hedging or HedgingConfig(enabled=False), is_final=_is_final)
        self._attempts = itertools.count()

    @property
    def hedges(self) -> Mapping[Outcome, int]:
        """Second calls so far, by what became of them."""
        return self._hedger.outcomes

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        calls = (self._encode(replace(request, items=(item,))) for item in request.items)
        # All come to an end before an error is raised: what was computed is cached for whoever asks again.
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(item for result in results if isinstance(result, tuple) for item in result)

    async def _encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        """One item."""
        (item,) = request.items
        # Each attempt has an id of its own, so that the router can tell which replica to avoid. A later attempt, after
        # a loss, is free to go wherever the item belongs.
        key, attempt = item_key(item), f"{request.request_id}.{next(self._attempts)}"
        return await self._hedger.run(
            item.num_patches,
            lambda: self._call(request, session_id(key, attempt)),
            lambda: self._call(request, other_session(key, attempt)),
        )

    async def _call(self, request: EncodeRequest, session: str) -> Answer[tuple[EncodedItem, ...]]:
        with translated("vision_encoder.encode"):
            response = self._handle.options(session_id=session).encode.remote(request)
            try:
                encoded = await response
            except asyncio.CancelledError:
                response.cancel()  # by itself only what awaits it would end, not the call
                raise
        return Answer(encoded, is_typical=all(item.origin != "memory" for item in encoded))


def _is_final(error: BaseException) -> bool:
    """Whether an item has no embeddings, whichever replica is asked."""
    return isinstance(error, InvalidRequestError | DeadlineError)


class EngineHandle:
    """ports.LMEngine over a Serve handle whose router keeps a request on one replica.

    `submit` tells which replica took the request. `stream` is a call that lasts as long as the request and carries
    nothing: by it Serve counts the request, lets it finish when the replica leaves, and cancels it. Its deltas come
    over the channel to that replica.

    Args:
        linger_s: How long a channel stays open without requests.
    """

    def __init__(self, handle: DeploymentHandle, *, linger_s: float = 1.0) -> None:
        self._handle = handle
        self._channels = DeltaChannels(self._open_channel, linger_s=linger_s)
        self._submitted: dict[str, tuple[str, int]] = {}
        """Replica and number of choices of requests whose stream is not open yet."""
        self._calls: set[asyncio.Task[None]] = set()

    async def submit(self, request: GenerateRequest) -> None:
        with translated("lm_engine.submit"):
            session = session_id(prompt_key(request), request.request_id)
            replica = await self._handle.options(session_id=session).submit.remote(request)
        self._submitted[request.request_id] = replica, request.sampling.n

    async def stream(self, request_id: str) -> AsyncIterator[DeltaBatch]:
        if request_id not in self._submitted:
            raise NotFoundError("there is no request with this id, or its stream is being read already")
        replica, num_choices = self._submitted.pop(request_id)
        inbox = self._channels.join(replica, request_id, num_choices)
        call: DeploymentResponseGenerator[None] | None = None
        try:
            handle = self._handle.options(session_id=session_id("", request_id), stream=True, _by_reference=False)
            with translated("lm_engine.stream"):
                call = cast("DeploymentResponseGenerator[None]", handle.stream.remote(request_id, inbox.channel_id))
            self._follow(call, inbox)
            async for batch in inbox.read():
                yield batch
        finally:
            inbox.leave()
            if call is not None and not inbox.is_complete:
                call.cancel()

    async def abort(self, request_id: str) -> None:
        self._submitted.pop(request_id, None)
        with translated("lm_engine.abort"):
            handle = self._handle.options(session_id=session_id("", request_id), _by_reference=False)
            await handle.abort.remote(request_id)

    @property
    def num_channels(self) -> int:
        """Open ones."""
        return self._channels.num_channels

    async def close(self) -> None:
        """Close all channels; streams that are being read end as lost."""
        await self._channels.close()

    def _follow(self, call: DeploymentResponseGenerator[None], inbox: Inbox) -> None:
        task = asyncio.get_running_loop().create_task(_end_with(call, inbox))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _open_channel(self, replica: str, channel_id: str) -> AsyncGenerator[bytes, None]:
        handle = self._handle.options(session_id=replica_session(replica), stream=True, _by_reference=False)
        messages = cast("DeploymentResponseGenerator[bytes]", handle.read_channel.remote(channel_id, replica))
        try:
            with translated("lm_engine.read_channel"):
                async for message in messages:
                    yield message
        finally:
            messages.cancel()


async def _end_with(call: DeploymentResponseGenerator[None], inbox: Inbox) -> None:
    """A request whose call ends badly ends with it. One whose call ends well ends with its last delta, which may still
    be on its way."""
    try:
        with translated("lm_engine.stream"):
            async for _ in call:
                pass
    except NotFoundError:
        # Replicas came or went since `submit`, so the session is another one's now; the engine that was given the
        # request ends it, since nobody reads it.
        inbox.fail(ReplicaLostError("lm_engine.stream: the session has moved to another replica"))
    except SightlineError as error:
        inbox.fail(error)
    except asyncio.CancelledError:
        inbox.fail(RequestAbortedError("lm_engine.stream: cancelled"))
