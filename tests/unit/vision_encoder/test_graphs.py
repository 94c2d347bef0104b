"""The ladder of static buffers, on CPU: padding, borders and slicing give what an eager pass gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.build import build_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.costs import PassCost
from deployments.vision_encoder.encoder import EncoderCore, Rows
from deployments.vision_encoder.forward import InputBuffers
from deployments.vision_encoder.graphs import GraphManager
from deployments.vision_encoder.packing import Load
from deployments.vision_encoder.weights import DummyWeights
from tests.unit.vision_encoder.towers import Want, random_items, vision_config

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MIXED: list[Want] = [
    ("image", (1, 8, 8)),
    ("image", (1, 2, 2)),
    ("video", (3, 4, 6)),
    ("image", (1, 10, 14)),
    ("video", (1, 4, 4)),
    ("image", (1, 6, 4)),
    ("image", (1, 16, 18)),
]


def scripted(costs: Sequence[float] = (1e-3,)) -> Callable[[Callable[[], object]], float]:
    """Calls once and answers costs in turn: no test depends on time."""
    turns = itertools.cycle(costs)

    def measure(call: Callable[[], object]) -> float:
        call()
        return next(turns)

    return measure


def make_core(model_type: str = "qwen2_5_vl", **options: object) -> EncoderCore:
    settings: dict[str, object] = {
        "device": "cpu",
        "max_batch_slots": 256,
        "max_batch_patches": 1_024,
        "capture_progress": False,
        "encoder_cudagraph_steps_per_octave": 1,
    }
    return build_core(
        EncoderConfig(model="tiny", **(settings | options)),  # type: ignore[arg-type]
        {"model_type": model_type, "vision_config": vision_config(model_type)},
        DummyWeights(torch.device("cpu"), std=0.1),
        measure=scripted(),
    )


WINDOWED = make_core("qwen2_5_vl")


def arrays(results: Sequence[Rows | Exception]) -> list[np.ndarray]:
    assert all(isinstance(result, np.ndarray) for result in results), results
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["sdpa_segments", "sdpa_masked"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_static_buffers_equal_eager(model_type: str, backend: str) -> None:
    eager = make_core(model_type, mm_encoder_attn_backend=backend)
    static = make_core(model_type, mm_encoder_attn_backend=backend, static_buffers_on_cpu=True)
    items = random_items(eager.adapter, MIXED)
    for a, b in zip(arrays(static.encode_all(items)), arrays(eager.encode_all(items)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert static.stats.graph_replays
    assert sum(static.stats.padded_slots.values()) > 0
    assert {mode for _, mode in eager.stats.invocations} == {"eager"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_equal_totals_cut_differently_are_both_right(model_type: str) -> None:
    """Borders are inputs of the pass: 64 slots as one, two, or four items, back and forth over the same buffers."""
    static = make_core(model_type, static_buffers_on_cpu=True, encoder_cudagraph_token_budgets=(64,))
    eager = make_core(model_type)
    cuts: list[list[Want]] = [
        [("image", (1, 16, 16))],
        [("image", (1, 8, 16)), ("image", (1, 16, 8))],
        [("image", (1, 8, 8))] * 4,
        [("image", (1, 4, 64))],
    ]
    for wants in cuts + cuts[::-1]:
        items = random_items(eager.adapter, wants, seed=len(wants))
        for a, b in zip(arrays(static.encode_all(items)), arrays(eager.encode_all(items)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    assert static.stats.graph_replays["image", 64] > 4


def test_nothing_of_an_earlier_batch_is_left_in_the_buffers() -> None:
    static = make_core(static_buffers_on_cpu=True, encoder_cudagraph_token_budgets=(64,))
    (small,) = random_items(static.adapter, [("image", (1, 4, 4))])
    (first,) = arrays(static.encode_all([small]))
    static.encode_all(random_items(static.adapter, [("image", (1, 16, 16))], seed=3))
    (again,) = arrays(static.encode_all([small]))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_filling_used_buffers_leaves_what_filling_new_ones_does(model_type: str) -> None:
    adapter = make_core(model_type).adapter
    capacity = adapter.capacity("image", 64, 4, 4)
    used, new = InputBuffers(adapter, "image", capacity), InputBuffers(adapter, "image", capacity)
    (small,) = random_items(adapter, [("image", (1, 4, 4))])
    used.fill(random_items(adapter, [("image", (1, 16, 16))], seed=3))
    used.fill([small])
    new.fill([small])
    for name, tensor in new.device.items():
        assert torch.equal(used.device[name], tensor), name


def test_results_stay_as_they_are_when_the_buffers_are_used_again() -> None:
    static = make_core(static_buffers_on_cpu=True)
    (a, b) = random_items(static.adapter, [("image", (1, 8, 8)), ("image", (1, 8, 8))])
    (kept,) = arrays(static.encode_all([a]))
    before = kept.copy()
    static.encode_all([b])
    np.testing.assert_array_equal(kept, before)


def test_buffers_keep_their_identity() -> None:
    core = make_core()
    capacity = core.adapter.capacity("image", 64, 4, 4)
    manager = GraphManager(core.adapter, "image", [capacity], capture=False)
    manager.prepare(scripted())
    inputs = manager._captured[64].inputs
    addresses = {name: tensor.data_ptr() for name, tensor in inputs.device.items()}
    manager.run(random_items(core.adapter, [("image", (1, 8, 8))]), 64)
    assert {name: tensor.data_ptr() for name, tensor in inputs.device.items()} == addresses


def test_over_the_ladder_runs_eagerly_and_is_counted_by_reason() -> None:
    core = make_core(
        static_buffers_on_cpu=True,
        encoder_cudagraph_token_budgets=(64,),
        encoder_cudagraph_max_frames_per_batch=2,
    )
    items = random_items(core.adapter, [("image", (1, 20, 20)), ("video", (4, 4, 4)), ("image", (1, 8, 8))])
    for item in items:
        arrays(core.encode_all([item]))
    assert core.stats.eager_fallbacks == {"slots": 1, "frames": 1}
    assert core.stats.graph_replays == {("image", 64): 1}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6))
def test_a_budget_has_room_for_the_windows_of_whatever_fits_it_otherwise(sizes: list[tuple[int, int, int]]) -> None:
    adapter = WINDOWED.adapter
    loads = [adapter.describe("video", (t, 2 * h, 2 * w)).loads["video"] for t, h, w in sizes]
    total = sum(loads, Load())
    assert adapter.capacity("video", total.slots, len(loads), total.frames).shortage(total, len(loads)) is None


def test_a_budget_slower_than_eager_is_off() -> None:
    core = make_core()
    capacities = [core.adapter.capacity("image", slots, 4, 4) for slots in (16, 64)]
    manager = GraphManager(core.adapter, "image", capacities, capture=False)
    manager.prepare(scripted([5.0, 1.0]), PassCost(((1, 2.0), (2, 2.0))))  # largest first: 64 takes 5 s
    assert [budget.capacity.slots for budget in manager.budgets] == [16]


def test_a_budget_that_was_disturbed_costs_no_more_than_a_larger_one() -> None:
    core = make_core()
    capacities = [core.adapter.capacity("image", slots, 4, 4) for slots in (16, 64)]
    manager = GraphManager(core.adapter, "image", capacities, capture=False)
    manager.prepare(scripted([1.0, 5.0]))
    assert [budget.cost_s for budget in manager.budgets] == [1.0, 1.0]


def test_pairs_are_not_part_of_what_a_budget_costs_at_all() -> None:
    core = make_core()
    manager = GraphManager(core.adapter, "image", [core.adapter.capacity("image", 64, 1, 1)], capture=False)
    manager.prepare(scripted([1.0]), PassCost(((64, 2.0),), pair_s=1e-6))
    (budget,) = manager.budgets
    (whole,) = (core.adapter.describe("image", (1, 16, 16)).loads["image"],)
    assert budget.cost_s == pytest.approx(1.0 - 1e-6 * 256**2)
    assert budget.replay_s(whole) == pytest.approx(1.0)


def test_all_budgets_share_their_input_memory() -> None:
    core = make_core()
    capacities = [core.adapter.capacity("image", slots, 4, 4) for slots in (16, 64)]
    manager = GraphManager(core.adapter, "image", capacities, capture=False)
    manager.prepare(scripted())
    inputs = [manager._captured[slots].inputs for slots in (16, 64)]
    assert len({buffers.device["patches"].data_ptr() for buffers in inputs}) == 1
    assert manager.input_bytes == max(buffers.nbytes for buffers in inputs)


def test_no_video_budgets_if_no_frames_may_be_captured() -> None:
    core = make_core(static_buffers_on_cpu=True, encoder_cudagraph_max_frames_per_batch=0)
    arrays(core.encode_all(random_items(core.adapter, [("video", (2, 4, 4)), ("image", (1, 8, 8))])))
    assert set(core.stats.invocations) == {("video", "eager"), ("image", "static")}


def test_a_host_reading_backend_cannot_be_captured() -> None:
    core = make_core()
    with pytest.raises(ValueError, match="captured"):
        GraphManager(core.adapter, "image", [], capture=True)


def test_a_one_frame_video_may_come_without_temporal_copies() -> None:
    core = make_core()
    (picture,) = random_items(core.adapter, [("image", (1, 8, 8))])
    video = VisionItem("video", picture.grid, picture.patches)
    a, b = arrays(core.encode_all([picture, video]))
    np.testing.assert_allclose(a, b, atol=1e-6)
