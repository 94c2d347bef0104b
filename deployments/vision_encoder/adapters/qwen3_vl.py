"""Qwen3-VL: learned positions besides rotary ones, whole-frame attention, and features of several depths (deepstack).

A result row is the final feature followed by one feature per deepstack layer: [out * (1 + levels)].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.vision_encoder.adapters.qwen_vl import WeightReader, axial_theta
from deployments.vision_encoder.adapters.tower import Normalisation, TowerShape, TowerWeights


def read_shape(config: Mapping[str, Any]) -> TowerShape:
    return TowerShape(
        depth=config.get("depth", 27),
        width=config.get("hidden_size", 1152),
        heads=config.get("num_heads", 16),
        mlp_width=config.get("intermediate_size", 4304),
        out_width=config.get("out_hidden_size", 3584),
        activation=config.get("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        rms_norm=False,
        patch_size=config.get("patch_size", 16),
        temporal_patch_size=config.get("temporal_patch_size", 2),
        channels=config.get("in_channels", 3),
        merge=config.get("spatial_merge_size", 2),
        table_side=int(config.get("num_position_embeddings", 2304) ** 0.5),
        deepstack_layers=tuple(config.get("deepstack_visual_indexes", (8, 16, 24))),
        rope_theta=axial_theta(config),
    )


def read_weights(shape: TowerShape, reader: WeightReader, normalisation: Mapping[str, Normalisation]) -> TowerWeights:
    return TowerWeights(
        embed=reader.embed(shape, normalisation, bias=True),
        blocks=tuple(reader.block(i, shape, ["mlp.linear_fc1"], "mlp.linear_fc2") for i in range(shape.depth)),
        merger=reader.merger("merger", shape, norm="norm", fc1="linear_fc1", fc2="linear_fc2"),
        deepstack=tuple(
            reader.merger(
                f"deepstack_merger_list.{level}",
                shape,
                norm="norm",
                fc1="linear_fc1",
                fc2="linear_fc2",
                after_merge=True,
            )
            for level in range(len(shape.deepstack_layers))
        ),
        position_table=reader.tensor("pos_embed.weight", shape.table_side**2, shape.width),
    )
