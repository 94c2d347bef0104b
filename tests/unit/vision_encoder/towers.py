"""Tiny random towers and items for the encoder's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deployments.vision_encoder.adapters.base import Modality, VisionAdapter, VisionItem

Want = tuple[Modality, tuple[int, int, int]]

COMMON: dict[str, Any] = {
    "depth": 4,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 3},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 70,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 70,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
}


def vision_config(model_type: str) -> dict[str, Any]:
    return COMMON | SPECIFIC[model_type]


def hf_tower(model_type: str, seed: int = 0) -> tuple[dict[str, Any], torch.nn.Module]:
    """(config.json, transformers tower) with weights large enough that every part shows in the result."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as q25
    from transformers.models.qwen2_vl import modeling_qwen2_vl as q2
    from transformers.models.qwen3_vl import modeling_qwen3_vl as q3

    tower_class, config_class = {
        "qwen2_vl": (q2.Qwen2VisionTransformerPretrainedModel, q2.Qwen2VLVisionConfig),
        "qwen2_5_vl": (q25.Qwen2_5_VisionTransformerPretrainedModel, q25.Qwen2_5_VLVisionConfig),
        "qwen3_vl": (q3.Qwen3VLVisionModel, q3.Qwen3VLVisionConfig),
    }[model_type]
    config = config_class(**vision_config(model_type))
    config._attn_implementation = "sdpa"
    tower = tower_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
    return {"model_type": model_type, "vision_config": vision_config(model_type)}, tower


def random_items(adapter: VisionAdapter, wants: Sequence[Want], seed: int = 0) -> list[VisionItem]:
    generator = np.random.default_rng(seed)
    return [
        VisionItem(
            modality,
            grid,
            generator.integers(0, 256, adapter.describe(modality, grid).patches_shape, dtype=np.uint8),
        )
        for modality, grid in wants
    ]
