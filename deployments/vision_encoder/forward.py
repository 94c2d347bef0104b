"""One forward pass of a path: host buffers, device buffers, results per item. Anything on the device happens from the
thread that calls this.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from deployments.vision_encoder.adapters.base import VisionAdapter, VisionItem
from deployments.vision_encoder.packing import Capacity, Load

_ALIGNMENT = 256
"""Bytes; what kernels and copies like best."""


class InputBuffers:
    """The input buffers of one capacity, on host and device: views of one piece of memory each, so that one copy
    uploads them all.

    Buffer identity invariant: `device` holds the same tensors for the life of this object. A captured graph reads their
    addresses, so they are refilled in place and never replaced. On CPU host and device buffers are the same memory.
    """

    def __init__(self, adapter: VisionAdapter, path: str, capacity: Capacity) -> None:
        self._adapter, self._path = adapter, path
        self.capacity = capacity
        on_cpu = adapter.device.type == "cpu"
        specs = adapter.input_specs(path, capacity)
        sizes = {name: prod(spec.shape) * spec.dtype.itemsize for name, spec in specs.items()}
        num_bytes = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
        # Not cleared: `write_inputs` fills every byte that is read.
        self._staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not on_cpu)
        self._uploads = self._staging if on_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=adapter.device)
        self._host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, spec in specs.items():
            part = slice(start, start + sizes[name])
            self._host[name] = self._staging[part].view(spec.dtype).view(spec.shape).numpy()
            self.device[name] = self._uploads[part].view(spec.dtype).view(spec.shape)
            start += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        self._uploaded = None if on_cpu else torch.cuda.Event()

    @property
    def nbytes(self) -> int:
        return self._uploads.nbytes

    def fill(self, items: Sequence[VisionItem]) -> None:
        """Write the items' inputs, padding included, and start the copy to the device on the current stream."""
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the last copy may still be reading the staging memory
        self._adapter.write_inputs(self._path, items, self._host)
        if self._uploaded is not None:
            self._uploads.copy_(self._staging, non_blocking=True)
            self._uploaded.record()


def load_of(adapter: VisionAdapter, path: str, items: Sequence[VisionItem]) -> Load:
    total = Load()
    for item in items:
        total = total + adapter.describe(item.modality, item.grid).loads[path]
    return total


def exact_capacity(load: Load, items: int) -> Capacity:
    return Capacity(load.slots, load.patches, items, load.segments, load.frames)


@torch.inference_mode()
def run_eager(adapter: VisionAdapter, path: str, items: Sequence[VisionItem]) -> list[torch.Tensor]:
    """Rows of each item on the path, in order, without padding and without a graph."""
    load = load_of(adapter, path, items)
    buffers = InputBuffers(adapter, path, exact_capacity(load, len(items)))
    buffers.fill(items)
    output = adapter.forward(path, buffers.device, load.longest_patches)
    return split_rows(adapter, path, items, output)


def split_rows(
    adapter: VisionAdapter, path: str, items: Sequence[VisionItem], output: torch.Tensor
) -> list[torch.Tensor]:
    """Views of `output`, one per item."""
    slots = [adapter.describe(item.modality, item.grid).loads[path].slots for item in items]
    return list(output[: sum(slots)].split(slots))
