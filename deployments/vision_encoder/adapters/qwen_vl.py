"""What the Qwen-VL towers have in common beyond the forward pass: paths, loads, buffers and weights by name.

Two paths, with the same blocks and different first projections:

    image   uint8 rows [channels * patch * patch]; a picture's temporal copies are equal and never stored
    video   uint8 rows [channels * temporal * patch * patch], in the order of the convolution's weight

Buffers of a pass of S slots (P = S * merge^2 patches, F frames, W windows):

    patches         uint8 [P, row]        positions  int32 [P, 2]     in window order where there are windows
    frame_borders   int32 [F + 1]         window_borders int32 [W + 1]
    slot_order, slot_reverse int32 [S]    tap_index int32 [P, 4], tap_weight float32 [P, 4]  (learned positions)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from deployments.errors import InvalidRequestError
from deployments.vision_encoder.adapters.base import BufferSpec, ItemSpec, Modality, PathSpec, VisionItem
from deployments.vision_encoder.adapters.tower import (
    Block,
    Linear,
    Merger,
    Normalisation,
    Tower,
    TowerShape,
    TowerWeights,
    fold_normalisation,
)
from deployments.vision_encoder.attention import Attention, StackedAttention
from deployments.vision_encoder.geometry import (
    CACHED_GRIDS,
    Grid,
    bilinear_taps,
    patch_positions,
    slots_of,
    window_order,
    window_positions,
)
from deployments.vision_encoder.ops import Norm, Ops
from deployments.vision_encoder.packing import Capacity, Load
from deployments.vision_encoder.weights import WeightSource

MIN_BUDGET_SLOTS = 64
"""A 224 x 224 picture: the smallest size seen often."""


USUAL_PIXELS = (
    *((side, side) for side in (224, 336, 448, 512, 672, 768, 896, 1024, 1280)),
    *((640, 480), (800, 600), (1024, 768), (1280, 720), (1920, 1080)),
)
"""Width and height of pictures that are seen often."""


def usual_slots(side: int) -> tuple[int, ...]:
    """Slots of `USUAL_PIXELS`, ascending, where a slot is a square of `side` pixels and sizes are rounded to whole
    slots, as the processors do."""
    return tuple(sorted({round(width / side) * round(height / side) for width, height in USUAL_PIXELS}))


class QwenVLAdapter:
    """Serves any `TowerShape`; the families below only name shapes and weights (see qwen2_vl.py and its kin)."""

    def __init__(
        self,
        shape: TowerShape,
        weights: TowerWeights,
        attention: Attention,
        window_attention: Attention | StackedAttention,
        ops: Ops,
    ) -> None:
        self.shape = shape
        self.width = shape.result_width
        self.dtype = weights.merger.fc2.weight.dtype
        self.device = weights.merger.fc2.weight.device
        self.paths: tuple[PathSpec, ...] = (
            PathSpec("image", MIN_BUDGET_SLOTS, usual_slots=usual_slots(shape.patch_size * shape.merge)),
            PathSpec("video", MIN_BUDGET_SLOTS, of_frames=True),
        )
        self.capturable = attention.capturable and (not shape.window_slots or window_attention.capturable)
        inner = shape.mlp_width * (2 if shape.gated else 1)
        # The widest moments: residual, normed row and MLP (input and gate), or residual, qkv, rotated q and k, result.
        elements = 2 * shape.width + max(inner + shape.mlp_width, 7 * shape.width)
        self.activation_bytes_per_patch = elements * self.dtype.itemsize
        self._tower = Tower(shape, weights, attention, window_attention, ops)
        self._row = {"image": shape.image_row, "video": shape.video_row}
        self._describe_cached = lru_cache(CACHED_GRIDS)(self._describe)

    def describe(self, modality: Modality, grid: Grid) -> ItemSpec:
        return self._describe_cached(modality, grid)

    def _describe(self, modality: Modality, grid: Grid) -> ItemSpec:
        t, h, w = grid
        merge = self.shape.merge
        if t < 1 or h < merge or w < merge or h % merge or w % merge or (modality == "image" and t != 1):
            raise InvalidRequestError(
                f"{modality} grid is {t}x{h}x{w} patches; height and width must be positive multiples of {merge}"
                + (" and a picture has one frame" if modality == "image" else ""),
                code="invalid_image",
            )
        slots = slots_of(grid, merge)
        patches = t * h * w
        segments = 0
        if self.shape.window_slots:
            side = self.shape.window_slots * merge
            segments = t * -(-h // side) * -(-w // side)
        load = Load(slots, patches, segments, t, h * w, t * (h * w) ** 2)
        return ItemSpec(slots, (patches, self._row[modality]), {modality: load})

    def capacity(self, path: str, slots: int, items: int, frames: int) -> Capacity:
        """Windows get room for four slots each on average; full ones hold `window_slots ** 2`."""
        segments = slots // 4 + max(items, frames) if self.shape.window_slots else 0
        return Capacity(slots, slots * self.shape.unit, items, segments, items if path == "image" else frames)

    def input_specs(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        shape, patches = self.shape, capacity.patches
        specs = {
            "patches": BufferSpec((patches, self._row[path]), torch.uint8),
            "positions": BufferSpec((patches, 2), torch.int32),
            "frame_borders": BufferSpec((capacity.frames + 1,), torch.int32),
        }
        if shape.window_slots:
            specs["slot_order"] = BufferSpec((capacity.slots,), torch.int32)
            specs["slot_reverse"] = BufferSpec((capacity.slots,), torch.int32)
            specs["window_borders"] = BufferSpec((capacity.segments + 1,), torch.int32)
        if shape.table_side:
            specs["tap_index"] = BufferSpec((patches, 4), torch.int32)
            specs["tap_weight"] = BufferSpec((patches, 4), torch.float32)
        return specs

    def write_inputs(self, path: str, items: Sequence[VisionItem], host: Mapping[str, np.ndarray]) -> None:
        shape = self.shape
        end = 0
        for item in items:
            # One thread: waking others took milliseconds on a busy host, the copy takes tenths of one.
            host["patches"][end : end + len(item.patches)] = item.patches
            end += len(item.patches)
        host["patches"][end:] = 0
        if shape.window_slots:
            geometry = [window_order(item.grid, shape.merge, shape.window_slots) for item in items]
            positions = [window_positions(item.grid, shape.merge, shape.window_slots) for item in items]
            _write_permutation(host["slot_order"], [g.order for g in geometry])
            _write_permutation(host["slot_reverse"], [g.reverse for g in geometry])
            _write_borders(host["window_borders"], np.concatenate([g.lengths for g in geometry]) * shape.unit)
        else:
            positions = [patch_positions(item.grid, shape.merge) for item in items]
        _write_rows(host["positions"], positions)
        frame_lengths = [np.full(item.grid[0], item.grid[1] * item.grid[2]) for item in items]
        _write_borders(host["frame_borders"], np.concatenate(frame_lengths))
        if shape.table_side:
            taps = [bilinear_taps(item.grid, shape.merge, shape.table_side) for item in items]
            _write_rows(host["tap_index"], [tap.index for tap in taps])
            _write_rows(host["tap_weight"], [tap.weight for tap in taps])

    def forward(self, path: str, inputs: Mapping[str, torch.Tensor], longest_patches: int) -> torch.Tensor:
        return self._tower(path, inputs, longest_patches)

    def assemble(self, item: VisionItem, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return rows[item.modality]

    def sample_items(self, path: str, slots: int, longest_slots: int) -> list[VisionItem]:
        generator = np.random.default_rng(slots)
        items: list[VisionItem] = []
        modality: Modality = "image" if path == "image" else "video"
        while slots > 0:
            part = min(slots, longest_slots)
            rows = next(side for side in range(int(part**0.5), 0, -1) if part % side == 0)
            grid = (1, rows * self.shape.merge, part // rows * self.shape.merge)
            pixels = generator.integers(0, 256, (part * self.shape.unit, self._row[path]), dtype=np.uint8)
            items.append(VisionItem(modality, grid, pixels))
            slots -= part
        return items


def _write_rows(target: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Rows of all parts, then zeros."""
    end = 0
    for part in parts:
        target[end : end + len(part)] = part
        end += len(part)
    target[end:] = 0


