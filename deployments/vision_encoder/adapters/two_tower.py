"""A global and a local tower side by side, as DeepSeek-OCR tiles its pictures: one whole view of fixed size, and a grid
of tiles for pictures that are larger. Two paths that are packed, captured and skipped independently.

    item            global path: one view, V slots       local path: rows x columns tiles, L slots each (none: skipped)
    result          [tiles grid with a newline slot after every line | global view | separator slot]

`grid` of an item is (1, tile rows, tile columns), with (1, 0, 0) for a picture without tiles. Its patches are uint8
rows: the view's, then each tile's. A view or tile is V or L patches of one row each; a patch is a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
import torch
import torch.nn.functional as F

from deployments.errors import InvalidRequestError
from deployments.vision_encoder.adapters.base import BufferSpec, ItemSpec, Modality, PathSpec, VisionItem
from deployments.vision_encoder.adapters.tower import Linear
from deployments.vision_encoder.attention import Attention, Segments
from deployments.vision_encoder.ops import PIXEL_CENTRE, Norm
from deployments.vision_encoder.packing import Capacity, Load


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTowerShape:
    view_side: int
    """Slots along one side of the global view."""
    tile_side: int
    """Slots along one side of a tile."""
    row: int
    """Bytes of a patch."""
    width: int
    heads: int
    out_width: int

    @property
    def slots(self) -> dict[str, int]:
        """Slots of one view or tile, by path."""
        return {"global": self.view_side**2, "local": self.tile_side**2}


@dataclass(frozen=True, slots=True)
class SmallTower:
    """One attention layer over each view or tile: enough to make results depend on every border."""

    embed: Linear
    norm: Norm
    qkv: Linear
    out: Linear


class TwoTowerAdapter:
    def __init__(
        self,
        shape: TwoTowerShape,
        towers: Mapping[str, SmallTower],
        newline: torch.Tensor,
        separator: torch.Tensor,
        attention: Attention,
    ) -> None:
        self.shape, self._towers, self._attention = shape, towers, attention
        self._newline, self._separator = newline, separator
        self.width = shape.out_width
        self.dtype, self.device = newline.dtype, newline.device
        self.capturable = attention.capturable
        self.activation_bytes_per_patch = 8 * shape.width * self.dtype.itemsize
        self.paths: tuple[PathSpec, ...] = tuple(
            PathSpec(path, slots, slot_step=slots) for path, slots in shape.slots.items()
        )

    def describe(self, modality: Modality, grid: tuple[int, int, int]) -> ItemSpec:
        _, rows, columns = grid
        if modality != "image" or grid[0] != 1 or rows < 0 or columns < 0 or (rows == 0) != (columns == 0):
            raise InvalidRequestError(f"{modality} grid is {grid}; a picture has 1 x rows x columns tiles, or none")
        view, tile = self.shape.slots["global"], self.shape.slots["local"]
        tiles = rows * columns
        loads = {"global": Load(view, view, 0, 1, view, view**2)}
        if tiles:
            loads["local"] = Load(tiles * tile, tiles * tile, 0, tiles, tile, tiles * tile**2)
        side = self.shape.tile_side
        num_slots = view + 1 + rows * side * (columns * side + 1)
        return ItemSpec(num_slots, (view + tiles * tile, self.shape.row), loads)

    def capacity(self, path: str, slots: int, items: int, frames: int) -> Capacity:
        views = slots // self.shape.slots[path]
        return Capacity(slots, slots, min(items, views), 0, views)

    def input_specs(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        return {
            f"{path}_patches": BufferSpec((capacity.patches, self.shape.row), torch.uint8),
            f"{path}_borders": BufferSpec((capacity.frames + 1,), torch.int32),
        }

    def write_inputs(self, path: str, items: Sequence[VisionItem], host: Mapping[str, np.ndarray]) -> None:
        view, patches, end = self.shape.slots["global"], host[f"{path}_patches"], 0
        for item in items:
            part = item.patches[:view] if path == "global" else item.patches[view:]
            patches[end : end + len(part)] = part
            end += len(part)
        patches[end:] = 0
        borders = host[f"{path}_borders"]
        np.minimum(np.arange(len(borders)) * self.shape.slots[path], end, out=borders, casting="unsafe")

    def forward(self, path: str, inputs: Mapping[str, torch.Tensor], longest_patches: int) -> torch.Tensor:
        tower, heads = self._towers[path], self.shape.heads
        patches = inputs[f"{path}_patches"]
        hidden = tower.embed((patches.to(self.dtype) - PIXEL_CENTRE) / PIXEL_CENTRE)
        normed = F.layer_norm(hidden, hidden.shape[-1:], tower.norm.weight, tower.norm.bias)
        q, k, v = tower.qkv(normed).view(len(patches), 3, heads, -1).unbind(1)
        plan = self._attention.plan(Segments(inputs[f"{path}_borders"], longest_patches), len(patches))
        mixed = self._attention.attend(q, k, v, plan, q.shape[-1] ** -0.5)
        return tower.out(hidden + mixed.reshape(len(patches), -1))

    def assemble(self, item: VisionItem, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        parts = [rows["global"], self._separator[None]]
        if "local" in rows:
            _, down, across = item.grid
            side, width = self.shape.tile_side, self.width
            # [down, across, side, side] tiles into picture lines, each closed by the newline row.
            lines = rows["local"].view(down, across, side, side, width).transpose(1, 2)
            lines = lines.reshape(down * side, across * side, width)
            closed = torch.cat((lines, self._newline.expand(len(lines), 1, width)), dim=1)
            parts.insert(0, closed.reshape(-1, width))
        return torch.cat(parts)

    def sample_items(self, path: str, slots: int, longest_slots: int) -> list[VisionItem]:
        generator = np.random.default_rng(slots)
        views = slots // self.shape.slots[path]
        grids = [(1, 0, 0)] * views if path == "global" else [(1, 1, views)]
        return [
            VisionItem("image", grid, generator.integers(0, 256, self.describe("image", grid).patches_shape, np.uint8))
            for grid in grids
        ]


def random_two_tower(
    shape: TwoTowerShape, attention: Attention, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TwoTowerAdapter:
    """The adapter with random weights; no served checkpoint has this shape."""
    generator = torch.Generator().manual_seed(seed)

    def linear(out_width: int, in_width: int) -> Linear:
        weight = torch.randn(out_width, in_width, generator=generator) / isqrt(in_width)
        return Linear(weight.to(dtype), torch.randn(out_width, generator=generator).to(dtype))

    towers = {
        path: SmallTower(
            embed=linear(shape.width, shape.row),
            norm=Norm(torch.ones(shape.width, dtype=dtype), torch.zeros(shape.width, dtype=dtype)),
            qkv=linear(3 * shape.width, shape.width),
            out=linear(shape.out_width, shape.width),
        )
        for path in shape.slots
    }
    newline, separator = (torch.randn(shape.out_width, generator=generator).to(dtype) for _ in range(2))
    return TwoTowerAdapter(shape, towers, newline, separator, attention)
