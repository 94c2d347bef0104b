"""A tokenizer that no text can trick: special tokens are known to it only under names that nobody else can write.

    template source   <|im_start|>user ...      ──alias()──▶  ⟪nonce:1⟫user ...         special, one token
    caller's text     "what is <|im_start|>?"   ──as it is─▶  "what is <|im_start|>?"   text, several tokens

Renaming happens once, in the tokenizer's own table. The prompt is then encoded in a single pass by the unchanged
algorithm, so ordinary prompts get exactly the tokens that the original tokenizer gives them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deployments.checkpoint import CheckpointError, read_json
from deployments.errors import InvalidRequestError

_MAX_SHRINKAGE = 4
"""Bytes of text that a normaliser may turn into one byte, generously."""


class AliasedTokenizer:
    """Encodes text; special tokens only by alias.

    Args:
        tokenizer_json: Content of a `tokenizer.json`.
        protected: Further tokens to treat as special, though the file may not call them so.
    """

    def __init__(self, tokenizer_json: Mapping[str, Any], protected: Collection[str] = ()) -> None:
        names = [
            token["content"]
            for token in tokenizer_json["added_tokens"]
            if token["special"] or token["content"] in protected
        ]
        # Private-use characters and a nonce: text that holds an alias can only come from this object.
        nonce = secrets.token_hex(8)
        self._aliases = {name: f"\U000f0000{nonce}:{i}\U000f0001" for i, name in enumerate(names)}
        self._end_mark = f"\U000f0000{nonce}:end\U000f0001"
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tokenizer = Tokenizer.from_str(json.dumps(_rename(tokenizer_json, self._aliases)))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))
        self._max_bytes_per_token = _MAX_SHRINKAGE * longest
        original = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
        self._ids: dict[str, int] = {name: original[name] for name in names}
        moved = [name for name, alias in self._aliases.items() if self._tokenizer.token_to_id(alias) != original[name]]
        if moved:
            raise CheckpointError(f"special tokens have inconsistent ids in tokenizer.json: {', '.join(moved)}")

    @classmethod
    def from_folder(cls, folder: Path) -> AliasedTokenizer:
        """The tokenizer of a model folder; converted by transformers if it has no tokenizer.json."""
        if (folder / "tokenizer.json").is_file():
            content = read_json(folder, "tokenizer.json")
        else:
            from transformers import AutoTokenizer

            content = json.loads(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str())
        return cls(content, _configured_specials(folder))

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Id of every special token by its ordinary name."""
        return self._ids

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_mark(self) -> str:
        """Text that no caller can have written, to find a place in a rendered prompt again."""
        return self._end_mark

    def min_tokens(self, text: str) -> int:
        """Lower bound of the text's tokens, without encoding it."""
        return len(text) // self._max_bytes_per_token

    def alias(self, text: str, *, keep: Collection[str] = ()) -> str:
        """`text` with special tokens renamed so that `encode` takes them for special; those in `keep` stay text."""
        return self._pattern.sub(lambda found: found[0] if found[0] in keep else self._aliases[found[0]], text)

    def unalias(self, text: str) -> str:
        """The opposite of `alias`."""
        for name, alias in self._aliases.items():
            text = text.replace(alias, name)
        return text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens under their ordinary names are text.

        Raises:
            InvalidRequestError: The text is not valid Unicode (a lone surrogate).
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError("the text holds a lone surrogate, which is no valid Unicode") from None


def _rename(tokenizer_json: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The same tokenizer with its special tokens under their aliases; ids stay as they are."""
    added = [
        # `special` would be dropped by skip_special_tokens only; `normalized` must not touch the alias.
        {**token, "content": aliases[token["content"]], "normalized": False, "special": True}
        if token["content"] in aliases
        else token
        for token in tokenizer_json["added_tokens"]
    ]
    model = dict(tokenizer_json["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(name, name): token_id for name, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[aliases.get(name, name), score] for name, score in vocab]
    return {**tokenizer_json, "added_tokens": added, "model": model, "truncation": None, "padding": None}


def _configured_specials(folder: Path) -> set[str]:
    """Tokens that tokenizer_config.json calls special; transformers goes by this file, not by tokenizer.json."""
    config = read_json(folder, "tokenizer_config.json", default={})
    found = {_text_of(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    extra = config.get("extra_special_tokens", {})
    found |= {_text_of(token) for token in (extra.values() if isinstance(extra, dict) else extra)}
    found |= {_text_of(token) for token in config.get("additional_special_tokens") or []}
    for token in config.get("added_tokens_decoder", {}).values():
        if token.get("special"):
            found.add(token["content"])
    return found - {""}


def _text_of(token: str | Mapping[str, Any] | None) -> str:
    if isinstance(token, Mapping):
        return str(token.get("content", ""))
    return token or ""
