"""Builds the byte-level BPE tokenizer and its files.

    python tokenizer.py OUT_DIR

The merges come from the text the recipe itself produces. Printed words are answered in capitals, and no capitals
occur together in that text, so they stay one token a letter: reading is spelling, and unseen words can be read too.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Iterator

import mixture
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
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
PLAIN = ("<tool_call>", "</tool_call>")  # single tokens, yet visible in decoded text
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY = 3072


def corpus(samples: int) -> Iterator[str]:
    """The text to learn merges from: the word list and what dialogues say, less all-capital words."""
    text = re.sub(r"[A-Z]{2,}", "", pathlib.Path(__file__).with_name("english.txt").read_text())
    for _ in range(2):
        yield text
        yield re.sub(r"\b([a-z]{3,})\b", r" \1", text.replace("\n", " "))
        yield " ".join(w.capitalize() for w in text.split() if w.isalpha())
    for seed in range(samples):
        for turn in mixture.make_for_training(seed).turns:
            for piece in (*[p for p in turn.parts if isinstance(p, str)], turn.answer):
                yield re.sub(r"[A-Z]{2,}", "", piece)


def build(samples: int) -> Tokenizer:
    """Trains the tokenizer; specials follow the merges, as in the published family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(PLAIN),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(samples), trainer)
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken(s, normalized=False, special=False) for s in PLAIN])
    return tokenizer


def write(out: pathlib.Path, samples: int) -> Tokenizer:
    """Writes tokenizer.json, tokenizer_config.json and the chat template's JSON form into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build(samples)
    tokenizer.save(str(out / "tokenizer.json"))
    template = pathlib.Path(__file__).with_name("chat_template.jinja").read_text()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        "extra_special_tokens": {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "chat_template.json").write_text(json.dumps({"chat_template": template}, indent=1) + "\n")
    if out.resolve() != pathlib.Path(__file__).parent.resolve():
        (out / "chat_template.jinja").write_text(template)
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer and write its files.")
    parser.add_argument("out", type=pathlib.Path, help="the folder to write to")
    parser.add_argument("--samples", type=int, default=12000, help="how many dialogues to learn merges from")
    args = parser.parse_args()
    tokenizer = write(args.out, args.samples)
    print(f"{tokenizer.get_vocab_size()} tokens written to {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
