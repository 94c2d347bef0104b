from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import MediaError
from deployments.preprocessor.resize import (
    PixelLimits,
    check_aspect_ratio,
    make_resizer,
    max_resized_cells,
    smart_resize,
)
from tests.unit.preprocessor.pictures import noise

SIDES = st.integers(1, 4000)
LIMITS = st.tuples(st.integers(1, 10**6), st.integers(0, 10**7)).map(lambda pair: PixelLimits(pair[0], sum(pair)))


@pytest.mark.parametrize("pair", [(0, 5), (6, 5), (-1, -1)])
def test_limits_are_validated(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="min_pixels"):
        PixelLimits(*pair)


@given(height=SIDES, width=SIDES, factor=st.sampled_from([28, 32]), limits=LIMITS)
def test_rule(height: int, width: int, factor: int, limits: PixelLimits) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError, match="200 times"):
            smart_resize(height, width, factor, limits)
        return
    new_height, new_width = smart_resize(height, width, factor, limits)
    assert new_height % factor == new_width % factor == 0
    assert new_height >= factor
    assert new_width >= factor
    assert (new_width, new_height) == smart_resize(width, height, factor, limits)
    assert new_height * new_width <= max_resized_cells(factor, limits) * factor**2


@pytest.mark.parametrize(("size", "ok"), [((200, 1), True), ((1, 200), True), ((201, 1), False), ((2001, 10), False)])
def test_aspect_ratio_limit_is_inclusive(size: tuple[int, int], ok: bool) -> None:
    if ok:
        check_aspect_ratio(*size)
        return
    with pytest.raises(MediaError) as caught:
        check_aspect_ratio(*size)
    assert caught.value.code == "image_aspect_ratio"


@pytest.mark.parametrize(
    ("from_size", "to_size"), [((320, 200), (84, 140)), ((30, 40), (280, 56)), ((56, 56), (56, 56))]
)
def test_resizers_agree_within_two_levels(from_size: tuple[int, int], to_size: tuple[int, int]) -> None:
    pixels = np.asarray(noise(*from_size))
    torch_pixels = make_resizer("torch")(pixels, *to_size)
    pillow_pixels = make_resizer("pillow")(pixels, *to_size)
    assert torch_pixels.shape == pillow_pixels.shape == (*to_size, 3)
    assert torch_pixels.dtype == pillow_pixels.dtype == np.uint8
    assert np.abs(torch_pixels.astype(int) - pillow_pixels).max() <= 2


def test_resizers_leave_their_input_alone() -> None:
    pixels = np.asarray(noise(50, 40)).copy()
    before = pixels.copy()
    for name in ("torch", "pillow"):
        make_resizer(name)(pixels, 28, 28)
    assert np.array_equal(pixels, before)
    assert make_resizer("torch").name != make_resizer("pillow").name
