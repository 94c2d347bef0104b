"""The collectives of one gang of ranks: NCCL between GPUs, gloo between CPUs. Knows no layers and no plans.

The group is an object and not torch's global default group, so that a process may be in several.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Store = Any
"""torch's key-value store, by which ranks find each other."""

COLLECTIVE_TIMEOUT_S = 120.0
"""Longest wait for another rank that is alive and silent; one that dies is noticed at once by its control channel."""

_CLOSE_S = 1.0


class TensorParallelGroup:
    """Rank `rank` of `size`, on `device`. All ranks must call the same methods in the same order.

    Args:
        store: Key-value store of all ranks, by which they find each other.
        minimum: The least of all ranks' values, through the control channel.
        timeout_s: Of each collective.

    Raises:
        RuntimeError: The ranks did not find each other in time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        minimum: Callable[[int], int],
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        self.rank, self.size = rank, size
        self.minimum = minimum
        timeout = timedelta(seconds=timeout_s)
        self._backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, size, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each; in place."""
        dist.all_reduce(tensor, group=self._alive)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values in every rank's `tensor`; in place."""
        dist.broadcast(tensor, group=self._alive, group_src=0)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """On rank 0 every rank's tensor, in order; None elsewhere. All must have one shape."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(tensor, parts, group=self._alive, group_dst=0)
        return parts

    @property
    def _alive(self) -> Any:
        if self._backend is None:
            raise RuntimeError("the ranks have parted")
        return self._backend

    def close(self) -> None:
        """Leave; collectives under way end with anything in their tensors. Idempotent, for any thread."""
        backend, self._backend = self._backend, None
        if backend is not None:
            # NCCL frees a communicator only after the last graph that has recorded it; that is not worth waiting for.
            leaving = threading.Thread(target=_abort, args=(backend,), name="tensor-parallel-abort", daemon=True)
            leaving.start()
            leaving.join(_CLOSE_S)


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):  # gloo of some versions cannot: what waits ends by its time-out
        backend.abort()


def serve_store(host: str) -> Store:
    """A store served by this process, on a port of its own."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def join_store(host: str, port: int) -> Store:
    return dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
