"""The model's shape: every number of its architecture, and the configuration files that state them."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig

PATCH, MERGE, TEMPORAL = 14, 2, 2
WINDOW = 112
MIN_PIXELS, MAX_PIXELS = 56 * 56, 448 * 448
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_POSITIONS = 8192


def config(tokenizer: Tokenizer) -> Qwen2_5_VLConfig:
    """The architecture, about 12 million parameters."""
    from transformers import Qwen2_5_VLConfig

    def token(text: str) -> int:
        found = tokenizer.token_to_id(text)
        if found is None:
            raise ValueError(f"the tokenizer lacks {text!r}")
        return found

    vision = {
        "depth": 8,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "window_size": WINDOW,
        "fullatt_block_indexes": [2, 5, 7],
        "out_hidden_size": 256,
        "hidden_act": "silu",
        "tokens_per_second": 2,
    }
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "max_window_layers": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        bos_token_id=token("<|endoftext|>"),
        eos_token_id=token("<|im_end|>"),
        pad_token_id=token("<|endoftext|>"),
    )


def write_processor(out: pathlib.Path, tokenizer: Tokenizer) -> None:
    """The files beside the weights that say how to prepare pictures and when to stop."""
    end, stop = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    generation = {"bos_token_id": end, "do_sample": False, "eos_token_id": [stop, end], "pad_token_id": end}
    picture = {
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "merge_size": MERGE,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
    video = {k: v for k, v in picture.items() if k != "image_processor_type"}
    video["video_processor_type"] = "Qwen2VLVideoProcessor"
    for name, content in (
        ("generation_config.json", generation),
        ("preprocessor_config.json", picture),
        ("video_preprocessor_config.json", video),
    ):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
