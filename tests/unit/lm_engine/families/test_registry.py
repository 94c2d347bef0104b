from __future__ import annotations

import pytest

from deployments.checkpoint import CheckpointError
from deployments.lm_engine.families.positions import MRopeRule, TextRule
from deployments.lm_engine.families.registry import family_of


def test_families_by_model_type() -> None:
    config = {"model_type": "qwen2_5_vl", "vision_config": {"spatial_merge_size": 2, "tokens_per_second": 2}}
    family = family_of(config)
    assert isinstance(family.position_rule(config), MRopeRule)
    assert family.deepstack_levels(config) == 0
    assert isinstance(family_of({"model_type": "llama"}).position_rule({}), TextRule)


def test_deepstack_levels_of_qwen3_vl() -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": [5, 11, 17]}}
    assert family_of(config).deepstack_levels(config) == 3


def test_an_unknown_family_is_named_with_what_is_served() -> None:
    with pytest.raises(CheckpointError, match=r"'llama4'.*qwen2_5_vl"):
        family_of({"model_type": "llama4"})
