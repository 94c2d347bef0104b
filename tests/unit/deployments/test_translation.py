"""What callers make of Ray's and Serve's exceptions, which cross processes as these classes and in these wrappings."""

from __future__ import annotations

import asyncio
import pickle

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray import exceptions as ray_exceptions
from ray.serve import exceptions as serve_exceptions
from ray.serve._private.common import DeploymentID

from deployments.errors import (
    InternalError,
    MediaError,
    NotReadyError,
    OverloadedError,
    PayloadLostError,
    ReplicaLostError,
    RequestAbortedError,
    SightlineError,
)
from deployments.handles import translated

ACTOR = b"0" * 16


def task_error(cause: BaseException) -> Exception:
    """As a caller gets what a replica raised: of a class that Ray makes of its own and the cause's."""
    error = ray_exceptions.RayTaskError("prepare", "a traceback", cause, proctitle="ServeReplica", pid=1, ip="::1")
    made: Exception = error.as_instanceof_cause()
    return made


def upstream(cause: BaseException) -> serve_exceptions.RayServeException:
    """As Serve's router words the death of an actor that is not the replica itself."""
    error = serve_exceptions.RayServeException("an upstream actor died")
    error.__cause__ = cause
    return error


def rpc(code: grpc.StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details="Stream removed")


DIED = ray_exceptions.ActorDiedError()
UNAVAILABLE = ray_exceptions.ActorUnavailableError("RpcError: recvmsg: Connection reset by peer", ACTOR)


@pytest.mark.parametrize(
    ("raised", "translation"),
    [
        (DIED, ReplicaLostError),
        (UNAVAILABLE, ReplicaLostError),
        (task_error(DIED), ReplicaLostError),
        (task_error(UNAVAILABLE), ReplicaLostError),
        (task_error(task_error(DIED)), ReplicaLostError),
        (task_error(task_error(MediaError("no picture"))), MediaError),
        (upstream(DIED), ReplicaLostError),
        (upstream(ValueError()), InternalError),
        (ray_exceptions.WorkerCrashedError(), ReplicaLostError),
        (ray_exceptions.LocalRayletDiedError(), ReplicaLostError),
        (ray_exceptions.NodeDiedError("gone"), ReplicaLostError),
        (ray_exceptions.OutOfMemoryError("killed"), ReplicaLostError),
        (ray_exceptions.RpcError("End of file"), ReplicaLostError),
        (ray_exceptions.ActorPlacementGroupRemoved(), ReplicaLostError),
        (ray_exceptions.ObjectRefStreamEndOfStreamError(), ReplicaLostError),
        (serve_exceptions.ReplicaUnavailableError("a"), ReplicaLostError),
        (rpc(grpc.StatusCode.UNAVAILABLE), ReplicaLostError),
        (rpc(grpc.StatusCode.CANCELLED), ReplicaLostError),
        (rpc(grpc.StatusCode.INTERNAL), ReplicaLostError),
        (rpc(grpc.StatusCode.UNKNOWN), ReplicaLostError),
        (rpc(grpc.StatusCode.RESOURCE_EXHAUSTED), InternalError),
        (serve_exceptions.BackPressureError(1, 1), OverloadedError),
        (serve_exceptions.DeploymentUnavailableError(DeploymentID("LMEngine")), NotReadyError),
        (serve_exceptions.RequestCancelledError("r"), RequestAbortedError),
        (ray_exceptions.ObjectStoreFullError(), OverloadedError),
        (ray_exceptions.OwnerDiedError("00" * 28, None, ""), PayloadLostError),  # type: ignore[arg-type]
        (ray_exceptions.ObjectFreedError("00" * 28, None, ""), PayloadLostError),  # type: ignore[arg-type]
        (ray_exceptions.GetTimeoutError(), PayloadLostError),
        (task_error(MediaError("no picture")), MediaError),
        (task_error(ValueError("boom")), InternalError),
        (MediaError("no picture"), MediaError),
        (ValueError("boom"), InternalError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_every_foreign_exception_has_one_translation(raised: BaseException, translation: type[SightlineError]) -> None:
    with pytest.raises(SightlineError) as caught, translated("preprocessor.prepare"):
        raise raised
    assert type(caught.value) is translation
    assert type(pickle.loads(pickle.dumps(caught.value))) is translation


async def test_cancellation_passes_through() -> None:
    with pytest.raises(asyncio.CancelledError), translated("preprocessor.prepare"):
        raise asyncio.CancelledError
