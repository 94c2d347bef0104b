"""Qwen2-VL and Qwen2.5-VL: patches of 14 pixels in merge blocks of 2 x 2, one placeholder token per block.

Patches are ordered block by block, so that the four patches of a merge block are neighbours:
(grid_t, grid_h / merge, grid_w / merge, merge, merge), each patch channel-major (C, T, P, P).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from deployments.checkpoint import CheckpointError, read_json
from deployments.messages import Modality
from deployments.preprocessor.families.base import Layout, PatchGeometry, Span
from deployments.preprocessor.resize import PixelLimits, smart_resize

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLFamily:
    """The family's `Family`; also fits relatives that differ in numbers only."""

    revision: ClassVar[str] = "qwen2_vl/1"

    geometry: PatchGeometry
    limits: PixelLimits
    frame_limits: PixelLimits
    image_token_id: int
    video_token_id: int

    def placeholder_id(self, modality: Modality) -> int:
        return self.image_token_id if modality == "image" else self.video_token_id

    def layout(self, width: int, height: int, limits: PixelLimits, num_frames: int = 1) -> Layout:
        g = self.geometry
        resized_height, resized_width = smart_resize(height, width, g.cell, limits)
        grid_t = -(-num_frames // g.temporal_patch_size)
        grid_h, grid_w = resized_height // g.patch_size, resized_width // g.patch_size
        return Layout(
            resized_height=resized_height,
            resized_width=resized_width,
            grid=(grid_t, grid_h, grid_w),
            num_slots=grid_t * grid_h * grid_w // g.merge_size**2,
        )

    def spans(self, layout: Layout, frame_seconds: Sequence[float] = ()) -> tuple[Span, ...]:
        return (Span(num_slots=layout.num_slots),)

    def patchify(self, frames: np.ndarray, modality: Modality) -> np.ndarray:
        g = self.geometry
        num_frames, height, width, channels = frames.shape
        # A picture's second temporal frame is a copy of the first; the encoder folds it into its first projection.
        depth = 1 if modality == "image" else g.temporal_patch_size
        if padding := -num_frames % depth:
            frames = np.concatenate([frames, np.repeat(frames[-1:], padding, axis=0)])
        patch, merge = g.patch_size, g.merge_size
        blocks = frames.reshape(-1, depth, height // g.cell, merge, patch, width // g.cell, merge, patch, channels)
        # (t, depth, bh, mh, ph, bw, mw, pw, c) -> (t, bh, bw, mh, mw, c, depth, ph, pw)
        ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return ordered.reshape(-1, channels * depth * patch * patch)


def load_qwen2_vl(folder: Path, config: Mapping[str, Any]) -> Qwen2VLFamily:
    """The family as a checkpoint of type `qwen2_vl` or `qwen2_5_vl` describes it."""
    geometry, image, video = read_geometry(folder, config, patch_size=14, mean=_CLIP_MEAN, std=_CLIP_STD)
    return Qwen2VLFamily(
        geometry=geometry,
        limits=pixel_limits(image, 56 * 56, 1280 * 28 * 28),
        frame_limits=pixel_limits(video, 128 * 28 * 28, 768 * 28 * 28),
        image_token_id=config["image_token_id"],
        video_token_id=config["video_token_id"],
    )


def read_geometry(
    folder: Path, config: Mapping[str, Any], *, patch_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[PatchGeometry, Mapping[str, Any], Mapping[str, Any]]:
    """(geometry, picture processor's file, video processor's file) of a folder; the arguments fill what is not said.

    Raises:
        CheckpointError: The picture processor's file and config.json disagree.
    """
    image = read_json(folder, "preprocessor_config.json", default={})
    video = read_json(folder, "video_preprocessor_config.json", default={})
    geometry = PatchGeometry(
        patch_size=image.get("patch_size", patch_size),
        merge_size=image.get("merge_size", 2),
        temporal_patch_size=image.get("temporal_patch_size", 2),
        image_mean=tuple(image.get("image_mean", mean)),
        image_std=tuple(image.get("image_std", std)),
        rescale_factor=image.get("rescale_factor", 1 / 255),
    )
    vision = config.get("vision_config", {})
    for name, here in (("patch_size", geometry.patch_size), ("spatial_merge_size", geometry.merge_size)):
        there = vision.get(name, here)
        if there != here:
            raise CheckpointError(f"preprocessor_config.json and config.json disagree on {name}: {here} and {there}")
    return geometry, image, video


def pixel_limits(processor: Mapping[str, Any], min_pixels: int, max_pixels: int) -> PixelLimits:
    """Bounds that a processor's file sets, under its older or newer names; the arguments where it sets none."""
    size = processor.get("size") or {}
    return PixelLimits(
        min_pixels=processor.get("min_pixels") or size.get("shortest_edge") or min_pixels,
        max_pixels=processor.get("max_pixels") or size.get("longest_edge") or max_pixels,
    )
