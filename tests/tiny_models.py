"""Tiny random checkpoints of the served families: real architectures, real file layout, made in well under a second.

Every folder holds config, safetensors, a byte-level BPE tokenizer with Qwen's special tokens, a chat template and a
preprocessor config, as a hub snapshot would. Weights are random but the same for the same seed; their scale is large
enough that greedy tokens differ between prompts and pictures, so a wrong position, mask or splice shows in the output.

    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl", seed=1)
    model = load_hf_model(folder)          # transformers' own model, the oracle
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Those with dense layers; what holds for them is shown of `qwen3_vl_moe` where experts could matter."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "What is in the picture? A red circle, a blue square and a green triangle.",
    "How many shapes are there? There are three shapes on the left of the chart.",
    "Describe the image. The quick brown fox jumps over the lazy dog.",
    "naïve café 东京 🙂 – größer",
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most VOCAB_SIZE tokens: any text round-trips; many characters span several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            show_progress=False,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def save_tiny_model(
    folder: Path,
    family: Family = "qwen2_5_vl",
    *,
    seed: int = 0,
    tie_word_embeddings: bool = False,
    sliding_window: int | None = None,
    num_layers: int = 3,
    max_position_embeddings: int = 4096,
) -> Path:
    """Write a random checkpoint of `family` into `folder` and return it.

    Args:
        sliding_window: Width in tokens of windowed attention in all layers but the first; None for full attention.
            Not for qwen3_vl, whose layers are all full.
    """
    tokenizer = make_tokenizer()
    config = tiny_config(
        family,
        tokenizer,
        tie_word_embeddings=tie_word_embeddings,
        sliding_window=sliding_window,
        num_layers=num_layers,
        max_position_embeddings=max_position_embeddings,
    )
    model = _random_model(family, config, seed)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor_config(family), indent=2))
    return folder


def tiny_config(
    family: Family,
    tokenizer: PreTrainedTokenizerFast,
    *,
    tie_word_embeddings: bool = False,
    sliding_window: int | None = None,
    num_layers: int = 3,
    max_position_embeddings: int = 4096,
) -> Qwen2VLConfig | Qwen2_5_VLConfig | Qwen3VLConfig | Qwen3VLMoeConfig:
    """Config of the text model [hidden 64, 4 query heads of 16 over 2 KV heads] and a two-block vision tower."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    top: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": tie_word_embeddings,
    }
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        if sliding_window is not None:
            raise ValueError(f"{family} has no sliding window: {sliding_window = }")
        text["head_dim"] = 16
        text["rope_parameters"]["mrope_interleaved"] = True
        text["rope_parameters"]["mrope_section"] = [4, 2, 2]
        vision = {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        }
        if family == "qwen3_vl":
            return Qwen3VLConfig(text_config=text, vision_config=vision, **top)
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **top)
    if sliding_window is not None:
        text |= {
            "use_sliding_window": True,
            "sliding_window": sliding_window,
            "max_window_layers": 1,
            "layer_types": ["full_attention"] + ["sliding_attention"] * (num_layers - 1),
        }
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
        return Qwen2VLConfig(text_config=text, vision_config=vision, **top)
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **top)


def load_hf_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model of a folder saved here, on the CPU, in eval mode with SDPA attention."""
    family: Family = json.loads((folder / "config.json").read_text())["model_type"]
    model = _MODEL_CLASSES[family].from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


_MODEL_CLASSES: dict[Family, type[PreTrainedModel]] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}


def _random_model(family: Family, config: Any, seed: int) -> PreTrainedModel:
    """Weights drawn by name order from one generator: independent of torch's global state and of init code."""
    model = _MODEL_CLASSES[family](config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                is_scale = "norm" in name and name.endswith("weight")
                parameter.copy_(1.0 + 0.1 * noise if is_scale else 0.1 * noise)
            elif "embed" in name and parameter.ndim == 2:
                parameter.copy_(noise)
            else:
                fan_in = parameter[0].numel()
                parameter.copy_(1.5 * noise / fan_in**0.5)
    return model


def _preprocessor_config(family: Family) -> dict[str, Any]:
    config: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        half = [0.5, 0.5, 0.5]
        return config | {"patch_size": 16, "image_mean": half, "image_std": half} | _pixel_bounds(32)
    return (
        config
        | {
            "patch_size": 14,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
        | _pixel_bounds(28)
    )


def _pixel_bounds(side: int) -> dict[str, Any]:
    """From 4 to 256 placeholder tokens a picture."""
    low, high = 4 * side * side, 256 * side * side
    return {"min_pixels": low, "max_pixels": high, "size": {"shortest_edge": low, "longest_edge": high}}
