from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.checkpoint import CheckpointError
from deployments.preprocessor.families.base import PatchGeometry, Span
from deployments.preprocessor.families.qwen2_vl import Qwen2VLFamily
from deployments.preprocessor.families.qwen3_vl import Qwen3VLFamily
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


# -- Qwen3-VL ---------------------------------------------------------------------------------------------------------
def qwen3_family(folder: Path, video: dict[str, object] | None = None) -> Qwen3VLFamily:
    write_model_folder(folder, model_type="qwen3_vl", patch_size=16)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16})
    )
    if video is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    family = load_family(folder)
    assert isinstance(family, Qwen3VLFamily)
    return family


def test_qwen3_reads_its_own_numbers(tmp_path: Path) -> None:
    family = qwen3_family(tmp_path)
    assert (family.geometry.cell, family.geometry.image_mean, family.revision) == (32, (0.5,) * 3, "qwen3_vl/1")
    assert family.limits == PixelLimits(65_536, 16_777_216)
    assert family.frame_limits.max_pixels == 768 * 32 * 32
    assert family.layout(1024, 1024, family.limits).num_slots == 32 * 32


@given(width=st.integers(32, 2000), height=st.integers(32, 2000), num_frames=st.integers(1, 64))
def test_qwen3_bounds_all_frames_together(width: int, height: int, num_frames: int) -> None:
    limit = 256 * 32 * 32
    family = Qwen3VLFamily(
        geometry=PatchGeometry(
            patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=(0.5,) * 3, image_std=(0.5,) * 3
        ),
        limits=LIMITS,
        frame_limits=LIMITS,
        max_video_pixels=limit,
        image_token_id=7,
        video_token_id=8,
    )
    frame_limits = PixelLimits(32 * 32, 1 << 20)
    layout = family.layout(width, height, frame_limits, num_frames)
    if num_frames == 1:
        assert layout == family.layout(width, height, frame_limits)
    elif max(width, height) * num_frames * 32 * 32 < min(width, height) * limit:  # no side is clamped to one cell
        assert layout.resized_height * layout.resized_width * num_frames <= limit
    spans = family.spans(layout, [index / 2 for index in range(num_frames)])
    assert len(spans) == layout.grid[0]
    assert sum(span.num_slots for span in spans) == layout.num_slots


def test_qwen3_steps_are_told_apart_by_their_times(tmp_path: Path) -> None:
    family = qwen3_family(tmp_path)
    layout = family.layout(64, 64, PixelLimits(1, 64 * 64), 5)
    spans = family.spans(layout, (0.0, 0.5, 1.0, 1.5, 2.0))
    assert [span.before for span in spans] == [f"<{t} seconds><|vision_start|>" for t in ("0.2", "1.2", "2.0")]
    assert {(span.num_slots, span.after) for span in spans} == {(4, "<|vision_end|>")}


def test_pictures_and_the_older_families_have_one_span(tmp_path: Path) -> None:
    family = qwen3_family(tmp_path)
    layout = family.layout(640, 480, family.limits)
    assert family.spans(layout) == (Span(num_slots=layout.num_slots),)
    video = FAMILY.layout(100, 60, LIMITS, 6)
    assert FAMILY.spans(video, (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)) == (Span(num_slots=video.num_slots),)
