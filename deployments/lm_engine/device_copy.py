"""Host arrays to the device and back, without waiting for what is queued there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 4
"""int32 values per 16 bytes: kernels are compiled for pointers of this alignment, and anew for any other."""


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device. From pinned memory, since a pageable copy waits for all that is queued before it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The pinned block returns to torch's cache only after the copy: no event of our own is needed.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays in one transfer; views of one device tensor, each starting at a multiple of 16 bytes."""
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.size // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(total, np.int32)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    moved = to_device(packed, device)
    return [moved[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]


class HostCopy:
    """A device tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived: torch.cuda.Event | None = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host, self._arrived = tensor, None

    def wait(self) -> torch.Tensor:
        """The tensor on the host; returns once all that was queued before the copy has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


class HostStaging:
    """A ring of pinned int32 buffers: one is filled while the transfers of others may still be under way.

    Args:
        size: Values in a buffer.
        depth: Transfers that may be under way at once; one more waits for the oldest.
    """

    def __init__(self, size: int, device: torch.device, depth: int = 3) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)]
        self._sent: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def take(self) -> np.ndarray:
        """The next buffer [size], with whatever it held before."""
        sent = self._sent[self._next]
        if sent is not None:
            sent.synchronize()
        return self._buffers[self._next].numpy()

    def send(self, target: torch.Tensor) -> None:
        """Copy the head of the buffer last taken into `target`, a contiguous int32 tensor on the device."""
        target.copy_(self._buffers[self._next][: target.numel()].view(target.shape), non_blocking=True)
        if target.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._sent[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)
