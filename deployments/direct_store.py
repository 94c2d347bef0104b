"""Embeddings straight from the encoder's memory to the engine's, over Ray's direct transport (alpha in Ray 2.60).

`nixl` reads the other process's memory, on any host and device that NIXL reaches; `cuda_ipc` maps memory of a GPU that
both processes were given. Both are one-sided: the one who puts need not take part in a get. The two-sided transports
(NCCL, Gloo) are of no use to a replica, since a Serve handle cannot ask for them.
"""

from __future__ import annotations

import asyncio
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast

import numpy as np
import ray
import torch
from ray.experimental.rdt.util import get_tensor_transport_manager

from deployments.handles import RayObjectStore, translated
from deployments.messages import Ref
from deployments.ports import EmbeddingTransfer, ObjectStore

NUM_GETS = 8
"""Gets under way at once; each blocks a thread."""


def open_store(transfer: EmbeddingTransfer) -> ObjectStore:
    """Where this replica puts or gets embeddings.

    Raises:
        ValueError: This replica lacks what the transport needs; says what.
    """
    if transfer == "object_store":
        return RayObjectStore()
    problem = _nixl_problem() if transfer == "nixl" else _cuda_ipc_problem()
    if problem:
        raise ValueError(f"embedding_transfer is {transfer!r}, but {problem}; 'object_store' works everywhere")
    return DirectObjectStore(transfer)


class DirectObjectStore(RayObjectStore):
    """ports.ObjectStore for arrays and tensors, which stay where they are until they are got: they must not change.

    A get returns memory of the caller's own: an array for what was put from the host (bfloat16 viewed as uint16), a
    tensor on this process's device for what was put from one. An owner that has died is a PayloadLostError, as with
    Ray's store.

    Args:
        get_timeout_s: After which a payload counts as lost.
    """

    def __init__(
        self, transport: Literal["nixl", "cuda_ipc"], *, handover_s: float = 3.0, get_timeout_s: float = 30.0
    ) -> None:
        super().__init__(handover_s=handover_s, get_timeout_s=get_timeout_s)
        self._transport, self._timeout_s = transport, get_timeout_s
        self._threads = ThreadPoolExecutor(NUM_GETS, thread_name_prefix="embedding-get")

    def _store(self, value: Any) -> ray.ObjectRef:
        tensor = as_tensor(value)
        if self._transport == "cuda_ipc" and not tensor.is_cuda:
            tensor = tensor.cuda()  # a shared cache's entries come to the host
        return ray.put(tensor.contiguous(), _tensor_transport=self._transport)

    async def get(self, ref: Ref) -> Any:
        # A thread's, since awaiting such a ref does not work in an async actor's event loop.
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._get, ref)

    def _get(self, ref: Ref) -> Any:
        with translated(f"{self._transport} get"):
            tensor = cast("torch.Tensor", ray.get(ref, timeout=self._timeout_s))
            if not tensor.is_cuda:
                return as_array(tensor)
            if self._transport == "cuda_ipc":
                # The encoder's own memory, which it may use again once the last ref is gone.
                tensor = tensor.clone()
            torch.cuda.current_stream(tensor.device).synchronize()
            return tensor


def as_tensor(value: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The same values; an array of uint16 holds bfloat16. Copies only what is read-only, since torch can't say so."""
    if isinstance(value, torch.Tensor):
        return value
    tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The same values and memory, bfloat16 viewed as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _nixl_problem() -> str | None:
    """What keeps this process from using NIXL; making its agent here keeps the first request from waiting for it."""
    if importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed where this replica runs (pip install nixl)"
    try:
        get_tensor_transport_manager("NIXL").get_nixl_agent()  # type: ignore[attr-defined]
    except Exception as exc:
        return f"NIXL does not start here: {type(exc).__name__}: {exc}"
    return None


def _cuda_ipc_problem() -> str | None:
    if not torch.cuda.is_available():
        return "this replica sees no CUDA device"
    if not ray.get_gpu_ids():
        return "Ray gave this replica no GPU: set num_gpus in its ray_actor_options, below 1 to share one"
    return None
