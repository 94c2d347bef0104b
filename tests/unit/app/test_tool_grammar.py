from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from app.tool_calls import CallStart, HermesToolParser
from app.tool_grammar import forced_tool_calls

ONE_INTEGER = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
GET = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def accepts(tokenizer: Any, grammar: str, text: str) -> bool:
    eos = tokenizer.token_to_id("<end>")
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=eos), LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "parallel", "accepted"),
    [
        (GET, False, True),
        (GET, True, True),
        (f"{GET}\n{GET}", True, True),
        (f"{GET}\n{GET}", False, False),
        (GET.replace("get", "a.b-c_d"), False, True),
        (GET.replace("get", "other"), False, False),
        (GET.replace("1", '"one"'), False, False),
        (GET.replace('{"x": 1}', "{}"), False, False),
        ("words", False, False),
        ("", False, False),
        (GET[:-1], False, False),
    ],
)
def test_only_well_formed_calls(tokenizer: Any, text: str, parallel: bool, accepted: bool) -> None:
    spec = forced_tool_calls([("get", ONE_INTEGER), ("a.b-c_d", {})], parallel=parallel, param="tools")
    assert spec.kind == "lark"
    assert accepts(tokenizer, spec.value, text) is accepted


def test_what_the_grammar_allows_is_what_the_parser_reads(tokenizer: Any) -> None:
    spec = forced_tool_calls([("get", ONE_INTEGER)], parallel=False, param="tools")
    assert accepts(tokenizer, spec.value, GET)
    assert HermesToolParser().feed(GET)[0] == CallStart(0, "get")
