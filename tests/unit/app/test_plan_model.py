"""Sizes of models, curves, times of stages, and rates made of benchmark results."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.planning.curve import Curve, fit_rising
from app.planning.errors import PlanError
from app.planning.rates import parse_rates
from app.planning.results import make_rates
from app.planning.shape import read_shape, shape_of
from app.planning.splits import EngineOptions, engine_memory
from app.planning.stage_times import StageTimes
from tests.tiny_models import Family, save_tiny_model
from tests.unit.app.plan_rig import measured_shape, measured_times, shipped_rates

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tests" / "bench" / "results"
FILES = {
    "engine": RESULTS / "engine_h200.json",
    "encoder": RESULTS / "encoder_h200.json",
    "stages": RESULTS / "stages_2026-11-30.json",
    "scheduler": RESULTS / "scheduler_2026-11-30.json",
    "transfer": RESULTS / "transfer.json",
}


# -- sizes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_counted_weights_are_those_of_the_files(family: Family, tied: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    weighed = read_shape(folder, "tiny")
    counted = shape_of(json.loads((folder / "config.json").read_text()), "tiny")
    assert weighed.weighed
    assert not counted.weighed
    # Norms and biases are left out; in models so small they are a few hundredths.
    assert counted.decoder_bytes == pytest.approx(weighed.decoder_bytes, rel=0.05)
    assert counted.tower_bytes == pytest.approx(weighed.tower_bytes, rel=0.06)
    assert counted.decoder_bytes <= weighed.decoder_bytes
    assert counted.tower_bytes <= weighed.tower_bytes


def test_the_7b_shape_has_its_published_size() -> None:
    shape = measured_shape()
    assert shape.decoder.num_params == pytest.approx(7.62e9, rel=0.01)
    assert shape.tower.num_params == pytest.approx(0.676e9, rel=0.02)
    assert shape.decoder.kv_bytes_per_token == 57_344
    assert (shape.tower.unit, shape.tower.row_bytes, shape.tower.patch_bytes) == (4, 7168, 588)


def test_experts_are_read_as_rows_meet_them() -> None:
    config = {
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "head_dim": 16,
            "max_position_embeddings": 1000, "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64},
    }  # fmt: skip
    decoder = shape_of(config, "experts").decoder
    expert_bytes = 2 * 4 * 3 * 64 * 24
    assert decoder.read_bytes(1) == pytest.approx(decoder.read_bytes(0) + 2 * expert_bytes)
    assert decoder.read_bytes(1e6) == pytest.approx(decoder.read_bytes(0) + 8 * expert_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "no vision_config"),
        ({"hidden_size": 0}, "no usable hidden_size: 0"),
        ({"model_type": "llava"}, "model_type 'llava' is not known"),
        ({"torch_dtype": "int3"}, "dtype is 'int3'"),
    ],
)
def test_a_config_that_says_too_little_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        shape_of({**shipped_rates().config, **change}, "m")


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shipped_rates().config))
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0[1,2]")
    with pytest.raises(PlanError, match=r"model\.safetensors is no safetensors file"):
        read_shape(tmp_path, "m")


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"does not fit a GPU of 16 GiB.*14\.\d GiB of weights.*tensor_parallel_size"):
        engine_memory(shipped_rates(), measured_shape(), EngineOptions(), 16.0, colocated=False)


def test_a_colocated_encoder_takes_room_from_the_cache() -> None:
    rates, shape = shipped_rates(), measured_shape()
    apart, together = (
        engine_memory(rates, shape, EngineOptions(), 139.0, colocated=colocated) for colocated in (False, True)
    )
    taken = (apart.kv_tokens - together.kv_tokens) * shape.decoder.kv_bytes_per_token
    assert taken == pytest.approx(together.encoder_bytes, rel=0.001)
    assert together.encoder_bytes > shape.tower_bytes


# -- curves -----------------------------------------------------------------------------------------------------------
points = st.lists(
    st.tuples(st.integers(1, 10_000).map(float), st.floats(1e-6, 10.0)),
    min_size=1,
    max_size=12,
    unique_by=lambda p: p[0],
)


@given(points, st.lists(st.floats(0.0, 20_000.0), min_size=2, max_size=8))
def test_a_fitted_curve_never_falls(measured: list[tuple[float, float]], xs: list[float]) -> None:
    curve = fit_rising(measured)
    values = [curve(x) for x in sorted(xs)]
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(values))
    assert min(y for _, y in measured) * (1 - 1e-9) <= curve(0.0)


@given(points)
def test_points_that_rise_are_gone_through(measured: list[tuple[float, float]]) -> None:
    rising = list(zip(sorted(x for x, _ in measured), sorted(y for _, y in measured), strict=True))
    curve = fit_rising(rising)
    assert [curve(x) for x, _ in rising] == pytest.approx([y for _, y in rising])


def test_a_curve_goes_on_as_it_ended() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 3.0)))
    assert [curve(x) for x in (0.0, 10.0, 15.0, 30.0)] == [1.0, 1.0, 2.0, 5.0]


# -- times ------------------------------------------------------------------------------------------------------------
def test_the_measured_model_takes_what_was_measured() -> None:
    times = measured_times()
    assert times.scaling.is_none
    for point in shipped_rates().engine.steps:
        decode = point.new_tokens == 1
        found = times.step_s(
            point.sequences * point.new_tokens,
            point.sequences * point.context_tokens if decode else 0,
            0.0 if decode else point.sequences * point.new_tokens**2 / 2,
        )
        assert found == pytest.approx(point.seconds, rel=0.09), point
    for slots, items, seconds in ((64, 1, 1.871e-3), (576, 4, 7.733e-3), (529, 1, 8.003e-3), (1369, 1, 18.83e-3)):
        load = times.load_of(slots)
        assert times.rules.choose(load, items)[0] == pytest.approx(seconds, rel=0.05)


def test_passes_larger_than_measured_are_no_better() -> None:
    times = measured_times()
    largest = max(point.slots for point in shipped_rates().encoder.eager)
    one, three = (times.rules.eager_cost_s(times.load_of(slots)) for slots in (largest, 3 * largest - 1000))
    assert three / (3 * largest - 1000) == pytest.approx(one / largest)


def test_twice_the_layers_take_twice_as_long() -> None:
    config = dict(shipped_rates().config)
    config["num_hidden_layers"] *= 2
    config["vocab_size"] *= 2
    times, one = StageTimes(shipped_rates(), shape_of(config, "double")), measured_times()
    for rows, context, pairs in ((1, 0, 0.0), (64, 64_000, 0.0), (2000, 0, 2e6)):
        assert times.step_s(rows, context, pairs) == pytest.approx(2 * one.step_s(rows, context, pairs), rel=1e-6)
    assert times.pass_s(times.load_of(144), 1) == pytest.approx(one.pass_s(one.load_of(144), 1))
    assert not times.scaling.is_none


def test_a_tiny_model_is_bound_by_the_host() -> None:
    shape = read_shape(ROOT / "serve_configs" / "demo_model", "demo")
    times = StageTimes(shipped_rates(), shape)
    assert times.step_s(1, 100, 0.0) == shipped_rates().engine.host_step_s


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=20))
def test_a_round_of_many_is_never_quicker_than_one_of_them(slots: list[int]) -> None:
    times = measured_times()
    loads = [times.load_of(each) for each in slots]
    batches = times.passes(loads)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(slots)))
    total_s = sum(times.pass_s(batch.load, len(batch.indices)) for batch in batches)
    assert total_s >= max(times.rules.choose(load, 1)[0] for load in loads) * (1 - 1e-9)


# -- rates from results -----------------------------------------------------------------------------------------------
def test_the_shipped_rates_are_those_of_the_results() -> None:
    shipped = shipped_rates()
    made = make_rates(FILES, shipped.config, shipped.model, shipped.gpu_memory_gib)
    assert json.loads(json.dumps(asdict(made))) == json.loads(json.dumps(asdict(shipped)))


def changed(tmp_path: Path, part: str, change: dict[str, Any]) -> dict[str, Path]:
    values = json.loads(FILES[part].read_text())
    values["parts"].update(change)
    path = tmp_path / f"{part}.json"
    path.write_text(json.dumps(values))
    return FILES | {part: path}


def test_kernels_say_how_fast_the_cache_is_read(tmp_path: Path) -> None:
    kernels = {
        "decode attention, batch 1": {"layer_ms": 0.02, "gib_per_s": 300.0},
        "decode attention, batch 256": {"layer_ms": 0.2, "gib_per_s": 2000.0},
        "prefill attention": {"layer_ms": 0.1, "tflop_per_s": 400.0},
    }
    files = changed(tmp_path, "engine", {"kernels": kernels})
    engine = make_rates(files, shipped_rates().config, "7b", 139.0).engine
    assert (engine.kv_bytes_per_s, engine.attention_flop_per_s) == (2000.0 * 2**30, 4e14)


def test_two_contexts_say_how_fast_the_cache_is_read(tmp_path: Path) -> None:
    decode = {f"batch 64, context {context}": {"with_sampling_ms": 5.0 + context / 1000} for context in (1000, 5000)}
    files = changed(tmp_path, "engine", {"decode": decode})
    engine = make_rates(files, shipped_rates().config, "7b", 139.0).engine
    assert engine.kv_bytes_per_s == pytest.approx(64 * 4000 * 57_344 / 4e-3)


def test_the_newer_form_of_the_encoders_results_is_read(tmp_path: Path) -> None:
    setup = json.loads(FILES["encoder"].read_text())["parts"]["setup"]
    newer = {"core": setup["core"], "costs": {"pair_ps": 100.0}, "ladder": setup["budgets"]}
    encoder = make_rates(changed(tmp_path, "encoder", {"setup": newer}), shipped_rates().config, "7b", 139.0).encoder
    assert encoder.pair_s == 1e-10
    # One 224^2 picture has 256 patches, which see each other.
    assert encoder.budgets[0].graph_s == pytest.approx(1.871e-3 - 256**2 * 1e-10)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("engine", {"decode": {}}, "needs cases of decode and of prefill"),
        ("engine", {"decode": {"batch 1, context 5": {}}}, r"no parts\.decode\.batch 1, context 5\.with_sampling_ms"),
        ("encoder", {"setup": {}}, "no ladder"),
        ("encoder", {"latency": {}}, "no cases of latency"),
        ("encoder", {"latency": {"1x224^2": {"graph": None, "slots": 64}}}, r"no parts\.latency\.1x224\^2\.encode"),
    ],
)
def test_results_that_lack_figures_are_named(tmp_path: Path, part: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_rates(changed(tmp_path, part, change), shipped_rates().config, "7b", 139.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("engine", "steps", 0, "seconds"), 0.0, r"engine\.steps\.0\.seconds: .*greater than 0"),
        (("engine", "kv_bytes_per_s"), "fast", r"engine\.kv_bytes_per_s: .*got 'fast'"),
        (("encoder", "eager"), [], r"encoder\.eager: .*at least 1"),
        (("host", "hops"), 3, r"host\.hops: "),
        (("format",), "sightline-rates/9", "format: "),
    ],
)
def test_wrong_rates_are_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    values = json.loads(json.dumps(asdict(shipped_rates())))
    part = values
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        parse_rates(values, "r.json")
