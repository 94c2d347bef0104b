"""Qwen2-VL: layer norms, plain MLP with quick GELU, attention over whole frames in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.vision_encoder.adapters.qwen_vl import WeightReader, axial_theta
from deployments.vision_encoder.adapters.tower import Normalisation, TowerShape, TowerWeights


def read_shape(config: Mapping[str, Any]) -> TowerShape:
    """Shape from a `vision_config`. `hidden_size` is the language model's width here, `embed_dim` the tower's."""
    width = config.get("embed_dim", 1280)
    return TowerShape(
        depth=config.get("depth", 32),
        width=width,
        heads=config.get("num_heads", 16),
        mlp_width=int(width * config.get("mlp_ratio", 4)),
        out_width=config.get("hidden_size", 3584),
        activation=config.get("hidden_act", "quick_gelu"),
        gated=False,
        rms_norm=False,
        patch_size=config.get("patch_size", 14),
        temporal_patch_size=config.get("temporal_patch_size", 2),
        channels=config.get("in_channels", 3),
        merge=config.get("spatial_merge_size", 2),
        rope_theta=axial_theta(config),
    )


def read_weights(shape: TowerShape, reader: WeightReader, normalisation: Mapping[str, Normalisation]) -> TowerWeights:
    return TowerWeights(
        embed=reader.embed(shape, normalisation, bias=False),
        blocks=tuple(reader.block(i, shape, ["mlp.fc1"], "mlp.fc2") for i in range(shape.depth)),
        merger=reader.merger("merger", shape, norm="ln_q", fc1="mlp.0", fc2="mlp.2"),
    )
