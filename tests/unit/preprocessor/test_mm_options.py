from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidRequestError
from deployments.preprocessor.media import MediaOptions
from deployments.preprocessor.mm_options import apply_detail, parse_media_options, server_pixel_limits
from deployments.preprocessor.resize import PixelLimits

BOUNDS = PixelLimits(3136, 1_000_000)
DEFAULTS = MediaOptions(image_limits=BOUNDS, frame_limits=PixelLimits(100_000, 600_000), fps=2.0)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, (3136, 1_000_000)),
        ({"max_pixels": 50_176}, (3136, 50_176)),
        ({"max_pixels": 10}, (10, 10)),
        ({"max_pixels": 10**12}, (3136, 1_000_000)),
        ({"min_pixels": 500_000}, (500_000, 1_000_000)),
        ({"min_pixels": 5, "max_pixels": 6}, (5, 6)),
    ],
)
def test_limits(kwargs: dict[str, Any], expected: tuple[int, int]) -> None:
    options = parse_media_options(kwargs, DEFAULTS)
    assert options.image_limits == PixelLimits(*expected)
    assert options.frame_limits == (options.image_limits if kwargs else DEFAULTS.frame_limits)


def test_video_options() -> None:
    assert parse_media_options({"fps": 1.5}, DEFAULTS).fps == 1.5
    assert parse_media_options({"num_frames": 8}, DEFAULTS).num_frames == 8
    assert parse_media_options({"fps": 1}, DEFAULTS).image_limits == BOUNDS


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"no_such_option": 1}, "no_such_option.*min_pixels, max_pixels"),
        ({"max_pixels": 0}, "max_pixels must be"),
        ({"max_pixels": -1}, "max_pixels must be"),
        ({"max_pixels": "100"}, "max_pixels must be"),
        ({"max_pixels": 1.5}, "max_pixels must be"),
        ({"fps": 0}, "fps must be"),
        ({"fps": float("nan")}, "fps must be"),
        ({"fps": 61}, "fps must be"),
        ({"num_frames": 0}, "num_frames must be"),
        ({"num_frames": 3, "fps": 2}, "exclude each other"),
        ({"max_pixels": True}, "max_pixels must be"),
        ({"min_pixels": 1_000_000, "max_pixels": 1000}, "1000000.*1000"),
        ({"min_pixels": 2_000_000}, "2000000.*1000000"),
    ],
)
def test_faults_name_the_field(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse_media_options(kwargs, DEFAULTS)
    assert caught.value.param is not None
    assert caught.value.param.startswith("mm_processor_kwargs")


@given(
    st.dictionaries(
        st.sampled_from(["min_pixels", "max_pixels", "x"]), st.integers(-5, 10**7) | st.none() | st.text(max_size=3)
    )
)
def test_never_above_the_servers_bound(kwargs: dict[str, Any]) -> None:
    try:
        limits = parse_media_options(kwargs, DEFAULTS).image_limits
    except InvalidRequestError:
        return
    assert limits.max_pixels <= BOUNDS.max_pixels


def test_detail() -> None:
    def low(limits: PixelLimits) -> PixelLimits:
        return apply_detail(replace(DEFAULTS, image_limits=limits), "low").image_limits

    assert apply_detail(DEFAULTS, "high") == apply_detail(DEFAULTS, "auto") == DEFAULTS
    assert low(BOUNDS) == PixelLimits(3136, 512 * 512)
    assert low(PixelLimits(900_000, 1_000_000)) == PixelLimits(512 * 512, 512 * 512)
    assert low(PixelLimits(1, 100)) == PixelLimits(1, 100)


def test_servers_own_bounds() -> None:
    assert server_pixel_limits({}, BOUNDS) == BOUNDS
    assert server_pixel_limits({"max_pixels": 1000}, BOUNDS) == PixelLimits(1000, 1000)
    assert server_pixel_limits({"min_pixels": 2_000_000}, BOUNDS) == PixelLimits(2_000_000, 2_000_000)
    assert server_pixel_limits({"min_pixels": 5, "max_pixels": 9}, BOUNDS) == PixelLimits(5, 9)
