"""The model folder's tokenizer as the engine needs it: from ids back to bytes and text, and which ids end a text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from deployments.checkpoint import CheckpointError, read_json


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's `tokenizer.json`; older folders are converted by transformers.

    Raises:
        CheckpointError: The folder holds no usable tokenizer.
    """
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return Tokenizer.from_file(str(path))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as exc:  # both libraries raise bare Exceptions
        raise CheckpointError("the model folder holds no usable tokenizer") from exc


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text: of generation config, model config and tokenizer config, sorted."""
    config = read_json(folder, "config.json")
    text_config = config.get("text_config") or {}
    generation = read_json(folder, "generation_config.json", default={})
    declared = generation.get("eos_token_id", config.get("eos_token_id", text_config.get("eos_token_id")))
    ids = set(declared) if isinstance(declared, list) else {declared}
    ids.add(_token_id(tokenizer, read_json(folder, "tokenizer_config.json", default={}).get("eos_token")))
    return tuple(sorted(token_id for token_id in ids if token_id is not None))


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """Id of a token given as a string or as a tokenizer config's {"content": ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


class TokenDecoder:
    """Ids to bytes and text for one tokenizer; shared by all sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        """Whether a text's bytes are its tokens' bytes, one after the other."""
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_of = _byte_level_alphabet()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole run of tokens; ids the tokenizer lacks are nothing."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """A token's own bytes, which need not be whole characters; empty for an id the tokenizer lacks."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            values = [self._byte_of.get(character) for character in token]
            return token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        return self.decode([token_id], skip_special_tokens=False).encode()


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE (GPT-2): printable bytes are themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    return alphabet | {chr(0x100 + order): byte for order, byte in enumerate(others)}
