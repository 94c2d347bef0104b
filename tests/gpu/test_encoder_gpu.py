"""The encoder on a CUDA device: captured graphs, fused kernels, half precision. Skipped without one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.adapters.factory import build_adapter, shape_of
from deployments.vision_encoder.adapters.qwen_vl import QwenVLAdapter
from deployments.vision_encoder.attention import SdpaMasked, SdpaSegments
from deployments.vision_encoder.build import build_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.data_parallel import DataParallelCore
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.forward import run_eager
from deployments.vision_encoder.kernel_check import check_frames, check_windows
from deployments.vision_encoder.kernel_choice import (
    choose_attention,
    choose_ops,
    frame_candidates,
    window_candidates,
)
from deployments.vision_encoder.ops import PlainOps
from deployments.vision_encoder.packing import Load
from deployments.vision_encoder.weights import TensorWeights
from tests.unit.vision_encoder.towers import Want, hf_tower, random_items

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MIXED: list[Want] = [
    ("image", (1, 16, 16)),
    ("image", (1, 10, 14)),
    ("video", (3, 8, 10)),
    ("image", (1, 2, 2)),
    ("image", (1, 34, 38)),
    ("video", (1, 4, 4)),
    ("image", (1, 2, 30)),
]


def make_core(model_type: str, dtype: str = "bfloat16", **options: object) -> EncoderCore:
    config, tower = hf_tower(model_type)
    device, keep_on_device = options.pop("on", None), bool(options.pop("keep_on_device", False))
    settings: dict[str, object] = {
        "device": "cuda",
        "dtype": dtype,
        "encoder_cudagraph_max_budget": 512,
        "encoder_cudagraph_steps_per_octave": 2,
        "max_batch_slots": 1_024,
        "capture_progress": False,
    }
    return build_core(
        EncoderConfig(model="tiny", **(settings | options)),  # type: ignore[arg-type]
        config,
        TensorWeights(tower.state_dict()),
        measure=once,
        keep_on_device=keep_on_device,
        device=device,  # type: ignore[arg-type]
    )


def once(call: object) -> float:
    """Every budget costs the same and none is switched off: what runs does not depend on this machine's speed."""
    call()  # type: ignore[operator]
    torch.cuda.synchronize()
    return 1e-3


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def exact_adapter(model_type: str) -> QwenVLAdapter:
    config, tower = hf_tower(model_type)
    return build_adapter(
        config,
        TensorWeights(tower.state_dict()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=SdpaSegments(),
        window_attention=SdpaSegments(),
        ops=PlainOps(),
    )


def widen(rows: object) -> torch.Tensor:
    assert isinstance(rows, np.ndarray), rows
    tensor = torch.from_numpy(rows)
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor).float()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, EncoderCore]]:
    yield request.param, make_core(request.param)
    torch.cuda.empty_cache()


def test_graphs_agree_with_float32_on_cpu(family: tuple[str, EncoderCore]) -> None:
    model_type, core = family
    exact = exact_adapter(model_type)
    items = random_items(exact, MIXED)
    for item, rows in zip(items, core.encode_all(items), strict=True):
        (expected,) = run_eager(exact, item.modality, [item])
        assert float(torch.cosine_similarity(widen(rows), expected).min()) >= 0.9995
    assert core.stats.graph_replays


