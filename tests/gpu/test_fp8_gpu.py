"""8-bit products on a CUDA device: kernels against the emulation, graphs against eager. Skipped without one."""

from __future__ import annotations

import gc
import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from deployments.fp8 import EmulatedFp8, Fp8Linear, ScaledMmFp8, choose_fp8, steps_apart
from deployments.lm_engine.plan import SequenceChunk
from deployments.vision_encoder.build import build_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.forward import run_eager
from deployments.vision_encoder.packing import Load
from deployments.vision_encoder.weights import TensorWeights
from tests.gpu.lm_steps import BLOCKS_EACH, forced_logits, make_rig
from tests.unit.vision_encoder.towers import Want, hf_tower, random_items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device of capability 8.9 or higher",
    ),
]

BF16 = torch.bfloat16
FP8 = EmulatedFp8()
PRODUCT_ERROR = 0.015
"""Tensor cores add eight-bit products with fewer bits than float32 has, and results are rounded to bfloat16."""
NUM_STEPS = 24
# Widths of 7B-shaped layers, and odd ones.
WIDTHS = [16, 70, 1280, 3456, 3584, 18944]
# (out, in): qkv, o, gate_up and down of a 7B-shaped decoder; qkv and MLP of its tower.
PRODUCTS = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (3840, 1280), (6912, 1280), (1280, 3456)]
MIXED: list[Want] = [
    ("image", (1, 16, 16)),
    ("image", (1, 10, 14)),
    ("video", (3, 8, 10)),
    ("image", (1, 2, 2)),
    ("image", (1, 34, 38)),
]
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(BF16)


def test_the_kernels_are_chosen_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="deployments.fp8"):
        ops = choose_fp8(BF16, torch.device("cuda"))
    assert ops.name == "triton"
    assert not caplog.records
    assert choose_fp8(BF16, torch.device("cuda"), fused=False).name == "scaled_mm"


