"""Options, ladders, costs and the memory model: what is decided before the first request."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.costs import EagerCost
from deployments.vision_encoder.ladder import make_ladder
from deployments.vision_encoder.memory_model import MemoryPoint, fit_memory_model


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
    assert make_ladder(64, 32) == (32,)
    assert make_ladder(64, 1024, explicit=(512, 100)) == (100, 512)
    with pytest.raises(ValueError, match="2048"):
        make_ladder(64, 1024, explicit=(2048,))


@given(st.integers(1, 200), st.integers(1, 20_000), st.sampled_from([1, 2, 4]), st.integers(1, 300))
def test_a_ladder_is_ascending_in_steps_and_reaches_the_top(low: int, high: int, steps: int, step: int) -> None:
    ladder = make_ladder(low, high, steps_per_octave=steps, slot_step=step)
    assert list(ladder) == sorted(set(ladder))
    assert all(budget % step == 0 and 0 < budget <= high for budget in ladder)
    if high >= step:
        assert ladder[-1] == high // step * step


def test_eager_cost_interpolates_and_extends() -> None:
    cost = EagerCost(((100, 1.0), (200, 2.0), (400, 6.0)))
    assert [cost(slots) for slots in (1, 100, 150, 200, 300, 400, 500)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert EagerCost(((100, 1.0),))(300) == 3.0
    with pytest.raises(ValueError, match="ascending"):
        EagerCost(((200, 1.0), (100, 2.0)))


def test_noise_never_makes_more_work_look_cheaper() -> None:
    cost = EagerCost(((100, 2.0), (200, 1.0)))
    assert cost(150) == cost(300) == 2.0 or cost(150) >= 1.0


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
