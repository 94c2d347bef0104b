"""Positions against transformers' get_rope_index, and against worked examples where it has no answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from cache_service.identity import ItemIdentity
from deployments.lm_engine.families.positions import MRopeRule, TextRule
from deployments.messages import MediaItem, Modality

IMAGE, VIDEO = 1, 2
# Older releases cut the seconds of a grid step to whole ones first; training did not.
FRACTIONS = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)
SECONDS = [0.25, 0.5, 1.0, 1.37, 2.0] if FRACTIONS else [1.0, 2.0, 3.0]


def item(modality: Modality, grid: tuple[int, int, int], offset: int, seconds_per_grid: float = 0.0) -> MediaItem:
    num_patches = grid[0] * grid[1] * grid[2]
    return MediaItem(
        modality=modality,
        identity=ItemIdentity(b"i" * 32),
        grid=grid,
        offset=offset,
        num_slots=num_patches // 4,
        num_patches=num_patches,
        seconds_per_grid=seconds_per_grid,
    )


class _Library:
    """transformers' get_rope_index without weights: it reads nothing but the config."""

    def __init__(self, model_class: type, config: object) -> None:
        self._class, self.config = model_class, config

    def get_vision_position_ids(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self._class.get_vision_position_ids(self, *args, **kwargs)  # type: ignore[attr-defined]

    def positions(self, num_tokens: int, items: list[MediaItem]) -> tuple[np.ndarray, int]:
        types = torch.zeros(1, num_tokens, dtype=torch.int32)
        for entry in items:
            types[0, entry.offset : entry.end] = IMAGE if entry.modality == "image" else VIDEO
        images = [entry.grid for entry in items if entry.modality == "image"]
        videos = [entry for entry in items if entry.modality == "video"]
        timing = {}
        if "tokens_per_second" in self.config.vision_config.to_dict():  # type: ignore[attr-defined]
            timing["second_per_grid_ts"] = torch.tensor([v.seconds_per_grid for v in videos]) if videos else None
        ids, delta = self._class.get_rope_index(  # type: ignore[attr-defined]
            self,
            torch.zeros(1, num_tokens, dtype=torch.int64),
            types,
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor([v.grid for v in videos]) if videos else None,
            **timing,
        )
        return ids[:, 0].numpy(), int(delta)


def qwen2_vl() -> tuple[_Library, MRopeRule]:
    return _Library(Qwen2VLModel, Qwen2VLConfig()), MRopeRule(2)


def qwen2_5_vl(tokens_per_second: int) -> tuple[_Library, MRopeRule]:
    config = Qwen2_5_VLConfig(vision_config={"tokens_per_second": tokens_per_second})
    return _Library(Qwen2_5_VLModel, config), MRopeRule(2, tokens_per_second)


@st.composite
def layouts(draw: st.DrawFn, *, videos: bool) -> tuple[int, list[MediaItem]]:
    """Tokens of a prompt and its items; neighbours of one kind are kept apart by text, as the template does."""
    items: list[MediaItem] = []
    offset = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(0, 4))):
        modality: Modality = "video" if videos and draw(st.booleans()) else "image"
        frames = draw(st.integers(1, 4)) if modality == "video" else 1
        grid = (frames, 2 * draw(st.integers(1, 5)), 2 * draw(st.integers(1, 5)))
        seconds = draw(st.sampled_from(SECONDS))
        items.append(item(modality, grid, offset, seconds if modality == "video" else 0.0))
        offset = items[-1].end + draw(st.integers(1, 4))
    return offset, items


@settings(max_examples=150, deadline=None)
@given(layouts(videos=True), st.sampled_from([1, 2, 4, 25]))
def test_qwen2_5_vl_images_and_videos_equal_the_library(
    layout: tuple[int, list[MediaItem]], tokens_per_second: int
) -> None:
    num_tokens, items = layout
    library, rule = qwen2_5_vl(tokens_per_second)
    expected, delta = library.positions(num_tokens, items)
    positions = rule.positions(num_tokens, items)
    np.testing.assert_array_equal(positions.slice(0, num_tokens), expected)
    np.testing.assert_array_equal(
        positions.slice(num_tokens, num_tokens + 3), np.tile(np.arange(num_tokens, num_tokens + 3) + delta, (3, 1))
    )


@settings(max_examples=100, deadline=None)
@given(layouts(videos=False))
def test_qwen2_vl_images_equal_the_library(layout: tuple[int, list[MediaItem]]) -> None:
    num_tokens, items = layout
    library, rule = qwen2_vl()
    expected, delta = library.positions(num_tokens, items)
    positions = rule.positions(num_tokens, items)
    np.testing.assert_array_equal(positions.slice(0, num_tokens), expected)
    assert positions.slice(num_tokens, num_tokens + 1).tolist() == [[num_tokens + delta]] * 3


def test_the_drawing_of_the_module() -> None:
    positions = MRopeRule(2).positions(10, [item("image", (1, 4, 6), 2)])
    assert positions.slice(0, 10).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert positions.slice(9, 12).tolist() == [[6, 7, 8]] * 3


def test_untimed_video_counts_frames_and_text_goes_on_after_the_longest_axis() -> None:
    positions = MRopeRule(2).positions(6, [item("video", (5, 2, 2), 0)])
    assert positions.slice(0, 6)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert positions.slice(5, 6).tolist() == [[5]] * 3


def test_slices_join_to_the_whole() -> None:
    positions = MRopeRule(2).positions(12, [item("image", (1, 4, 4), 3)])
    whole = positions.slice(0, 20)
    for cut in range(21):
        joined = np.concatenate([positions.slice(0, cut), positions.slice(cut, 20)], axis=1)
        np.testing.assert_array_equal(joined, whole)
    assert whole.dtype == np.int32


def test_text_has_one_axis() -> None:
    positions = TextRule().positions(5, ())
    assert positions.slice(3, 7).tolist() == [[3, 4, 5, 6]]


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_prompt_without_items_counts_up_on_all_axes(num_tokens: int) -> None:
    positions = MRopeRule(2, 4).positions(num_tokens, [])
    assert positions.slice(0, num_tokens + 2).tolist() == [list(range(num_tokens + 2))] * 3