# -- rows -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_quantised_to_the_emulations_bits(width: int) -> None:
    x = noise(37, width) * torch.logspace(-4, 4, 37, device="cuda", dtype=BF16)[:, None]
    x[3] = 0
    ours, expected = choose_fp8(BF16, x.device).quantize(x), FP8.quantize(x)
    assert torch.equal(ours.scales, expected.scales)
    assert torch.equal(ours.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("with_bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("with_delta", [False, True], ids=["norm", "add_norm"])
@pytest.mark.parametrize("width", WIDTHS[:-1])
def test_norms_quantise_to_one_step(width: int, with_delta: bool, with_bias: bool) -> None:
    ops = choose_fp8(BF16, torch.device("cuda"))
    x, weight = noise(300, width), 1 + 0.1 * noise(width, seed=1)
    delta, bias = noise(300, width, seed=2) if with_delta else None, noise(width, seed=3) if with_bias else None
    (total, ours), (sums, expected) = (each.norm(x, delta, weight, bias, 1e-6) for each in (ops, FP8))
    assert torch.equal(total, sums)
    assert int(steps_apart(ours.values, expected.values).max()) <= 1
    torch.testing.assert_close(ours.scales, expected.scales, rtol=0.01, atol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_gates_quantise_to_one_step(width: int) -> None:
    gate_up = noise(300, 2 * width) * 3
    ours, expected = choose_fp8(BF16, gate_up.device).gated_silu(gate_up), FP8.gated_silu(gate_up)
    assert ours.values.shape == expected.values.shape
    assert int(steps_apart(ours.values, expected.values).max()) <= 1
    torch.testing.assert_close(ours.scales, expected.scales, rtol=0.01, atol=0)


# -- products ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("out_width", "in_width"), PRODUCTS, ids=str)
def test_products_agree_with_emulated_ones(out_width: int, in_width: int, with_bias: bool) -> None:
    weight, bias = noise(out_width, in_width), noise(out_width, seed=1) * 50 if with_bias else None
    layers = [Fp8Linear(weight, bias, ops) for ops in (choose_fp8(BF16, weight.device), FP8)]
    assert torch.equal(layers[0].values.view(torch.uint8), layers[1].values.view(torch.uint8))
    for num_rows in (1, 2, 15, 16, 17, 64, 300):
        ours, expected = (layer(noise(num_rows, in_width, seed=num_rows)).float() for layer in layers)
        assert float((ours - expected).norm() / expected.norm()) < PRODUCT_ERROR


@pytest.mark.parametrize(("out_width", "in_width"), [(70, 64), (64, 70), (6840, 1280), (1280, 3420)])
def test_odd_widths_are_padded(out_width: int, in_width: int) -> None:
    weight, bias = noise(out_width, in_width), noise(out_width, seed=1)
    ours, expected = (
        Fp8Linear(weight, bias, ops)(noise(3, 5, in_width, seed=2)) for ops in (choose_fp8(BF16, weight.device), FP8)
    )
    assert ours.shape == (3, 5, out_width)
    assert float((ours.float() - expected.float()).norm() / expected.float().norm()) < PRODUCT_ERROR


def test_padding_rows_changes_nothing() -> None:
    weight, x = noise(64, 128), noise(3, 128, seed=1)
    alone, padded = (Fp8Linear(weight, None, ScaledMmFp8(min_rows))(x) for min_rows in (1, 16))
    assert padded.shape == (3, 64)
    torch.testing.assert_close(alone, padded, atol=0.1, rtol=0.01)


def test_a_layer_is_captured_and_replayed_to_the_same_bits() -> None:
    layer = Fp8Linear(noise(4608, 3584), noise(4608, seed=1), choose_fp8(BF16, torch.device("cuda")))
    x = noise(4, 3584, seed=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = layer(x)
    for seed in range(3, 6):
        x.copy_(noise(4, 3584, seed=seed))
        graph.replay()
        with torch.inference_mode():
            assert torch.equal(out, layer(x))


# -- the language model -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exact() -> tuple[torch.Tensor, list[list[int]]]:
    """Logits and greedy tokens of the shipped model in float32 on the CPU."""
    return forced_logits(make_rig("cpu", torch.float32), None, NUM_STEPS)


@pytest.mark.parametrize(
    "options", [{}, {"fuse_layers": False}, {"enforce_eager": True}, {"attention_backend": "sdpa"}], ids=str
)
def test_the_language_model_answers_as_in_float32(
    exact: tuple[torch.Tensor, list[list[int]]], options: dict[str, object]
) -> None:
    expected, tokens = exact
    logits, _ = forced_logits(make_rig("cuda", BF16, quantization="fp8", **options), tokens, NUM_STEPS)
    assert torch.isfinite(logits).all()
    same = logits.argmax(-1) == expected.argmax(-1)
    best, second = expected.topk(2).values.unbind(-1)
    print(f"greedy agreement {float(same.float().mean()):.3f}")  # noqa: T201
    assert float(same.float().mean()) >= 0.92
    assert bool(same[best - second > 2].all())
    assert float(torch.cosine_similarity(logits, expected, dim=-1).mean()) > 0.98


def test_decode_replays_equal_the_call_on_the_same_inputs() -> None:
    from deployments.lm_engine.decode_graphs import DecodeGraphs

    rig = make_rig("cuda", BF16, quantization="fp8")
    assert isinstance(rig.decodes, DecodeGraphs)
    assert rig.decodes.sizes == (1, 2, 4, 8)
    forced_logits(rig, None, 2)  # a prompt for each sequence
    for num in (1, 2, 3, 5, 4, 1):
        chunks = [
            SequenceChunk(
                str(index), 40 + index, [100 + index], rig.model.position_rule.positions(50, ()).slice(40, 41),
                range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH), True,
            )
            for index in range(num)
        ]  # fmt: skip
        replayed = rig.decodes.run(chunks).clone()
        size = next(size for size in rig.decodes.sizes if size >= num)
        with torch.inference_mode():
            called = rig.decodes._forward(size)[:num]
        assert torch.isfinite(replayed).all()
        assert torch.equal(replayed, called)


def test_the_weights_in_full_precision_are_given_back() -> None:
    def allocated(**options: object) -> tuple[int, int]:
        gc.collect()
        before = torch.cuda.memory_allocated()
        rig = make_rig("cuda", BF16, enforce_eager=True, **options)
        linears = [module for module in rig.model.modules() if isinstance(module, Fp8Linear)]
        used, saved = torch.cuda.memory_allocated() - before, sum(linear.values.nbytes for linear in linears)
        del rig
        return used, saved

    allocated(), allocated(quantization="fp8")  # libraries take their workspaces
    plain, _ = allocated()
    quantized, saved = allocated(quantization="fp8")
    assert saved > 0
    assert plain - quantized > 0.9 * saved


# -- the vision encoder -----------------------------------------------------------------------------------------------
def make_core(model_type: str, **options: object) -> EncoderCore:
    config, tower = hf_tower(model_type)
    settings: dict[str, object] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "quantization": "fp8",
        "encoder_cudagraph_max_budget": 512,
        "encoder_cudagraph_steps_per_octave": 2,
        "max_batch_slots": 1_024,
        "capture_progress": False,
    }
    on_cpu = options.get("device") == "cpu"
    return build_core(
        EncoderConfig(model="tiny", **(settings | options)),  # type: ignore[arg-type]
        config,
        TensorWeights(tower.state_dict()),
        measure=lambda call: [call(), 1e-3][1],  # type: ignore[return-value]
        fp8=EmulatedFp8() if on_cpu else None,
    )


def widen(rows: object) -> torch.Tensor:
    assert isinstance(rows, np.ndarray), rows
    tensor = torch.from_numpy(rows)
    return (tensor.view(BF16) if tensor.dtype == torch.uint16 else tensor).float()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_encoder_agrees_with_the_emulation_and_with_float32(model_type: str) -> None:
    core = make_core(model_type)
    emulated = make_core(model_type, device="cpu", dtype="float32")
    exact = make_core(model_type, device="cpu", dtype="float32", quantization=None)
    items = random_items(core.adapter, MIXED)
    for item, rows in zip(items, core.encode_all(items), strict=True):
        for other, least in ((emulated, 0.9995), (exact, 0.999)):
            (expected,) = run_eager(other.adapter, item.modality, [item])
            cosine = torch.cosine_similarity(widen(rows), expected)
            assert float(cosine.min()) > least
    assert core.stats.graph_replays


@pytest.mark.parametrize("options", [{}, {"fused_kernels": False}], ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_encoder_replays_equal_the_call_on_the_same_buffers(model_type: str, options: dict[str, object]) -> None:
    core = make_core(model_type, **options)
    graphs = core._runners["image"].graphs
    assert graphs is not None
    rng = random.Random(0)
    order = [budget for budget in graphs.budgets for _ in range(3)]
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


def test_the_dtype_must_be_bfloat16() -> None:
    config, tower = hf_tower("qwen2_5_vl")
    options = replace(EncoderConfig(model="tiny", device="cuda", quantization="fp8"), dtype="float16")
    with pytest.raises(ValueError, match=r"quantization is 'fp8'.*float16"):
        build_core(options, config, TensorWeights(tower.state_dict()))
