"""Pixels into staging memory: small or large, shared read-only, or not contiguous."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from deployments.vision_encoder.host_copy import copy_bytes


@pytest.mark.parametrize("rows", [3, 3_000])
@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("step", [1, 2])
def test_all_bytes_arrive_without_a_warning(rows: int, writeable: bool, step: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, (rows * step, 588), np.uint8)[::step]
    source.setflags(write=writeable)
    room = np.full((rows + 2, 588), 7, np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy_bytes(room[1:-1], source)
    np.testing.assert_array_equal(room[1:-1], source)
    assert (room[[0, -1]] == 7).all()
    assert source.flags.writeable == writeable
