"""What the edge must know of a model, read from its folder's JSON files alone: no weights, no tokenizer, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.settings import SamplingDefaults
from deployments.checkpoint import CheckpointError, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    name: str
    """Folder name, or the hub id as given."""
    model_type: str
    max_model_len: int
    """Longest sequence the model was made for, in tokens."""
    vocab_size: int
    created_s: int
    """Unix time of the folder's config file."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Precision of the checkpoint's weights; bfloat16 if it does not say."""
    sampling_defaults: SamplingDefaults


def read_model_card(folder: Path, name: str) -> ModelCard:
    """Raises CheckpointError if the folder's files do not say what is needed."""
    config = read_json(folder, "config.json")
    text = _text_config(config)
    return ModelCard(
        name=name,
        model_type=str(config.get("model_type", "")),
        max_model_len=_whole(text, "max_position_embeddings"),
        vocab_size=_whole(text, "vocab_size"),
        created_s=int((folder / "config.json").stat().st_mtime),
        dtype=_dtype(text),
        sampling_defaults=_sampling_defaults(read_json(folder, "generation_config.json", {})),
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Composite checkpoints keep the language model's options in a section, older ones at the top."""
    for section in ("text_config", "llm_config", "language_config"):
        nested = config.get(section)
        if isinstance(nested, Mapping):
            return {**config, **nested}
    return config


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json has no usable {name}: {value!r}")
    return value


def _dtype(config: Mapping[str, Any]) -> Literal["float32", "bfloat16", "float16"]:
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if named == "float32":
        return "float32"
    return "float16" if named == "float16" else "bfloat16"


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """The checkpoint's own choices; `do_sample: false` means greedy unless a request asks for a temperature."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if isinstance(generation.get(name), int | float)}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingDefaults(**given)
