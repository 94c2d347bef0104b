from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidRequestError
from deployments.preprocessor.mm_options import apply_detail, parse_pixel_limits, server_pixel_limits
from deployments.preprocessor.resize import PixelLimits

BOUNDS = PixelLimits(3136, 1_000_000)


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
    assert parse_pixel_limits(kwargs, BOUNDS) == PixelLimits(*expected)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"no_such_option": 1}, "no_such_option.*min_pixels, max_pixels"),
        ({"max_pixels": 0}, "max_pixels must be"),
        ({"max_pixels": -1}, "max_pixels must be"),
        ({"max_pixels": "100"}, "max_pixels must be"),
        ({"max_pixels": 1.5}, "max_pixels must be"),
        ({"max_pixels": True}, "max_pixels must be"),
        ({"min_pixels": 1_000_000, "max_pixels": 1000}, "1000000.*1000"),
        ({"min_pixels": 2_000_000}, "2000000.*1000000"),
    ],
)
def test_faults_name_the_field(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse_pixel_limits(kwargs, BOUNDS)
    assert caught.value.param is not None
    assert caught.value.param.startswith("mm_processor_kwargs")


@given(
    st.dictionaries(
        st.sampled_from(["min_pixels", "max_pixels", "x"]), st.integers(-5, 10**7) | st.none() | st.text(max_size=3)
    )
)
def test_never_above_the_servers_bound(kwargs: dict[str, Any]) -> None:
    try:
        limits = parse_pixel_limits(kwargs, BOUNDS)
    except InvalidRequestError:
        return
    assert limits.max_pixels <= BOUNDS.max_pixels


def test_detail() -> None:
    assert apply_detail(BOUNDS, "high") == apply_detail(BOUNDS, "auto") == BOUNDS
    assert apply_detail(BOUNDS, "low") == PixelLimits(3136, 512 * 512)
    assert apply_detail(PixelLimits(900_000, 1_000_000), "low") == PixelLimits(512 * 512, 512 * 512)
    assert apply_detail(PixelLimits(1, 100), "low") == PixelLimits(1, 100)


def test_servers_own_bounds() -> None:
    assert server_pixel_limits({}, BOUNDS) == BOUNDS
    assert server_pixel_limits({"max_pixels": 1000}, BOUNDS) == PixelLimits(1000, 1000)
    assert server_pixel_limits({"min_pixels": 2_000_000}, BOUNDS) == PixelLimits(2_000_000, 2_000_000)
    assert server_pixel_limits({"min_pixels": 5, "max_pixels": 9}, BOUNDS) == PixelLimits(5, 9)
