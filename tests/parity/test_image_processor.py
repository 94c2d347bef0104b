"""Our pictures against the transformers image processor: the same grids, the same pixels."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.families.base import PatchGeometry
from deployments.preprocessor.families.qwen2_vl import Qwen2VLFamily
from deployments.preprocessor.media import Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.resize import PixelLimits
from tests.unit.preprocessor.pictures import encoded, noise

ALL_PIXELS = PixelLimits(3136, 16384 * 28 * 28)


def processors(
    resample: str, limits: PixelLimits, patch_size: int = 14
) -> tuple[MediaProcessor, Qwen2VLImageProcessorPil]:
    theirs = Qwen2VLImageProcessorPil(min_pixels=limits.min_pixels, max_pixels=limits.max_pixels, patch_size=patch_size)
    family = Qwen2VLFamily(
        geometry=PatchGeometry(
            patch_size=patch_size,
            merge_size=2,
            temporal_patch_size=2,
            image_mean=tuple(theirs.image_mean),
            image_std=tuple(theirs.image_std),
        ),
        limits=limits,
        frame_limits=limits,
        image_token_id=1,
        video_token_id=2,
    )
    return MediaProcessor(PreprocessorConfig(resample=resample), family), theirs  # type: ignore[arg-type]


def options(limits: PixelLimits) -> MediaOptions:
    return MediaOptions(image_limits=limits, frame_limits=limits, fps=2.0)


def processed(ours: MediaProcessor, data: bytes, limits: PixelLimits) -> ProcessedMedia:
    return ours.process("image", data, ours.inspect("image", data, options(limits)), options(limits))


def normalised(patches: np.ndarray, theirs: Qwen2VLImageProcessorPil) -> np.ndarray:
    """uint8 [n, 3 * P * P] -> float32 [n, 3 * 2 * P * P], as the encoder's first projection sees it."""
    side = theirs.patch_size
    pixels = patches.reshape(len(patches), 3, 1, side, side).astype(np.float32) * np.float32(1 / 255)
    mean = np.array(theirs.image_mean, np.float32).reshape(1, 3, 1, 1, 1)
    std = np.array(theirs.image_std, np.float32).reshape(1, 3, 1, 1, 1)
    return np.repeat((pixels - mean) / std, 2, axis=2).reshape(len(patches), -1)


def sizes(count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(11)
    drawn = [(int(w), int(h)) for w, h in np.exp(rng.uniform(0, 6.6, (count, 2))).astype(int)]
    edges = [(1, 1), (200, 1), (1, 200), (27, 257), (28, 28), (30, 150), (150, 30), (119, 120), (120, 119), (42, 70)]
    return edges + [(w, h) for w, h in drawn if max(w, h) <= 200 * min(w, h)]


@pytest.mark.parametrize("limits", [ALL_PIXELS, PixelLimits(3136, 50_176), PixelLimits(200_000, 300_000)])
@pytest.mark.parametrize(("resample", "levels"), [("pillow", 0), ("torch", 2)])
def test_grid_and_pixels(resample: str, levels: int, limits: PixelLimits) -> None:
    ours, theirs = processors(resample, limits)
    level = 1 / 255 / min(theirs.image_std)
    for seed, (width, height) in enumerate(sizes(40)):
        image = noise(width, height, seed)
        picture = processed(ours, encoded(image), limits)
        expected = theirs(image, return_tensors="np")
        assert [list(picture.layout.grid)] == expected["image_grid_thw"].tolist(), (width, height)
        assert picture.layout.num_patches == len(picture.patches) == len(expected["pixel_values"])
        difference = np.abs(normalised(picture.patches, theirs) - expected["pixel_values"]).max()
        assert difference <= levels * level + 1e-6, (width, height)


@pytest.mark.parametrize(
    ("width", "height", "slots"),
    [(336, 336, 144), (512, 512, 324), (1024, 1024, 1369), (1920, 1080, 2691), (3840, 2160, 10549)],
)
def test_worked_sizes(width: int, height: int, slots: int) -> None:
    ours, theirs = processors("torch", ALL_PIXELS)
    picture = processed(ours, encoded(noise(width, height), "JPEG"), ALL_PIXELS)
    assert picture.layout.num_slots == slots
    assert theirs.get_number_of_image_patches(height, width) == 4 * slots


def test_grid_over_many_sizes_without_pixels() -> None:
    ours, theirs = processors("pillow", ALL_PIXELS)
    rng = np.random.default_rng(3)
    for width, height in rng.integers(1, 6000, (4000, 2)).tolist():
        if max(width, height) <= 200 * min(width, height):
            layout = ours.layout("image", Inspection(size=(width, height)), options(ALL_PIXELS))
            assert layout.num_patches == theirs.get_number_of_image_patches(height, width), (width, height)


def test_patches_of_sixteen_pixels() -> None:
    """Qwen3-VL uses the same processor with another patch size."""
    limits = PixelLimits(65_536, 300_000)
    ours, theirs = processors("pillow", limits, patch_size=16)
    for seed, (width, height) in enumerate(sizes(12)):
        image = noise(width, height, seed)
        picture = processed(ours, encoded(image), limits)
        expected = theirs(image, return_tensors="np")
        assert [list(picture.layout.grid)] == expected["image_grid_thw"].tolist(), (width, height)
        assert np.abs(normalised(picture.patches, theirs) - expected["pixel_values"]).max() <= 1e-6, (width, height)
