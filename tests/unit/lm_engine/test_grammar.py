from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer

from deployments.errors import InternalError, InvalidRequestError
from deployments.lm_engine.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarCompiler, apply_masks, new_masks
from deployments.messages import GrammarSpec
from tests.tiny_models import make_tokenizer

VOCAB = 400  # more than the tokenizer has, as real checkpoints do
EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer().backend_tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str(), VOCAB, (0, EOS))


def allowed(grammar: Grammar) -> list[int]:
    masks = new_masks(1, VOCAB)
    grammar.fill_mask(masks, 0)
    logits = torch.zeros(1, VOCAB)
    apply_masks(logits, [0], masks)
    return logits[0].isfinite().nonzero().flatten().tolist()


def generate(grammar: Grammar, tokenizer: Tokenizer, pick: Callable[[list[int]], int], limit: int = 400) -> str:
    ids: list[int] = []
    while not grammar.is_finished and len(ids) < limit:
        token = pick(allowed(grammar))
        if token in (0, EOS):
            break
        grammar.accept(token)
        ids.append(token)
    return tokenizer.decode(ids)


def shortest_first(tokens: list[int]) -> int:
    return EOS if EOS in tokens else tokens[0]


@pytest.mark.parametrize("seed", range(5))
def test_regex(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    grammar = compiler.compile(GrammarSpec(kind="regex", value="(red|blue) [0-9]{2,4}"))
    text = generate(grammar, tokenizer, random.Random(seed).choice)
    assert re.fullmatch("(red|blue) [0-9]{2,4}", text)


def test_choice_allows_only_the_choices_and_finishes(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = ["red", 'say "hi"', "größer"]
    seen = set()
    for seed in range(20):
        grammar = compiler.compile(GrammarSpec(kind="choice", value=json.dumps(choices)))
        seen.add(generate(grammar, tokenizer, random.Random(seed).choice))
        assert grammar.is_finished
    assert seen == set(choices)


def test_json_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["color", "n"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(GrammarSpec(kind="json_schema", value=json.dumps(schema)))
    value = json.loads(generate(grammar, tokenizer, random.Random(1).choice))
    assert value.keys() == {"color", "n"}
    assert value["color"] in ("red", "blue")


def test_json_object_begins_with_a_brace(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec(kind="json_object"))
    starts = {tokenizer.decode([token])[0] for token in allowed(grammar)}
    assert "{" in starts
    assert "[" not in starts


def test_lark(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec(kind="lark", value='start: "a" "b"'))
    assert generate(grammar, tokenizer, shortest_first) == "ab"


def test_tokens_beyond_the_tokenizer_are_never_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec(kind="regex", value=".*"))
    assert max(allowed(grammar)) < tokenizer.get_vocab_size()


def test_grammars_of_one_spec_are_independent(compiler: GrammarCompiler) -> None:
    first, second = (compiler.compile(GrammarSpec(kind="choice", value='["ab", "cd"]')) for _ in range(2))
    before = allowed(second)
    first.accept(allowed(first)[0])
    assert allowed(second) == before


def test_a_token_outside_the_grammar_is_a_fault(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec(kind="choice", value='["a"]'))
    with pytest.raises(InternalError):
        grammar.accept(next(token for token in range(20, 300) if token not in allowed(grammar)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": 3}'),
        ("regex", "["),
        ("choice", "[]"),
        ("choice", "[1]"),
        ("choice", '{"a": 1}'),
        ("lark", "no such rule"),
    ],
)
def test_what_cannot_be_compiled_is_the_callers_error(compiler: GrammarCompiler, kind: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"response_format: the {kind}") as caught:
        compiler.compile(GrammarSpec(kind=kind, value=value))  # type: ignore[arg-type]
    assert caught.value.param == "response_format"


def test_a_grammar_that_explodes_while_generating_is_the_callers_error(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec(kind="regex", value="(((a{1,99}b?){1,99}c?){1,99}d?){1,99}(e{1,99}){1,99}"))

    def go_on() -> None:
        for _ in range(500):
            grammar.accept(allowed(grammar)[0])

    with pytest.raises(InvalidRequestError, match="response_format: the grammar became too complex"):
        go_on()


def test_white_space_comes_to_an_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec(kind="json_object"))
    grammar.accept(next(token for token in allowed(grammar) if tokenizer.decode([token]) == "{"))
    blanks = [token for token in range(VOCAB) if tokenizer.decode([token]).isspace()]
    count = 0
    while set(blanks) & set(allowed(grammar)):
        grammar.accept(min(set(blanks) & set(allowed(grammar))))
        count += 1
    assert 0 < count <= 20


def test_size_is_bounded_and_named(compiler: GrammarCompiler) -> None:
    value = "a" * (MAX_GRAMMAR_BYTES + 1)
    with pytest.raises(InvalidRequestError, match=f"{MAX_GRAMMAR_BYTES + 1} bytes, at most {MAX_GRAMMAR_BYTES}"):
        compiler.compile(GrammarSpec(kind="regex", value=value))
