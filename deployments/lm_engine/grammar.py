"""Structured output: which tokens may come next so that the text matches a grammar. Wraps llguidance.

Compiling happens at admission, bounded in size and work, so that a hostile schema costs its sender a 400 and nobody
else a step. A compiled grammar is copied per sequence; masks are bits over the model's vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from deployments.errors import InternalError, InvalidRequestError
from deployments.messages import GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 64 * 1024
_CACHED_GRAMMARS = 64
_BITS = 32
# Room for indentation, but an end to it: models like to go on with spaces for ever where any number may come.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}


class Grammar(Protocol):
    """Where one sequence stands in its grammar."""

    def fill_mask(self, mask: np.ndarray, row: int) -> None:
        """Set the bits of allowed next tokens in row `row` of `mask`, int32 [rows, words].

        Raises:
            InvalidRequestError: Going on would be too much work.
        """

    def accept(self, token_id: int) -> None:
        """Advance by an allowed token.

        Raises:
            InternalError: The token is not allowed here.
        """

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of the text may follow."""


class GrammarCompiler:
    """Compiles and remembers grammars for one tokenizer. Safe to call from several threads.

    Args:
        tokenizer_json: The `tokenizers` file's text.
        vocab_size: Columns of the model's logits; at least the tokenizer's size.
        eos_token_ids: Tokens that end the text.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        # Fuel bounds work, not time: about 20 ms to build a lexer and 15 ms a step, on any machine's clock.
        self._limits = LLParserLimits(verbose_errors=False, max_grammar_size=100_000, max_lexer_states=50_000)
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A fresh grammar at its start.

        Raises:
            InvalidRequestError: Too large, not valid, or beyond what is supported; names `spec.param`.
        """
        key = (spec.kind, spec.value)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
        if matcher is None:
            matcher = self._compile(spec)
            with self._lock:
                self._compiled[key] = matcher
                if len(self._compiled) > _CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return LlguidanceGrammar(matcher.deep_copy(), spec.param)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        size = len(spec.value.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{spec.param}: the {spec.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed",
                code="grammar_too_large",
                param=spec.param,
            )
        try:
            matcher = LLMatcher(self._tokenizer, _source(spec), limits=self._limits, log_level=0)
            failed = matcher.is_error()
        except (ValueError, TypeError, RecursionError):
            failed = True
        if failed:
            raise InvalidRequestError(
                f"{spec.param}: the {spec.kind} is not valid, uses something unsupported or is too complex",
                code="invalid_grammar",
                param=spec.param,
            )
        return matcher


class LlguidanceGrammar:
    """Grammar over an `LLMatcher` of its own."""

    __slots__ = ("_matcher", "_param")

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher, self._param = matcher, param

    def fill_mask(self, mask: np.ndarray, row: int) -> None:
        fill_next_token_bitmask(self._matcher, mask, row)
        if self._matcher.is_error():
            message = f"{self._param}: the grammar became too complex while text was generated"
            raise InvalidRequestError(message, code="grammar_too_complex", param=self._param)

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise InternalError(f"token {token_id} is outside the grammar")

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped()


def new_masks(num_rows: int, vocab_size: int) -> np.ndarray:
    """int32 [num_rows, words] of cleared masks."""
    return np.zeros((num_rows, -(-vocab_size // _BITS)), np.int32)


def apply_masks(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    """Set every token of `rows` whose bit is clear to -inf, in place; masks[i] belongs to rows[i]."""
    words = torch.from_numpy(masks).to(logits.device)
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    allowed = (words[..., None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    index = torch.as_tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))


def _source(spec: GrammarSpec) -> str:
    """The spec in llguidance's own form."""
    if spec.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(spec.value, overrides=_JSON_OPTIONS)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.value)
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.value)
    choices = json.loads(spec.value)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices are a list of strings")
    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {quoted}")