def test_replays_over_all_budgets_equal_the_call_on_the_same_buffers(family: tuple[str, EncoderCore]) -> None:
    _, core = family
    graphs = core._runners["image"].graphs
    assert graphs is not None
    rng = random.Random(0)
    order = [budget for budget in graphs.budgets for _ in range(4)]
    rng.shuffle(order)
    with torch.inference_mode():
        for budget in order:
            slots = max(1, budget.capacity.slots * rng.choice([5, 8, 10]) // 10)
            items = core.adapter.sample_items("image", slots, max(1, slots // rng.choice([1, 2])))
            load = sum((core.describe(item.modality, item.grid).loads["image"] for item in items), Load())
            if budget.capacity.shortage(load, len(items)) is not None:
                continue
            replayed = torch.cat(graphs.run(items, budget.capacity.slots))
            called = graphs._forward(graphs._captured[budget.capacity.slots].inputs)[: len(replayed)]
            assert torch.isfinite(replayed).all()
            assert torch.equal(replayed, called)


def test_equal_totals_cut_differently_are_both_right(family: tuple[str, EncoderCore]) -> None:
    model_type, core = family
    exact = exact_adapter(model_type)
    cuts: list[list[Want]] = [[("image", (1, 16, 16))], [("image", (1, 8, 16)), ("image", (1, 16, 8))]]
    for wants in cuts * 2:
        items = random_items(exact, wants)
        for item, rows in zip(items, core.encode_all(items), strict=True):
            (expected,) = run_eager(exact, "image", [item])
            assert float(torch.cosine_similarity(widen(rows), expected).min()) >= 0.9995


def test_results_outlive_later_replays(family: tuple[str, EncoderCore]) -> None:
    _, core = family
    first, second = random_items(core.adapter, [("image", (1, 16, 16)), ("image", (1, 16, 16))])
    (kept,) = core.encode_all([first])
    before = widen(kept).clone()
    core.encode_all([second])
    assert torch.equal(widen(kept), before)


def test_float32_on_cuda_runs_eagerly_and_equals_cpu() -> None:
    core, exact = make_core("qwen2_5_vl", "float32"), exact_adapter("qwen2_5_vl")
    items = random_items(exact, MIXED)
    for item, rows in zip(items, core.encode_all(items), strict=True):
        (expected,) = run_eager(exact, item.modality, [item])
        torch.testing.assert_close(widen(rows), expected, atol=1e-4, rtol=1e-4)
    assert {mode for _, mode in core.stats.invocations} == {"eager"}


@pytest.mark.parametrize("backend", ["varlen", "triton_frames", "triton_windows", "sdpa_masked", "sdpa_segments"])
def test_every_backend_agrees(backend: str) -> None:
    core, exact = make_core("qwen2_5_vl", mm_encoder_attn_backend=backend), exact_adapter("qwen2_5_vl")
    items = [item for item in random_items(exact, MIXED) if item.modality == "image"]
    for item, rows in zip(items, core.encode_all(items), strict=True):
        (expected,) = run_eager(exact, "image", [item])
        assert float(torch.cosine_similarity(widen(rows), expected).min()) >= 0.9995


def test_a_masked_pass_can_be_captured() -> None:
    core = make_core("qwen2_5_vl", mm_encoder_attn_backend=SdpaMasked.name)
    assert core.adapter.capturable
    assert core._runners["image"].graphs is not None


def test_running_out_of_memory_splits_the_batch_and_goes_on() -> None:
    core = make_core("qwen2_vl", cudagraph_mm_encoder=False)
    core.memory = None
    items = random_items(core.adapter, [("image", (1, 16, 16))] * 4)
    expected = [widen(rows) for rows in core.encode_all(items)]
    forward, most_rows = core.adapter.forward, 300

    def scarce(path: str, inputs: dict[str, torch.Tensor], longest: int) -> torch.Tensor:
        if len(inputs["patches"]) > most_rows:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return forward(path, inputs, longest)

    core.adapter.forward = scarce  # type: ignore[method-assign, assignment]
    for rows, before in zip(core.encode_all(items), expected, strict=True):
        torch.testing.assert_close(widen(rows), before, atol=0.05, rtol=0.05)
    assert core.stats.batch_failures["out_of_memory"] > 0


def test_the_measured_memory_model_covers_what_is_used() -> None:
    core = make_core("qwen2_5_vl", cudagraph_mm_encoder=False)
    assert core.memory is not None
    items: list[VisionItem] = random_items(core.adapter, [("image", (1, 32, 32))])
    load = core.describe("image", (1, 32, 32)).loads["image"]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_eager(core.adapter, "image", items)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= core.memory.bytes_of(load) * 1.2 + (8 << 20)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_fused_kernels_pass_their_check_on_the_published_shapes(model_type: str) -> None:
    shape = shape_of({"model_type": model_type, "vision_config": {}})
    device = torch.device("cuda")
    assert choose_ops(True, shape, torch.bfloat16, device).name == "triton"
    frames, windows = choose_attention("auto", shape, torch.bfloat16, device)
    assert frames.capturable
    if shape.window_slots:
        assert windows.name.startswith("triton_windows")


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("name", [name for group in frame_candidates() for name in group])
def test_attention_over_frames_is_right_on_the_published_shapes(name: str, model_type: str) -> None:
    shape = shape_of({"model_type": model_type, "vision_config": {}})
    make = next(group[name] for group in frame_candidates() if name in group)
    check_frames(make(), shape, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("name", [name for group in window_candidates() for name in group])
def test_attention_in_windows_is_right_on_the_published_shape(name: str) -> None:
    shape = shape_of({"model_type": "qwen2_5_vl", "vision_config": {}})
    make = next(group[name] for group in window_candidates() if name in group)
    check_windows(make(), shape, torch.bfloat16, torch.device("cuda"))


def test_rows_that_stay_on_the_device_are_complete_and_outlive_later_passes() -> None:
    """As an engine in the same process uses them: read on its own stream, dropped while its work is still queued."""
    core, exact = make_core("qwen2_5_vl", keep_on_device=True), exact_adapter("qwen2_5_vl")
    items = random_items(exact, [("image", (1, 16, 16))] * 8)
    engine_stream = torch.cuda.Stream()
    sums = []
    for item in items:
        (rows,) = core.encode_all([item])
        assert isinstance(rows, torch.Tensor)
        with torch.cuda.stream(engine_stream), torch.inference_mode():
            rows.record_stream(engine_stream)
            torch.cuda._sleep(20_000_000)  # the engine is behind; meanwhile the encoder goes on
            sums.append(rows.float().sum(0))
        del rows
    torch.cuda.synchronize()
    for item, total in zip(items, sums, strict=True):
        (expected,) = run_eager(exact, "image", [item])
        assert float(torch.cosine_similarity(total.cpu(), expected.sum(0), dim=0)) >= 0.999


@two_devices
def test_a_core_on_the_second_device_captures_and_replays_there() -> None:
    make_core("qwen2_5_vl")  # torch's defaults now belong to the first device
    core, exact = make_core("qwen2_5_vl", on=torch.device("cuda", 1)), exact_adapter("qwen2_5_vl")
    assert core.adapter.device.index == 1
    items = [item for item in random_items(exact, MIXED) if item.modality == "image"]
    for item, rows in zip(items, core.encode_all(items), strict=True):
        (expected,) = run_eager(exact, "image", [item])
        assert float(torch.cosine_similarity(widen(rows), expected).min()) >= 0.9995
    assert core.stats.graph_replays


@two_devices
def test_items_spread_over_two_devices_come_back_in_order() -> None:
    parallel = DataParallelCore([make_core("qwen2_5_vl", on=torch.device("cuda", index)) for index in (0, 1)])
    exact = exact_adapter("qwen2_5_vl")
    items = random_items(exact, MIXED * 3)
    for item, rows in zip(items, parallel.encode_all(items), strict=True):
        (expected,) = run_eager(exact, item.modality, [item])
        assert float(torch.cosine_similarity(widen(rows), expected).min()) >= 0.9995
    assert all(stats.items for stats in parallel.part_stats)
    parallel.close()
