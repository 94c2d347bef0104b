from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.lm_engine.device_copy import to_device_together

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(SHAPES)
def test_arrays_arrive_whole_and_aligned(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 100 * i for i, shape in enumerate(shapes)]
    moved = to_device_together(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, moved, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.storage_offset() * 4 % 16 == 0
