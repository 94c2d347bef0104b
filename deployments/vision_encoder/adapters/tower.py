"""The packed vision transformer that the Qwen-VL families share: the forward pass, written once, told by a shape.

Rows of all items lie in one tensor and nothing is padded between them. With windows, slots are regrouped before the
first block so that every window is a contiguous run, and put back after the merger. uint8 patches go in: normalisation,
and for pictures the sum over the repeated temporal copies, are folded into the first projection in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deployments.vision_encoder.attention import Attention, Rotated, Segments, StackedAttention
from deployments.vision_encoder.ops import ACTIVATIONS, PIXEL_CENTRE, Norm, Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    depth: int
    width: int
    heads: int
    mlp_width: int
    out_width: int
    activation: str
    gated: bool
    """MLP is act(gate) * up instead of act(fc1)."""
    rms_norm: bool
    patch_size: int
    temporal_patch_size: int
    channels: int
    merge: int
    window_slots: int = 0
    """Side of an attention window in slots; 0 attends over whole frames everywhere."""
    full_layers: frozenset[int] = frozenset()
    """With windows: the layers that attend over whole frames."""
    table_side: int = 0
    """Side of the learned position table; 0 if the model has none."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose output is merged into a further feature level."""
    rope_theta: float = 10_000.0

    @property
    def unit(self) -> int:
        """Patches per slot."""
        return self.merge * self.merge

    @property
    def image_row(self) -> int:
        return self.channels * self.patch_size * self.patch_size

    @property
    def video_row(self) -> int:
        return self.image_row * self.temporal_patch_size

    @property
    def result_width(self) -> int:
        return self.out_width * (1 + len(self.deepstack_layers))

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4:
            raise ValueError(f"vision width {self.width} over {self.heads} heads: a head must be a multiple of 4 wide")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"vision hidden_act {self.activation!r}; known: {', '.join(sorted(ACTIVATIONS))}")
        if self.gated and self.activation != "silu":
            raise ValueError(f"gated MLP with hidden_act {self.activation!r}; only silu is known")


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Block:
    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    mlp_in: Linear
    """fc1, or gate and up stacked."""
    mlp_out: Linear


@dataclass(frozen=True, slots=True)
class Merger:
    norm: Norm
    after_merge: bool
    """Normalise merged rows instead of patches."""
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class TowerWeights:
    embed: Mapping[str, Linear]
    """First projection by path, with normalisation folded in; columns past a patch's row are zero."""
    blocks: tuple[Block, ...]
    merger: Merger
    deepstack: tuple[Merger, ...] = ()
    position_table: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Normalisation:
    """(pixel * rescale - mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float = 1 / 255


def fold_normalisation(
    weight: torch.Tensor, bias: torch.Tensor | None, normalisation: Normalisation, *, repeated_frames: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a projection that reads `pixel - PIXEL_CENTRE` instead of normalised floats.

    Args:
        weight: [out, channels, temporal, patch, patch].
        repeated_frames: The temporal copies are equal (a picture), so their weights are summed and a row holds
            [channels, patch, patch]; else it holds [channels, temporal, patch, patch].

    Returns:
        float32 [out, row] and [out].
    """
    weight = weight.double()
    std = torch.tensor(normalisation.std, dtype=torch.float64, device=weight.device).view(1, -1, 1, 1, 1)
    mean = torch.tensor(normalisation.mean, dtype=torch.float64, device=weight.device).view(1, -1, 1, 1, 1)
    shifted = weight / std
    constant = (shifted * (normalisation.rescale * PIXEL_CENTRE - mean)).flatten(1).sum(1)
    if bias is not None:
        constant = constant + bias.double()
    scaled = shifted * normalisation.rescale
    if repeated_frames:
        scaled = scaled.sum(2)
    return scaled.flatten(1).float(), constant.float()


class Tower:
    """Forward pass over device buffers. Holds weights, makes no host read, keeps no state between calls."""

    def __init__(
        self,
        shape: TowerShape,
        weights: TowerWeights,
        attention: Attention,
        window_attention: Attention | StackedAttention,
        ops: Ops,
    ) -> None:
        self.shape, self.weights = shape, weights
        self.attention, self.window_attention, self.ops = attention, window_attention, ops
        self._frames: StackedAttention = Rotated(ops, attention)
        self._windows: StackedAttention = (
            window_attention if isinstance(window_attention, StackedAttention) else Rotated(ops, window_attention)
        )
        device = weights.merger.fc2.weight.device
        head_dim = shape.width // shape.heads
        spread = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self._inverse_frequency = (1.0 / shape.rope_theta**spread).to(device)
        self._scale = head_dim**-0.5
        self._activation: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS[shape.activation]

    def __call__(self, path: str, inputs: Mapping[str, torch.Tensor], longest_patches: int) -> torch.Tensor:
        """Rows [slots, result_width] from the buffers that adapters/qwen_vl.py describes."""
        shape, ops = self.shape, self.ops
        hidden = self._embed(path, inputs)
        angles = (inputs["positions"].float()[:, :, None] * self._inverse_frequency).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        rows = hidden.shape[0]
        frames = self._frames.plan(Segments(inputs["frame_borders"], longest_patches), rows)
        if shape.window_slots:
            longest_window = min(longest_patches, shape.window_slots**2 * shape.unit)
            windows = self._windows.plan(Segments(inputs["window_borders"], longest_window), rows)
        levels = []
        blocks = self.weights.blocks
        normed = ops.norm(hidden, blocks[0].norm1)
        for layer, block in enumerate(blocks):
            if shape.window_slots and layer not in shape.full_layers:
                attention, plan = self._windows, windows
            else:
                attention, plan = self._frames, frames
            mixed = attention.attend_stacked(block.qkv(normed), cos, sin, shape.heads, plan, self._scale)
            hidden, normed = ops.add_norm(hidden, block.proj(mixed), block.norm2)
            following = blocks[layer + 1].norm1 if layer + 1 < len(blocks) else self.weights.merger.norm
            hidden, normed = ops.add_norm(hidden, self._mlp(block, normed), following)
            if layer in shape.deepstack_layers:
                levels.append(self._merge(self.weights.deepstack[shape.deepstack_layers.index(layer)], hidden))
        merged = self._merge(self.weights.merger, normed)
        if levels:
            merged = torch.cat((merged, *levels), dim=1)
        return merged.index_select(0, inputs["slot_reverse"]) if shape.window_slots else merged

    def _embed(self, path: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shape, projection = self.shape, self.weights.embed[path]
        order = inputs["slot_order"] if shape.window_slots else None
        width, dtype = projection.weight.shape[1], projection.weight.dtype
        hidden = projection(self.ops.unpack(inputs["patches"], order, shape.unit, width, dtype))
        table = self.weights.position_table
        if table is None:
            return hidden
        index, weight = inputs["tap_index"], inputs["tap_weight"]
        position = table[index[:, 0]] * weight[:, :1]
        for tap in range(1, index.shape[1]):
            position = position + table[index[:, tap]] * weight[:, tap, None]
        return hidden + position.to(hidden.dtype)

    def _mlp(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        inner = block.mlp_in(x)
        return block.mlp_out(self.ops.gated_silu(inner) if self.shape.gated else self._activation(inner))

    def _merge(self, merger: Merger, x: torch.Tensor) -> torch.Tensor:
        """The final merger gets rows that are normalised already; a deepstack merger normalises merged rows."""
        merged = x.reshape(-1, self.shape.unit * self.shape.width)
        if merger.after_merge:
            merged = self.ops.norm(merged, merger.norm)
        return merger.fc2(F.gelu(merger.fc1(merged)))
