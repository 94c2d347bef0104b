"""Qwen3-VL: patches of 16 pixels in Qwen2-VL's order; a video's temporal steps stand apart in the prompt.

    video, 2 steps    <0.3 seconds><|vision_start|>PPPP<|vision_end|><1.3 seconds><|vision_start|>PPPP<|vision_end|>

The tower attends within a step only, so a step is encoded, cached and placed on the rotary axes like a picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deployments.preprocessor.families.base import Layout, Span
from deployments.preprocessor.families.qwen2_vl import Qwen2VLFamily, pixel_limits, read_geometry
from deployments.preprocessor.resize import PixelLimits

_HALF = (0.5, 0.5, 0.5)
_MAX_FRAME_CELLS = 768
"""Most slots of one frame, as the reference implementation (qwen-vl-utils) caps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLFamily(Qwen2VLFamily):
    revision: ClassVar[str] = "qwen3_vl/1"

    max_video_pixels: int
    """Bound on the resized area of all frames together."""

    def layout(self, width: int, height: int, limits: PixelLimits, num_frames: int = 1) -> Layout:
        share = max(self.geometry.cell**2, self.max_video_pixels // num_frames)
        if num_frames > 1 and limits.max_pixels > share:
            limits = PixelLimits(min(limits.min_pixels, share), share)
        # Not super(): `slots=True` makes the class anew, and the short form still means the first one.
        return Qwen2VLFamily.layout(self, width, height, limits, num_frames)

    def spans(self, layout: Layout, frame_seconds: Sequence[float] = ()) -> tuple[Span, ...]:
        if not frame_seconds:
            return (Span(num_slots=layout.num_slots),)
        steps, depth = layout.grid[0], self.geometry.temporal_patch_size
        spans = []
        for step in range(steps):
            # A step's time is the middle of its first and last frame; the last frame fills an incomplete step.
            taken = frame_seconds[step * depth : (step + 1) * depth]
            last = taken[-1] if len(taken) == depth else frame_seconds[-1]
            spans.append(
                Span(
                    num_slots=layout.num_slots // steps,
                    before=f"<{(taken[0] + last) / 2:.1f} seconds><|vision_start|>",
                    after="<|vision_end|>",
                )
            )
        return tuple(spans)


def load_qwen3_vl(folder: Path, config: Mapping[str, Any]) -> Qwen3VLFamily:
    """The family as a checkpoint of type `qwen3_vl` or `qwen3_vl_moe` describes it."""
    geometry, image, video = read_geometry(folder, config, patch_size=16, mean=_HALF, std=_HALF)
    cell_pixels = geometry.cell**2
    # A video's file bounds all frames together.
    whole = pixel_limits(video, 4 * cell_pixels, 24_576 * cell_pixels)
    frame_max = min(_MAX_FRAME_CELLS * cell_pixels, whole.max_pixels)
    return Qwen3VLFamily(
        geometry=geometry,
        limits=pixel_limits(image, 64 * cell_pixels, 16_384 * cell_pixels),
        frame_limits=PixelLimits(min(whole.min_pixels, frame_max), frame_max),
        max_video_pixels=whole.max_pixels,
        image_token_id=config["image_token_id"],
        video_token_id=config["video_token_id"],
    )
