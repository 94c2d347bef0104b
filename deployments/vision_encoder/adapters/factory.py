"""From a model's config to its adapter. The only place that lists families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployments.fp8 import Fp8Ops
from deployments.vision_encoder.adapters import qwen2_5_vl, qwen2_vl, qwen3_vl
from deployments.vision_encoder.adapters.qwen_vl import QwenVLAdapter, WeightReader
from deployments.vision_encoder.adapters.tower import Normalisation, TowerShape, TowerWeights
from deployments.vision_encoder.attention import Attention, StackedAttention
from deployments.vision_encoder.ops import Ops
from deployments.vision_encoder.quantization import quantize_tower
from deployments.vision_encoder.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Family:
    read_shape: Callable[[Mapping[str, Any]], TowerShape]
    read_weights: Callable[[TowerShape, WeightReader, Mapping[str, Normalisation]], TowerWeights]
    normalisation: Normalisation
    """What the family was trained with; used where the model folder does not say."""


_CLIP = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family(qwen2_vl.read_shape, qwen2_vl.read_weights, _CLIP),
    "qwen2_5_vl": Family(qwen2_5_vl.read_shape, qwen2_5_vl.read_weights, _CLIP),
    "qwen3_vl": Family(qwen3_vl.read_shape, qwen3_vl.read_weights, _HALF),
    "qwen3_vl_moe": Family(qwen3_vl.read_shape, qwen3_vl.read_weights, _HALF),
}


def family_of(model_type: str) -> Family:
    family = FAMILIES.get(model_type)
    if family is None:
        raise ValueError(f"model_type {model_type!r} has no vision adapter; known: {', '.join(sorted(FAMILIES))}")
    return family


def shape_of(config: Mapping[str, Any]) -> TowerShape:
    """Tower shape from a model's config.json, without weights or torch work."""
    return family_of(str(config.get("model_type"))).read_shape(config.get("vision_config") or {})


def build_adapter(
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: Attention,
    window_attention: Attention | StackedAttention,
    ops: Ops,
    normalisation: Mapping[str, Normalisation] | None = None,
    mlp_width_multiple: int = 1,
    fp8: Fp8Ops | None = None,
) -> QwenVLAdapter:
    """Adapter of the family that `config["model_type"]` names.

    Args:
        config: The model's config.json.
        normalisation: By path (`image`, `video`); the family's usual one if None.
        mlp_width_multiple: Pad the MLP's inner width with zeros to a multiple of this.
        fp8: What the blocks compute with in eight bits; None leaves them in `dtype`.

    Raises:
        ValueError: Unknown family, or tensors that are missing or of the wrong shape.
    """
    family = family_of(str(config.get("model_type")))
    shape = shape_of(config)
    reader = WeightReader(source, dtype, device, mlp_width_multiple)
    folded = normalisation or {"image": family.normalisation, "video": family.normalisation}
    weights = family.read_weights(shape, reader, folded)
    if fp8 is not None:
        weights, ops = quantize_tower(weights, ops, fp8)
    return QwenVLAdapter(shape, weights, attention, window_attention, ops)


def read_normalisation(folder: Path, config: Mapping[str, Any]) -> dict[str, Normalisation]:
    """What the folder's processor configs say, by path; the family's usual one where they are silent."""
    from deployments.checkpoint import read_json

    usual = family_of(str(config.get("model_type"))).normalisation
    combined = read_json(folder, "processor_config.json", {})
    image = read_json(folder, "preprocessor_config.json", combined.get("image_processor") or {})
    video = read_json(folder, "video_preprocessor_config.json", combined.get("video_processor") or image)
    return {"image": _normalisation(image, usual), "video": _normalisation(video, usual)}


def _normalisation(config: Mapping[str, Any], usual: Normalisation) -> Normalisation:
    channels = len(usual.mean)
    mean, std = tuple(config.get("image_mean") or usual.mean), tuple(config.get("image_std") or usual.std)
    if config.get("do_normalize") is False:
        mean, std = (0.0,) * channels, (1.0,) * channels
    rescale = config.get("rescale_factor") or usual.rescale
    return Normalisation(mean, std, 1.0 if config.get("do_rescale") is False else rescale)
