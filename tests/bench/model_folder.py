"""A model folder in the shape of a published Qwen2.5-VL, without weights: for `load_format: dummy`.

Config, processor, tokenizer and chat template have the published shapes, so that any server which can start from dummy
weights works as hard as with the real ones. The tokenizer has no merges: one token for each byte of a text, and each id
above has a text of its own, so that random answers can be streamed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HELP = "write a folder to serve with dummy weights"

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Numbers of one size of the model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool = False
    first_special_id: int = 151_643
    """Ids below are text, those from here on the special tokens."""
    max_position_embeddings: int = 128_000
    mrope_section: tuple[int, int, int] = (16, 24, 24)
    """Rotary frequencies of time, height and width: half of a head's width in all."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the published tower, which all sizes share."""

    def id_of(self, token: str) -> int:
        return self.first_special_id + SPECIAL_TOKENS.index(token)


SHAPES = {
    "qwen2.5-vl-7b": Shape(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152_064,
    ),
    "qwen2.5-vl-3b": Shape(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True,
    ),
    "tiny": Shape(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, first_special_id=480, max_position_embeddings=8192, mrope_section=(2, 3, 3),
        vision={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
}  # fmt: skip


def write(folder: Path, shape: Shape) -> Path:
    """Every file of the folder, which is made if need be; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    processor = _processor_config()
    files: dict[str, Any] = {
        "config.json": model_config(shape),
        "generation_config.json": {
            "eos_token_id": [shape.id_of("<|im_end|>"), shape.id_of("<|endoftext|>")],
            "pad_token_id": shape.id_of("<|endoftext|>"),
        },
        "preprocessor_config.json": processor,
        "video_preprocessor_config.json": processor | {"video_processor_type": "Qwen2VLVideoProcessor"},
        "tokenizer_config.json": _tokenizer_config(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    make_tokenizer(shape).save(str(folder / "tokenizer.json"))
    return folder


def model_config(shape: Shape) -> dict[str, Any]:
    """config.json, flat as the published ones are."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "max_position_embeddings": shape.max_position_embeddings,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": list(shape.mrope_section)},
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": 32_768,
        "max_window_layers": shape.num_hidden_layers,
        "use_cache": True,
        "bos_token_id": shape.id_of("<|endoftext|>"),
        "eos_token_id": shape.id_of("<|im_end|>"),
        "vision_start_token_id": shape.id_of("<|vision_start|>"),
        "vision_end_token_id": shape.id_of("<|vision_end|>"),
        "vision_token_id": shape.id_of("<|vision_pad|>"),
        "image_token_id": shape.id_of("<|image_pad|>"),
        "video_token_id": shape.id_of("<|video_pad|>"),
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "in_channels": 3,
            "out_hidden_size": shape.hidden_size,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            **shape.vision,
        },
    }


def make_tokenizer(shape: Shape) -> Tokenizer:
    """Byte-level BPE: 256 bytes, then ids that only an answer can hold, then the special tokens."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"t{index}": index for index in range(len(vocabulary), shape.first_special_id)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    by_role = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "extra_special_tokens": by_role,
        **by_role,
    }


def _processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3_136,
        "max_pixels": 12_845_056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="is made, and its files are written anew")


def main(args: argparse.Namespace) -> int:
    try:
        print(write(args.folder, SHAPES[args.shape]))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
