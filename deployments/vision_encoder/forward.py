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


class InputArena:
    """Host and device memory of inputs, the same for all passes that use it: one runs after the other, and each writes
    every byte it reads."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        # Not cleared: `write_inputs` fills every byte that is read.
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not on_cpu)
        self.device = self.host if on_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._uploaded = None if on_cpu else torch.cuda.Event()

    @property
    def nbytes(self) -> int:
        return self.device.nbytes

    def wait(self) -> None:
        """Until the host memory may be written: the last upload may still be reading it."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, num_bytes: int) -> None:
        """Start copying the first `num_bytes` to the device on the current stream."""
        if self._uploaded is not None:
            self.device[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
            self._uploaded.record()


class InputBuffers:
    """The input buffers of one capacity, on host and device: views of the front of an arena, so that one copy uploads
    them all.

    Buffer identity invariant: `device` holds the same tensors for the life of this object. A captured graph reads their
    addresses, so they are refilled in place and never replaced. On CPU host and device buffers are the same memory.
    """

    def __init__(self, adapter: VisionAdapter, path: str, capacity: Capacity, arena: InputArena | None = None) -> None:
        self._adapter, self._path = adapter, path
        self.capacity = capacity
        self.nbytes = input_bytes(adapter, path, capacity)
        self._arena = arena or InputArena(self.nbytes, adapter.device)
        self._host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, spec in adapter.input_specs(path, capacity).items():
            size = prod(spec.shape) * spec.dtype.itemsize
            part = slice(start, start + size)
            self._host[name] = self._arena.host[part].view(spec.dtype).view(spec.shape).numpy()
            self.device[name] = self._arena.device[part].view(spec.dtype).view(spec.shape)
            start += _aligned(size)

    def write(self, items: Sequence[VisionItem]) -> None:
        """Write the items' inputs, padding included, to the host memory."""
        self._arena.wait()
        self._adapter.write_inputs(self._path, items, self._host)

    def fill(self, items: Sequence[VisionItem]) -> None:
        """`write`, and start the copy to the device on the current stream."""
        self.write(items)
        self._arena.upload(self.nbytes)


def input_bytes(adapter: VisionAdapter, path: str, capacity: Capacity) -> int:
    """What the input buffers of a capacity take."""
    specs = adapter.input_specs(path, capacity).values()
    return sum(_aligned(prod(spec.shape) * spec.dtype.itemsize) for spec in specs)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def to_host(rows: torch.Tensor) -> torch.Tensor:
    """Start copying rows into host memory of their own; on CUDA pinned, so that the copy needs no help of the host."""
    on_cuda = rows.is_cuda
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=on_cuda)
    return host.copy_(rows, non_blocking=on_cuda)


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
