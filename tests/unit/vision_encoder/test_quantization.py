"""Towers in eight bits, emulated on the CPU, against themselves in float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deployments.fp8 import EmulatedFp8, Fp8Linear, QuantizedRows
from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.build import build_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.ops import Norm, PlainOps
from deployments.vision_encoder.quantization import QuantizedNorm, QuantizedOps
from deployments.vision_encoder.weights import TensorWeights
from tests.unit.vision_encoder.towers import Want, hf_tower, random_items

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MIXED: list[Want] = [
    ("image", (1, 8, 8)),
    ("image", (1, 2, 2)),
    ("video", (3, 4, 6)),
    ("image", (1, 10, 14)),
]


class CountedFp8(EmulatedFp8):
    """Counts products, and those whose rows came quantised from a kernel before them."""

    def __init__(self) -> None:
        self.alone = 0
        self.products = 0

    def multiply(
        self, rows: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        self.products += 1
        return super().multiply(rows, weight, bias, dtype)

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        self.alone += 1
        return super().quantize(x)

    def norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, QuantizedRows]:
        self.alone -= 1
        return super().norm(x, delta, weight, bias, eps)

    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        self.alone -= 1
        return super().gated_silu(gate_up)


def make_core(model_type: str, fp8: EmulatedFp8 | None = None, **options: object) -> EncoderCore:
    config, tower = hf_tower(model_type)
    settings: dict[str, object] = {
        "device": "cpu",
        "max_batch_slots": 256,
        "max_batch_patches": 1_024,
        "capture_progress": False,
        "encoder_cudagraph_steps_per_octave": 1,
        "quantization": "fp8" if fp8 else None,
    }
    return build_core(
        EncoderConfig(model="tiny", **(settings | options)),  # type: ignore[arg-type]
        config,
        TensorWeights(tower.state_dict()),
        measure=lambda call: [call(), 1e-3][1],  # type: ignore[return-value]
        fp8=fp8,
    )


def encode(core: EncoderCore, items: list[VisionItem]) -> Iterator[torch.Tensor]:
    for rows in core.encode_all(items):
        assert isinstance(rows, np.ndarray), rows
        yield torch.from_numpy(rows)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_embeddings_are_near_those_in_float32(model_type: str) -> None:
    exact, ours = make_core(model_type), make_core(model_type, EmulatedFp8())
    items = random_items(exact.adapter, MIXED)
    for expected, rows in zip(encode(exact, items), encode(ours, items), strict=True):
        assert float(torch.cosine_similarity(rows, expected).min()) > 0.999
        assert not torch.equal(rows, expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_static_buffers_equal_eager(model_type: str) -> None:
    """Padding rows and neighbours have scales of their own."""
    eager = make_core(model_type, EmulatedFp8())
    static = make_core(model_type, EmulatedFp8(), static_buffers_on_cpu=True)
    items = random_items(eager.adapter, MIXED)
    for ours, expected in zip(encode(static, items), encode(eager, items), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-2, rtol=1e-2)
        assert float(torch.cosine_similarity(ours, expected).min()) > 0.9999
    assert static.stats.graph_replays


@pytest.mark.parametrize(("model_type", "alone"), [("qwen2_5_vl", 1), ("qwen2_vl", 2), ("qwen3_vl", 2)])
def test_norms_and_gates_quantise_on_their_way(model_type: str, alone: int) -> None:
    """What is left to a product itself is attention's result and, without a gate, the MLP's."""
    fp8 = CountedFp8()
    core = make_core(model_type, fp8)
    depth = 4
    fp8.alone = fp8.products = 0
    list(encode(core, random_items(core.adapter, [("image", (1, 8, 8))])))
    assert fp8.products == 4 * depth
    assert fp8.alone == alone * depth


@pytest.mark.parametrize("model_type", FAMILIES)
def test_first_projection_and_mergers_stay_as_they_are(model_type: str) -> None:
    weights = make_core(model_type, EmulatedFp8()).adapter._tower.weights  # type: ignore[attr-defined]
    for block in weights.blocks:
        assert all(isinstance(layer, Fp8Linear) for layer in (block.qkv, block.proj, block.mlp_in, block.mlp_out))
        assert isinstance(block.norm1, QuantizedNorm)
    for merger in (weights.merger, *weights.deepstack):
        assert merger.fc1.weight.dtype is merger.fc2.weight.dtype is torch.float32
        assert not isinstance(merger.norm, QuantizedNorm)
    assert all(layer.weight.dtype is torch.float32 for layer in weights.embed.values())


def test_operations_quantise_only_what_a_product_follows() -> None:
    ops, plain = QuantizedOps(PlainOps(), EmulatedFp8()), PlainOps()
    x, weight = torch.randn(3, 32), torch.ones(32)
    assert torch.equal(ops.norm(x, Norm(weight, None)), plain.norm(x, Norm(weight, None)))  # type: ignore[arg-type]
    assert isinstance(ops.norm(x, QuantizedNorm(weight, None)), QuantizedRows)
    assert isinstance(ops.add_norm(x, x, QuantizedNorm(weight, None))[1], QuantizedRows)
    assert isinstance(ops.add_norm(x, x, Norm(weight, None))[1], torch.Tensor)


def test_a_cpu_without_the_emulation_is_refused_by_the_options_name() -> None:
    with pytest.raises(ValueError, match=r"quantization is 'fp8'.*cpu"):
        make_core("qwen2_5_vl", quantization="fp8")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantization is 'int3'"):
        EncoderConfig(model="m", quantization="int3")  # type: ignore[arg-type]
