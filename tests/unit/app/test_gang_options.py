"""A tensor-parallel engine asks for a bundle per rank; what cannot be split is refused before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import yaml

from app.builder import build
from app.config import ConfigError
from tests.unit.test_serve_configs import FOLDER


def args(**engine: Any) -> dict[str, Any]:
    """dev.yaml's, with other options of the engine."""
    (application,) = yaml.safe_load((FOLDER / "dev.yaml").read_text())["applications"]
    made: dict[str, Any] = application["args"] | {"model": str(FOLDER / "demo_model")}
    made["lm_engine"] = made["lm_engine"] | engine
    return made


def engine_of(options: dict[str, Any]) -> Any:
    """What Serve is told of the engine's replicas."""
    _, _, engine, _ = build(options)._bound_deployment.init_args
    return engine._bound_deployment._replica_config


def test_one_device_needs_no_placement_group() -> None:
    assert engine_of(args()).placement_group_bundles is None


def test_a_bundle_for_each_rank_on_one_node() -> None:
    config = engine_of(args(tensor_parallel_size=2))
    assert config.placement_group_bundles == [{"CPU": 2.0}, {"CPU": 1.0}]
    assert config.placement_group_strategy == "STRICT_PACK"
    assert not config.ray_actor_options.get("num_gpus")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    config = engine_of(args(tensor_parallel_size=2, device=device))
    assert config.placement_group_bundles == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert config.ray_actor_options["num_gpus"] == 1


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "lm_engine: tensor_parallel_size must be at least 1; it is 0"),
        (3, "lm_engine.tensor_parallel_size is 3, but it must divide the model's num_attention_heads 4"),
    ],
)
def test_what_cannot_be_split_is_refused(size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(args(tensor_parallel_size=size))
