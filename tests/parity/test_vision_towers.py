"""Our packed tower against transformers' own, in fp32 on CPU, with tiny random weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deployments.vision_encoder.adapters.base import Modality, VisionItem
from deployments.vision_encoder.adapters.factory import build_adapter, family_of
from deployments.vision_encoder.adapters.qwen_vl import QwenVLAdapter
from deployments.vision_encoder.attention import Attention, SdpaMasked, SdpaSegments
from deployments.vision_encoder.forward import run_eager
from deployments.vision_encoder.ops import PlainOps
from deployments.vision_encoder.weights import TensorWeights
from tests.unit.vision_encoder.towers import hf_tower, random_items

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
# Windows are 4 x 4 slots (8 x 8 patches): full ones, partial ones on one and on both borders, strips, one slot.
MIXED: list[tuple[Modality, tuple[int, int, int]]] = [
    ("image", (1, 16, 16)),
    ("image", (1, 10, 14)),
    ("image", (1, 2, 2)),
    ("image", (1, 6, 24)),
    ("image", (1, 18, 16)),
    ("image", (1, 2, 30)),
]
VIDEOS: list[tuple[Modality, tuple[int, int, int]]] = [
    ("video", (3, 8, 10)),
    ("video", (1, 4, 4)),
    ("video", (2, 16, 6)),
]


def reference(model_type: str, tower: torch.nn.Module, items: Sequence[VisionItem]) -> list[torch.Tensor]:
    """transformers' features of every item, normalised and with the temporal copy, as its processors make them."""
    normalisation = family_of(model_type).normalisation
    mean = torch.tensor(normalisation.mean).view(1, 3, 1, 1, 1)
    std = torch.tensor(normalisation.std).view(1, 3, 1, 1, 1)
    results = []
    for item in items:
        frames = 1 if item.modality == "image" else 2
        pixels = torch.from_numpy(item.patches).float().view(len(item.patches), 3, frames, 14, 14)
        pixels = ((pixels / 255 - mean) / std).expand(-1, -1, 2, -1, -1).reshape(len(item.patches), -1)
        with torch.inference_mode():
            output = tower(pixels, grid_thw=torch.tensor([item.grid]))
        levels = getattr(output, "deepstack_features", None) or []
        results.append(torch.cat([output.pooler_output, *levels], dim=1))
    return results


def adapter_of(
    model_type: str, attention: Attention, mlp_width_multiple: int = 1
) -> tuple[QwenVLAdapter, torch.nn.Module]:
    config, tower = hf_tower(model_type)
    adapter = build_adapter(
        config,
        TensorWeights(tower.state_dict()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=attention,
        window_attention=attention,
        ops=PlainOps(),
        mlp_width_multiple=mlp_width_multiple,
    )
    return adapter, tower


@pytest.mark.parametrize("mixed", [MIXED, VIDEOS], ids=["images", "videos"])
@pytest.mark.parametrize("attention", [SdpaSegments(), SdpaMasked()], ids=lambda a: a.name)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_mixed_sizes_in_one_packed_batch_equal_transformers(
    model_type: str, attention: Attention, mixed: list[tuple[Modality, tuple[int, int, int]]]
) -> None:
    adapter, tower = adapter_of(model_type, attention)
    items = random_items(adapter, mixed)
    results = run_eager(adapter, items[0].modality, items)
    for result, expected in zip(results, reference(model_type, tower, items), strict=True):
        assert result.shape == expected.shape == (result.shape[0], adapter.width)
        assert (result - expected).abs().max() <= 1e-4
        assert expected.abs().max() > 0.05  # the comparison is not between zeros


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_padded_mlp_changes_nothing(model_type: str) -> None:
    plain, _ = adapter_of(model_type, SdpaSegments())
    padded, _ = adapter_of(model_type, SdpaSegments(), mlp_width_multiple=128)
    items = random_items(plain, MIXED)
    for a, b in zip(run_eager(plain, "image", items), run_eager(padded, "image", items), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_still_video_equals_the_picture() -> None:
    """The folded projection of a picture is the unfolded one with equal temporal copies."""
    adapter, _ = adapter_of("qwen2_5_vl", SdpaSegments())
    (picture,) = random_items(adapter, [("image", (1, 8, 12))])
    rows = picture.patches.reshape(-1, 3, 1, 14 * 14)
    still = VisionItem("video", picture.grid, np.repeat(rows, 2, axis=2).reshape(len(rows), -1))
    (a,), (b,) = run_eager(adapter, "image", [picture]), run_eager(adapter, "video", [still])
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_steps_of_a_video_apart_equal_the_video_whole() -> None:
    """Why Qwen3-VL's temporal steps can be items of their own."""
    adapter, _ = adapter_of("qwen3_vl", SdpaSegments())
    (video,) = random_items(adapter, [("video", (3, 8, 10))])
    steps = [VisionItem("video", (1, 8, 10), patches) for patches in np.split(video.patches, 3)]
    (whole,) = run_eager(adapter, "video", [video])
    torch.testing.assert_close(torch.cat(run_eager(adapter, "video", steps)), whole, atol=1e-5, rtol=0)
