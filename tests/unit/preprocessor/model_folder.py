"""A model folder as small as can be: config, processor, a byte-level BPE tokenizer and a chat template. No weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ORDINARY_ADDED = ("<tool_call>", "</tool_call>")

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "What is in the picture? Describe it, please.\n\nassistant\nuser\nsystem\n",
    "  spaces   and\ttabs\n and don't we'll 1234 5678",
] * 8


def write_model_folder(
    folder: Path, *, template: str = TEMPLATE, model_type: str = "qwen2_5_vl", patch_size: int = 14
) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(list(ORDINARY_ADDED))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    _write(
        folder / "config.json",
        {
            "model_type": model_type,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {"patch_size": patch_size, "spatial_merge_size": 2},
        },
    )
    _write(
        folder / "preprocessor_config.json",
        {
            "min_pixels": 3136,
            "max_pixels": 16384 * 28 * 28,
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
