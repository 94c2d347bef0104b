"""Text of a growing sequence, piece by piece: the pieces joined are the text of all tokens, and no piece ends inside a
character or shows one that a later token changes.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from deployments.lm_engine.tokenizer import TokenDecoder

# U+FFFD at the end of a decoded text may be the start of a character whose other bytes are still to come.
_REPLACEMENT = "\ufffd"
# A character of UTF-8 has at most four bytes: what is still broken after as many tokens stays broken.
_MAX_PENDING_TOKENS = 4


class Detokenizer(Protocol):
    """One sequence's decoder."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty."""

    def flush(self) -> str:
        """The rest; the sequence ends here."""


def make_detokenizer(decoder: TokenDecoder, *, skip_special_tokens: bool) -> Detokenizer:
    kind = ByteLevelDetokenizer if decoder.is_byte_level else WindowDetokenizer
    return kind(decoder, skip_special_tokens=skip_special_tokens)


class ByteLevelDetokenizer:
    """For byte-level BPE: an incremental UTF-8 decoder over the tokens' bytes; constant work per token."""

    __slots__ = ("_decoder", "_skip", "_utf8")

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._skip and self._decoder.is_special(token_id):
            return ""
        return self._utf8.decode(self._decoder.bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window twice, without and with the newest tokens, and shows the
    difference. Tokens whose text depends on what stands before them (leading spaces) come out right."""

    __slots__ = ("_decoder", "_shown", "_skip", "_window")

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens
        self._window: list[int] = []
        self._shown = 0
        """Leading tokens of the window whose text was shown."""

    def push(self, token_id: int) -> str:
        if self._skip and self._decoder.is_special(token_id):
            return ""
        self._window.append(token_id)
        pending = len(self._window) - self._shown
        return self._advance(final=pending > _MAX_PENDING_TOKENS)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._shown])
        after = self._decode(self._window)
        if not final and (after.endswith(_REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip)
