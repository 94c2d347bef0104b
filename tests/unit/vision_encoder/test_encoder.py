"""The core's failure handling: what is wrong with one item harms no other; memory pressure splits batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from deployments.errors import ContextLengthError, InternalError, InvalidRequestError, OverloadedError
from deployments.vision_encoder.encoder import EncoderCore, MemoryLimit
from deployments.vision_encoder.memory_model import MemoryModel
from tests.unit.vision_encoder.test_graphs import arrays, make_core
from tests.unit.vision_encoder.towers import Want, random_items

WANTS: list[Want] = [("image", (1, 4, 4)), ("image", (1, 4, 6)), ("image", (1, 8, 4)), ("image", (1, 6, 6))]


class Saboteur:
    """Wraps an adapter's forward: raises if the batch holds the marked pixel value, or more rows than allowed."""

    def __init__(self, core: EncoderCore, error: Exception, poison: int | None = None, most_rows: int = 10**9) -> None:
        self.forward, self.error, self.poison, self.most_rows = core.adapter.forward, error, poison, most_rows
        core.adapter.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, path: str, inputs: Mapping[str, torch.Tensor], longest: int) -> torch.Tensor:
        patches = inputs["patches"]
        if self.poison is not None and bool((patches == self.poison).all(dim=1).any()):
            raise self.error
        if len(patches) > self.most_rows:
            raise self.error
        return self.forward(path, inputs, longest)


def test_a_poisoned_item_fails_alone() -> None:
    core = make_core()
    items = random_items(core.adapter, WANTS)
    expected = arrays(core.encode_all(items))
    items[2].patches[0] = 255
    Saboteur(core, RuntimeError("bad kernel"), poison=255)
    results = core.encode_all(items)
    assert isinstance(results[2], InternalError)
    for position in (0, 1, 3):
        np.testing.assert_allclose(results[position], expected[position], atol=1e-6)
    assert core.stats.isolated_items == len(items)


def test_out_of_memory_halves_the_batch() -> None:
    core = make_core()
    items = random_items(core.adapter, WANTS)
    expected = arrays(core.encode_all(items))
    Saboteur(core, torch.OutOfMemoryError("no room"), most_rows=60)
    for a, b in zip(arrays(core.encode_all(items)), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert core.stats.batch_failures["out_of_memory"] > 0


def test_an_item_that_never_fits_in_memory_is_overload_and_the_rest_is_served() -> None:
    core = make_core()
    items = random_items(core.adapter, WANTS)
    Saboteur(core, torch.OutOfMemoryError("no room"), most_rows=32)
    results = core.encode_all(items)
    assert [isinstance(result, OverloadedError) for result in results] == [False, False, False, True]


def test_a_failing_static_pass_is_run_again_eagerly() -> None:
    core = make_core(static_buffers_on_cpu=True, encoder_cudagraph_token_budgets=(64,))
    (item,) = random_items(core.adapter, [("image", (1, 4, 4))])
    (expected,) = arrays(core.encode_all([item]))
    Saboteur(core, torch.OutOfMemoryError("no room"), most_rows=100)  # the padded pass has 256 rows
    (result,) = arrays(core.encode_all([item]))
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_batches_keep_to_the_memory_budget_and_one_item_over_it_is_refused() -> None:
    core = make_core()
    core.memory = MemoryLimit(model=MemoryModel(0.0, 10.0), limit_bytes=400)
    items = random_items(core.adapter, [("image", (1, 4, 4))] * 5 + [("image", (1, 8, 8))])
    results = core.encode_all(items)
    arrays(results[:5])
    assert core.stats.batch_items == {2: 2, 1: 1}
    error = results[5]
    assert isinstance(error, ContextLengthError)
    assert "640 bytes" in error.message
    assert "400" in error.message
    assert core.stats.predicted_peak_bytes == 320


@pytest.mark.parametrize("grid", [(1, 3, 4), (0, 4, 4), (1, 0, 4), (2, 4, 4)])
def test_grids_that_the_model_cannot_take_are_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="grid"):
        make_core().describe("image", grid)