def _write_permutation(target: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Each part moved behind the ones before it, then the identity, so that the whole stays a permutation."""
    end = 0
    for part in parts:
        np.add(part, end, out=target[end : end + len(part)])
        end += len(part)
    target[end:] = np.arange(end, len(target), dtype=target.dtype)


def _write_borders(target: np.ndarray, lengths: np.ndarray) -> None:
    """Borders of the segments, then the last one again and again: empty segments."""
    target[0] = 0
    np.cumsum(lengths, out=target[1 : len(lengths) + 1])
    target[len(lengths) + 1 :] = target[len(lengths)]


class WeightReader:
    """Takes tensors from a source and brings them to the device in the tower's precision."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, mlp_multiple: int) -> None:
        self._source, self._dtype, self._device, self._mlp_multiple = source, dtype, device, mlp_multiple
        # Rows of other lengths keep products off the tensor cores' fast paths.
        self._row_multiple = 64 if device.type == "cuda" else 1

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take(name, shape).to(self._device, self._dtype)

    def linear(self, name: str, out_width: int, in_width: int) -> Linear:
        return Linear(self.tensor(f"{name}.weight", out_width, in_width), self.tensor(f"{name}.bias", out_width))

    def layer_norm(self, name: str, width: int) -> Norm:
        return Norm(self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width))

    def rms_norm(self, name: str, width: int) -> Norm:
        return Norm(self.tensor(f"{name}.weight", width), None)

    def norm(self, name: str, shape: TowerShape) -> Norm:
        return self.rms_norm(name, shape.width) if shape.rms_norm else self.layer_norm(name, shape.width)

    def embed(self, shape: TowerShape, normalisations: Mapping[str, Normalisation], *, bias: bool) -> dict[str, Linear]:
        """First projection of both paths, folded in double precision before it is cast."""
        size = (shape.width, shape.channels, shape.temporal_patch_size, shape.patch_size, shape.patch_size)
        weight = self._source.take("patch_embed.proj.weight", size).to(self._device)
        offset = self._source.take("patch_embed.proj.bias", (shape.width,)).to(self._device) if bias else None
        projections = {}
        for path, normalisation in normalisations.items():
            folded, constant = fold_normalisation(weight, offset, normalisation, repeated_frames=path == "image")
            padded = _pad(folded, 1, self._row_multiple)
            projections[path] = Linear(padded.to(self._dtype), constant.to(self._dtype))
        return projections

    def mlp_in(self, names: Sequence[str], shape: TowerShape) -> Linear:
        """The input projections stacked, each padded to the same multiple with rows of zeros."""
        layers = [self.linear(name, shape.mlp_width, shape.width) for name in names]
        return Linear(
            torch.cat([_pad(layer.weight, 0, self._mlp_multiple) for layer in layers]),
            torch.cat([_pad(layer.bias, 0, self._mlp_multiple) for layer in layers if layer.bias is not None]),
        )

    def mlp_out(self, name: str, shape: TowerShape) -> Linear:
        """Padded inner columns are zeros; every known activation maps a zero row to zero, so results are unchanged."""
        layer = self.linear(name, shape.width, shape.mlp_width)
        return Linear(_pad(layer.weight, 1, self._mlp_multiple), layer.bias)

    def block(self, layer: int, shape: TowerShape, mlp_in: Sequence[str], mlp_out: str) -> Block:
        name = f"blocks.{layer}"
        return Block(
            norm1=self.norm(f"{name}.norm1", shape),
            qkv=self.linear(f"{name}.attn.qkv", 3 * shape.width, shape.width),
            proj=self.linear(f"{name}.attn.proj", shape.width, shape.width),
            norm2=self.norm(f"{name}.norm2", shape),
            mlp_in=self.mlp_in([f"{name}.{part}" for part in mlp_in], shape),
            mlp_out=self.mlp_out(f"{name}.{mlp_out}", shape),
        )

    def merger(
        self, name: str, shape: TowerShape, *, norm: str, fc1: str, fc2: str, after_merge: bool = False
    ) -> Merger:
        merged = shape.width * shape.unit
        return Merger(
            norm=self.layer_norm(f"{name}.{norm}", merged) if after_merge else self.norm(f"{name}.{norm}", shape),
            after_merge=after_merge,
            fc1=self.linear(f"{name}.{fc1}", merged, merged),
            fc2=self.linear(f"{name}.{fc2}", shape.out_width, merged),
        )


def _pad(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """With zeros at the end of `dim`, up to a multiple."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    size = list(tensor.shape)
    size[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(size)), dim)


def axial_theta(config: Mapping[str, Any]) -> float:
    """Base of the tower's rotary angles; older configs do not name it."""
    return float((config.get("rope_parameters") or {}).get("rope_theta", 10_000.0))
