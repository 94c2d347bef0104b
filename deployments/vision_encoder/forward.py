"""One forward pass of a path: host buffers, device buffers, results per item. Anything on the device happens from the
thread that calls this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deployments.vision_encoder.adapters.base import VisionAdapter, VisionItem
from deployments.vision_encoder.packing import Capacity, Load


class InputBuffers:
    """The input buffers of one capacity, on host and device.

    Buffer identity invariant: `device` holds the same tensors for the life of this object. A captured graph reads their
    addresses, so they are refilled in place and never replaced. On CPU host and device buffers are the same memory.
    """

    def __init__(self, adapter: VisionAdapter, path: str, capacity: Capacity) -> None:
        self._adapter, self._path = adapter, path
        self.capacity = capacity
        on_cpu = adapter.device.type == "cpu"
        self._staging: dict[str, torch.Tensor] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, spec in adapter.input_specs(path, capacity).items():
            staging = torch.zeros(spec.shape, dtype=spec.dtype, pin_memory=not on_cpu)
            self._staging[name] = staging
            self.device[name] = staging if on_cpu else torch.zeros_like(staging, device=adapter.device)
        self._host: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in self._staging.items()}
        self._uploaded = None if on_cpu else torch.cuda.Event()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.device.values())

    def fill(self, items: Sequence[VisionItem]) -> None:
        """Write the items' inputs, padding included, and start the copy to the device on the current stream."""
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the last copy may still be reading the staging memory
        self._adapter.write_inputs(self._path, items, self._host)
        if self._uploaded is not None:
            for name, staging in self._staging.items():
                self.device[name].copy_(staging, non_blocking=True)
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
