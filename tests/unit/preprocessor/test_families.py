from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.checkpoint import CheckpointError
from deployments.preprocessor.families.base import PatchGeometry
from deployments.preprocessor.families.qwen2_vl import Qwen2VLFamily
from deployments.preprocessor.families.registry import load_family
from deployments.preprocessor.resize import PixelLimits
from tests.unit.preprocessor.model_folder import write_model_folder

LIMITS = PixelLimits(3136, 16384 * 28 * 28)
FAMILY = Qwen2VLFamily(
    geometry=PatchGeometry(
        patch_size=14, merge_size=2, temporal_patch_size=2, image_mean=(0.5,) * 3, image_std=(0.5,) * 3
    ),
    limits=LIMITS,
    frame_limits=LIMITS,
    image_token_id=7,
    video_token_id=8,
)


@pytest.mark.parametrize(
    ("width", "height", "slots"),
    [(336, 336, 144), (512, 512, 324), (1024, 1024, 1369), (1920, 1080, 2691), (3840, 2160, 10549)],
)
def test_worked_sizes(width: int, height: int, slots: int) -> None:
    layout = FAMILY.layout(width, height, LIMITS)
    assert layout.num_slots == slots
    assert layout.num_patches == 4 * slots


@given(width=st.integers(1, 700), height=st.integers(1, 700), num_frames=st.integers(1, 5))
def test_patchify_makes_what_layout_says(width: int, height: int, num_frames: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    layout = FAMILY.layout(width, height, PixelLimits(1, 20_000), num_frames)
    frames = np.zeros((num_frames, layout.resized_height, layout.resized_width, 3), np.uint8)
    patches = FAMILY.patchify(frames, "image" if num_frames == 1 else "video")
    depth = 1 if num_frames == 1 else 2
    assert patches.shape == (layout.num_patches, 3 * depth * 14 * 14)
    assert patches.dtype == np.uint8
    assert patches.flags.c_contiguous


def test_merge_blocks_are_neighbours_and_patches_channel_major() -> None:
    frames = np.arange(56 * 84 * 3, dtype=np.uint32).reshape(1, 56, 84, 3)
    patches = FAMILY.patchify(frames, "image").reshape(2, 3, 2, 2, 3, 14, 14)
    for block_row, block_column, row, column in np.ndindex(2, 3, 2, 2):
        top, left = 28 * block_row + 14 * row, 28 * block_column + 14 * column
        expected = frames[0, top : top + 14, left : left + 14].transpose(2, 0, 1)
        assert np.array_equal(patches[block_row, block_column, row, column], expected)


def test_video_keeps_both_frames_and_repeats_the_last() -> None:
    frames = np.stack([np.full((28, 28, 3), value, np.uint8) for value in (1, 2, 3)])
    patches = FAMILY.patchify(frames, "video").reshape(2, 4, 3, 2, 14, 14)
    assert [patches[0, :, :, i].max() for i in (0, 1)] == [1, 2]
    assert [patches[1, :, :, i].max() for i in (0, 1)] == [3, 3]


def test_a_video_of_one_frame_is_no_picture() -> None:
    patches = FAMILY.patchify(np.full((1, 28, 28, 3), 5, np.uint8), "video")
    assert patches.shape == (4, 3 * 2 * 14 * 14)
    assert (patches == 5).all()


def test_placeholders_by_modality() -> None:
    assert (FAMILY.placeholder_id("image"), FAMILY.placeholder_id("video")) == (7, 8)


def test_loaded_from_a_folder(model_folder: Path) -> None:
    family = load_family(model_folder)
    assert family.limits == LIMITS
    assert family.geometry.cell == 28


def test_newer_processor_files_name_edges(tmp_path: Path) -> None:
    write_model_folder(tmp_path, model_type="qwen2_vl")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 100, "longest_edge": 9999}})
    )
    assert load_family(tmp_path).limits == PixelLimits(100, 9999)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"min_pixels": 7, "max_pixels": 99}))
    assert load_family(tmp_path).frame_limits == PixelLimits(7, 99)


def test_unknown_model_type_is_named(tmp_path: Path) -> None:
    write_model_folder(tmp_path, model_type="hologram_vl")
    with pytest.raises(CheckpointError, match=r"hologram_vl.*qwen2_vl"):
        load_family(tmp_path)


def test_files_that_disagree_are_refused(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    with pytest.raises(CheckpointError, match="patch_size"):
        load_family(tmp_path)
