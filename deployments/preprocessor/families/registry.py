"""Which family serves which `model_type`. A new family is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deployments.checkpoint import CheckpointError, read_json
from deployments.preprocessor.families.base import Family
from deployments.preprocessor.families.qwen2_vl import load_qwen2_vl
from deployments.preprocessor.families.qwen3_vl import load_qwen3_vl

_LOADERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Family]] = {
    "qwen2_vl": load_qwen2_vl,
    "qwen2_5_vl": load_qwen2_vl,
    "qwen3_vl": load_qwen3_vl,
    "qwen3_vl_moe": load_qwen3_vl,
}


def load_family(folder: Path) -> Family:
    """The family of a model folder.

    Raises:
        CheckpointError: The folder's `model_type` is not served here.
    """
    config = read_json(folder, "config.json")
    model_type = str(config.get("model_type"))
    if model_type not in _LOADERS:
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(_LOADERS))}")
    return _LOADERS[model_type](folder, config)
