"""Qwen2.5-VL: RMS norms, gated SiLU MLP, attention inside windows except in a few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.vision_encoder.adapters.qwen_vl import WeightReader, axial_theta
from deployments.vision_encoder.adapters.tower import Normalisation, TowerShape, TowerWeights


def read_shape(config: Mapping[str, Any]) -> TowerShape:
    """Shape from a `vision_config`; `window_size` is in pixels."""
    patch, merge = config.get("patch_size", 14), config.get("spatial_merge_size", 2)
    return TowerShape(
        depth=config.get("depth", 32),
        width=config.get("hidden_size", 1280),
        heads=config.get("num_heads", 16),
        mlp_width=config.get("intermediate_size", 3420),
        out_width=config.get("out_hidden_size", 3584),
        activation=config.get("hidden_act", "silu"),
        gated=True,
        rms_norm=True,
        patch_size=patch,
        temporal_patch_size=config.get("temporal_patch_size", 2),
        channels=config.get("in_channels", config.get("in_chans", 3)),
        merge=merge,
        window_slots=config.get("window_size", 112) // merge // patch,
        full_layers=frozenset(config.get("fullatt_block_indexes", (7, 15, 23, 31))),
        rope_theta=axial_theta(config),
    )


def read_weights(shape: TowerShape, reader: WeightReader, normalisation: Mapping[str, Normalisation]) -> TowerWeights:
    inner = ["mlp.gate_proj", "mlp.up_proj"]
    return TowerWeights(
        embed=reader.embed(shape, normalisation, bias=False),
        blocks=tuple(reader.block(i, shape, inner, "mlp.down_proj") for i in range(shape.depth)),
        merger=reader.merger("merger", shape, norm="ln_q", fc1="mlp.0", fc2="mlp.2"),
    )
