"""Host arrays to the device without waiting for it."""

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
