"""What the encoder core needs to know of a model, and nothing more.

An adapter owns the weights and the arithmetic of one vision model; the core, the graph manager and the packer know no
model names. A model has one or more *paths*, each with its own inputs, budgets and graphs: pictures and videos, or a
global and a local tower. An item brings a load to one or several paths; paths it brings nothing to are skipped.

One forward pass of a path:

    input_specs(path, capacity)  ->  buffers of that capacity, host side and device side
    write_inputs(path, items, host buffers)                     (host, NumPy)
    forward(path, device buffers, longest)  ->  [capacity.slots, path width]    (device; no host read)
    assemble(item, {path: its rows})  ->  [num_slots, width]    (device; once all paths of the item have run)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from deployments.vision_encoder.packing import Capacity, Load

if TYPE_CHECKING:
    import torch

Modality = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class VisionItem:
    """One picture or video, ready for the tower."""

    modality: Modality
    grid: tuple[int, int, int]
    """Patches along time, height and width, before spatial merging."""
    patches: np.ndarray
    """uint8 [num_patches, row bytes], as `ItemSpec.patches_shape` says."""


@dataclass(frozen=True, slots=True)
class ItemSpec:
    num_slots: int
    patches_shape: tuple[int, int]
    loads: Mapping[str, Load]
    """Load by path; only paths it has work for."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PathSpec:
    name: str
    min_slots: int
    """Smallest budget worth capturing."""
    slot_step: int = 1
    """Budgets are rounded up to a multiple of this (slots of one tile)."""
    of_frames: bool = False
    """Items are made of frames: budgets bound them too, and stand whole octaves apart, since such items are large."""
    usual_slots: tuple[int, ...] = ()
    """Sizes that items often have, worth a budget of exactly that size."""


class VisionAdapter(Protocol):
    width: int
    """Columns of a result row."""
    dtype: torch.dtype
    device: torch.device
    paths: tuple[PathSpec, ...]
    capturable: bool
    """Whether `forward` runs without a host read."""
    activation_bytes_per_patch: int
    """Estimated peak, for devices where it cannot be measured."""

    def describe(self, modality: Modality, grid: tuple[int, int, int]) -> ItemSpec:
        """Loads and shapes of an item. Raises InvalidRequestError for a grid the model cannot take."""

    def capacity(self, path: str, slots: int, items: int, frames: int) -> Capacity:
        """All dimensions of a budget of `slots` that takes at most `items` items with `frames` frames."""

    def input_specs(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """Input buffers of a pass of this capacity."""

    def write_inputs(self, path: str, items: Sequence[VisionItem], host: Mapping[str, np.ndarray]) -> None:
        """Fill host buffers, padding included: nothing of an earlier batch may be readable through them."""

    def forward(self, path: str, inputs: Mapping[str, torch.Tensor], longest_patches: int) -> torch.Tensor:
        """Rows of the items in order, then padding: [slots of the buffers, path width]. Under inference mode."""

    def assemble(self, item: VisionItem, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Result of one item from its rows of every path."""

    def sample_items(self, path: str, slots: int, longest_slots: int) -> list[VisionItem]:
        """Random items that bring exactly `slots` (a multiple of the path's step) to the path, none above
        `longest_slots`; for warm-up and calibration."""
