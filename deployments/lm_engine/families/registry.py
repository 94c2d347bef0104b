"""What differs between the served model families, by `model_type`. Knows no tensors.

A family says how rotary positions are laid out and how many deepstack levels ride along with each embedding row. What
transformers' own modules already express (sliding windows, q/k norms, rope scaling) needs no entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.checkpoint import CheckpointError
from deployments.lm_engine.families.positions import MRopeRule, PositionRule, TextRule

ModelConfig = Mapping[str, Any]
"""A checkpoint's configuration as a dict, defaults filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    model_type: str
    position_rule: Callable[[ModelConfig], PositionRule]
    deepstack_levels: Callable[[ModelConfig], int] = lambda config: 0
    """Extra hidden-size blocks of an embedding row, added to the hidden states after the first layers (DeepStack,
    arXiv:2406.04334)."""


def family_of(config: ModelConfig) -> Family:
    """The family of a checkpoint.

    Raises:
        CheckpointError: The model type is not served.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    served = ", ".join(family.model_type for family in FAMILIES)
    raise CheckpointError(f"model_type {model_type!r} is not served; served are {served}")


def _qwen2_vl_rule(config: ModelConfig) -> MRopeRule:
    return MRopeRule(config["vision_config"]["spatial_merge_size"])


def _qwen2_5_vl_rule(config: ModelConfig) -> MRopeRule:
    vision = config["vision_config"]
    return MRopeRule(vision["spatial_merge_size"], vision["tokens_per_second"])


FAMILIES = (
    Family(model_type="qwen2_vl", position_rule=_qwen2_vl_rule),
    Family(model_type="qwen2_5_vl", position_rule=_qwen2_5_vl_rule),
    *(
        Family(
            model_type=model_type,
            position_rule=_qwen2_vl_rule,
            deepstack_levels=lambda config: len(config["vision_config"]["deepstack_visual_indexes"]),
        )
        for model_type in ("qwen3_vl", "qwen3_vl_moe")
    ),
    *(
        Family(model_type=model_type, position_rule=lambda config: TextRule())
        for model_type in ("llama", "mistral", "qwen2", "qwen3")
    ),
)
