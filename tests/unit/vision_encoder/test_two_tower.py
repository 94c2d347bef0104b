"""Several paths in one model: each is packed, replayed, skipped and falls back on its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deployments.errors import InvalidRequestError
from deployments.vision_encoder.adapters.two_tower import TwoTowerAdapter, TwoTowerShape, random_two_tower
from deployments.vision_encoder.attention import SdpaMasked, SdpaSegments
from deployments.vision_encoder.build import prepare_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.packing import Capacity
from tests.unit.vision_encoder.test_graphs import arrays, scripted
from tests.unit.vision_encoder.towers import Want, random_items

SHAPE = TwoTowerShape(view_side=4, tile_side=3, row=12, width=16, heads=2, out_width=20)
LIMIT = Capacity(slots=128, patches=256, items=16, segments=0, frames=64)


def make(*, static: bool, masked: bool = False, **options: object) -> EncoderCore:
    config = EncoderConfig(
        model="two",
        device="cpu",
        static_buffers_on_cpu=static,
        capture_progress=False,
        encoder_cudagraph_steps_per_octave=1,
        **options,  # type: ignore[arg-type]
    )
    return prepare_core(
        config, random_two_tower(SHAPE, SdpaMasked() if masked else SdpaSegments()), LIMIT, measure=scripted()
    )


def alone(adapter: TwoTowerAdapter, wants: Sequence[Want]) -> list[np.ndarray]:
    core = EncoderCore(adapter, LIMIT)
    return [arrays(core.encode_all([item]))[0] for item in random_items(adapter, wants)]


MIXED: list[Want] = [("image", (1, 2, 2)), ("image", (1, 0, 0)), ("image", (1, 1, 3)), ("image", (1, 0, 0))]


@pytest.mark.parametrize("masked", [False, True])
def test_mixed_pictures_equal_each_alone(masked: bool) -> None:
    core = make(static=True, masked=masked)
    results = arrays(core.encode_all(random_items(core.adapter, MIXED)))
    assert isinstance(core.adapter, TwoTowerAdapter)
    for result, expected in zip(results, alone(core.adapter, MIXED), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)
    assert {path for path, _ in core.stats.graph_replays} == {"global", "local"}
    assert core.stats.items == {"global": 4, "local": 2}


def test_results_have_lines_view_and_separator() -> None:
    core = make(static=False)
    (plain, tiled) = arrays(core.encode_all(random_items(core.adapter, [("image", (1, 0, 0)), ("image", (1, 2, 1))])))
    assert plain.shape == (17, 20)
    assert tiled.shape == (17 + 6 * 4, 20)
    np.testing.assert_array_equal(plain[-1], tiled[-1])
    newlines = tiled[3:24:4]
    assert len(newlines) == 6
    np.testing.assert_array_equal(newlines, np.broadcast_to(newlines[0], newlines.shape))


def test_a_path_without_work_is_skipped() -> None:
    core = make(static=True)
    arrays(core.encode_all(random_items(core.adapter, [("image", (1, 0, 0))] * 3)))
    assert {path for path, _ in core.stats.invocations} == {"global"}


def test_one_path_falls_back_while_the_other_replays() -> None:
    core = make(static=True, encoder_cudagraph_max_budget=32)
    items = random_items(core.adapter, [("image", (1, 3, 4))])  # 108 local slots, over its ladder
    arrays(core.encode_all(items))
    assert set(core.stats.invocations) == {("global", "static"), ("local", "eager")}
    assert core.stats.eager_fallbacks == {"slots": 1}


@pytest.mark.parametrize("grid", [(1, 0, 1), (2, 1, 1), (1, -1, -1)])
def test_impossible_tilings_are_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequestError):
        make(static=False).describe("image", grid)
