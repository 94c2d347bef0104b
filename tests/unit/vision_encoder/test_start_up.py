"""Options, ladders, costs and the memory model: what is decided before the first request."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.vision_encoder.adapters.qwen_vl import usual_slots
from deployments.vision_encoder.calibrate import eager_sizes
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.costs import PassCost, fit_pair_seconds, fit_pass_cost
from deployments.vision_encoder.ladder import make_ladder
from deployments.vision_encoder.memory_model import MemoryPoint, fit_memory_model
from deployments.vision_encoder.packing import Load


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("load_format", "pickle"),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("mm_encoder_attn_backend", "magic"),
        ("max_batch_patches", 0),
        ("max_wait_s", -0.1),
        ("batch_memory_fraction", 0.0),
        ("batch_memory_fraction", 1.1),
        ("encoder_cudagraph_steps_per_octave", 3),
        ("encoder_cudagraph_token_budgets", (64, 64)),
        ("encoder_cudagraph_token_budgets", (0,)),
        ("encoder_cudagraph_max_frames_per_batch", -1),
        ("cache_bytes", -1),
        ("colocated_share", 0.0),
        ("colocated_share", 1.5),
        ("colocated_pass_s", 0.0),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_value(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option) as caught:
        EncoderConfig(model="m", **{option: value})  # type: ignore[arg-type]
    assert str(list(value) if isinstance(value, tuple) else value) in str(caught.value)


def test_options_are_frozen_and_lists_become_tuples() -> None:
    config = EncoderConfig(model="m", encoder_cudagraph_token_budgets=[64, 128])  # type: ignore[arg-type]
    assert config.encoder_cudagraph_token_budgets == (64, 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "cpu"  # type: ignore[misc]


def test_ladders() -> None:
    assert make_ladder(64, 1024) == (64, 128, 256, 512, 1024)
    assert make_ladder(64, 1000) == (64, 128, 256, 512, 1000)
    assert make_ladder(64, 256, steps_per_octave=4) == (64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert make_ladder(100, 800, slot_step=100) == (100, 200, 400, 800)
    assert make_ladder(64, 128, steps_per_octave=8) == (64, 72, 80, 88, 96, 104, 112, 120, 128)
    assert make_ladder(64, 32) == (32,)
    assert make_ladder(64, 512, usual=(7, 144, 128, 300, 2_000)) == (64, 128, 144, 256, 300, 512)
    assert make_ladder(100, 800, slot_step=100, usual=(150, 300)) == (100, 200, 300, 400, 800)
    assert make_ladder(64, 1024, explicit=(512, 100)) == (100, 512)
    with pytest.raises(ValueError, match="2048"):
        make_ladder(64, 1024, explicit=(2048,))


def test_usual_pictures_have_budgets_of_their_own() -> None:
    """As the processors round them: 1024 x 1024 becomes 1036 x 1036, 37 slots of 28 pixels a side."""
    assert {64, 144, 256, 324, 576, 729, 1_024, 1_369, 46 * 26, 69 * 39} <= set(usual_slots(28))


@given(st.integers(1, 200), st.integers(1, 20_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300))
def test_a_ladder_is_ascending_in_steps_and_reaches_the_top(low: int, high: int, steps: int, step: int) -> None:
    ladder = make_ladder(low, high, steps_per_octave=steps, slot_step=step)
    assert list(ladder) == sorted(set(ladder))
    assert all(budget % step == 0 and 0 < budget <= high for budget in ladder)
    if high >= step:
        assert ladder[-1] == high // step * step


def many(slots: int, pairs: int = 0) -> Load:
    return Load(slots, slots * 4, pairs=pairs)


def test_pass_cost_interpolates_and_extends() -> None:
    cost = PassCost(((100, 1.0), (200, 2.0), (400, 6.0)))
    assert [cost(many(slots)) for slots in (1, 100, 150, 200, 300, 400, 500)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert PassCost(((100, 1.0),)).curve_s(300) == 3.0
    assert PassCost(((100, 1.0),), pair_s=0.5)(many(100, pairs=4)) == 3.0


@pytest.mark.parametrize("points", [(), ((200, 1.0), (100, 2.0)), ((100, 2.0), (200, 1.0)), ((1, 1.0), (1, 1.0))])
def test_pass_cost_refuses_points_that_are_none(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        PassCost(points)


@given(
    st.lists(st.tuples(st.integers(1, 4_000), st.floats(0, 10)), min_size=1, max_size=10),
    st.floats(0, 1e-6),
    st.integers(1, 5_000),
    st.integers(1, 5_000),
)
def test_more_work_never_looks_cheaper(measured: list[tuple[int, float]], pair_s: float, few: int, more: int) -> None:
    cost = fit_pass_cost([(many(slots, slots**2), seconds) for slots, seconds in measured], pair_s)
    few, more = sorted((few, more))
    assert cost(many(few, few**2)) <= cost(many(more, more**2)) + 1e-9


def test_a_disturbed_measurement_is_taken_from_its_neighbour() -> None:
    cost = fit_pass_cost([(many(100), 1.0), (many(200), 9.0), (many(300), 3.0)], 0.0)
    assert cost.points == ((100, 1.0), (200, 3.0), (300, 3.0))


@given(st.floats(1e-4, 1e-2), st.floats(0, 1e-5), st.floats(0, 1e-9), st.integers(1, 4_000), st.integers(0, 10**7))
def test_a_cost_of_this_form_is_found_again(fixed: float, slot_s: float, pair_s: float, slots: int, pairs: int) -> None:
    def true_s(load: Load) -> float:
        return fixed + slot_s * load.slots + pair_s * load.pairs

    one, split = many(4_000, 16_000**2), many(4_000, 62 * 256**2)
    found = fit_pair_seconds((one, true_s(one)), (split, true_s(split)))
    cost = fit_pass_cost([(load, true_s(load)) for load in (many(1), split)], found)
    assert cost(many(slots, pairs)) == pytest.approx(true_s(many(slots, pairs)), rel=1e-3)


def test_a_pair_costs_nothing_where_noise_says_less() -> None:
    assert fit_pair_seconds((many(10, 100), 1.0), (many(10, 20), 2.0)) == 0.0
    assert fit_pair_seconds((many(10, 20), 2.0), (many(10, 20), 1.0)) == 0.0


@given(st.sets(st.integers(1, 500), min_size=1), st.integers(1, 40))
def test_eager_sizes_are_few_and_hold_both_ends(ladder: set[int], step: int) -> None:
    slots = [budget * step for budget in ladder]
    sizes = eager_sizes(slots, step)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (min(slots), max(slots))
    assert all(size % step == 0 for size in sizes)
    assert len(sizes) <= (max(slots) // min(slots)).bit_length() + 1


def test_a_linear_memory_use_is_found_again() -> None:
    points = [MemoryPoint(p, q, 1_000 + 30 * p + 7 * q) for p in (100, 500, 2_000) for q in (p, p // 4)]
    model = fit_memory_model(points)
    assert model.predict_bytes(10_000, 2_000) == pytest.approx(1_000 + 300_000 + 14_000, rel=1e-6)


@given(
    st.lists(
        st.builds(MemoryPoint, st.integers(1, 10_000), st.integers(1, 10_000), st.integers(0, 10**9)),
        min_size=2,
        max_size=8,
    )
)
def test_no_measured_point_lies_above_the_model(points: list[MemoryPoint]) -> None:
    model = fit_memory_model(points)
    assert model.bytes_per_patch >= 0
    assert model.bytes_per_longest_patch >= 0
    for point in points:
        assert model.predict_bytes(point.patches, point.longest_patches) >= point.peak_bytes - 2


def test_one_point_is_no_model() -> None:
    with pytest.raises(ValueError, match="two"):
        fit_memory_model([MemoryPoint(1, 1, 1)])
