"""What a PromQL expression refers to: metrics, their matchers, grouping labels. A tokenizer, not an evaluator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
      (?P<space>\s+|\#[^\n]*)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)
    | (?P<duration>(?:\d+(?:ms|[smhdwy]))+)
    | (?P<number>(?:0x[0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))
    | (?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){}\[\],:@])
    """,
    re.VERBOSE,
)
_LABEL_LISTS = frozenset(("by", "without", "on", "ignoring", "group_left", "group_right"))
_WORDS = _LABEL_LISTS | {"and", "or", "unless", "bool", "offset", "inf", "nan"}


class PromQLError(ValueError):
    """The text is no PromQL that this tokenizer understands."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Matcher:
    label: str
    operator: str
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """`name{matchers}`; a range or offset after it is left out."""

    name: str
    matchers: tuple[Matcher, ...] = ()

    def __str__(self) -> str:
        matchers = ",".join(f'{m.label}{m.operator}"{m.value}"' for m in self.matchers)
        return f"{self.name}{{{matchers}}}" if matchers else self.name


@dataclass(frozen=True, slots=True)
class References:
    selectors: tuple[Selector, ...]
    labels: frozenset[str]
    """Named by `by`, `without`, `on`, `ignoring`, `group_left` and `group_right`."""
    made_labels: frozenset[str]
    """Written by `label_replace` and `label_join`."""


def tokens(expr: str) -> list[Token]:
    """Raises PromQLError at the first character that begins no token."""
    found, position = [], 0
    while position < len(expr):
        match = _TOKEN.match(expr, position)
        if match is None or match.lastgroup is None:
            raise PromQLError(f"no token at {expr[position : position + 20]!r}")
        if match.lastgroup != "space":
            found.append(Token(match.lastgroup, match.group()))
        position = match.end()
    _check_brackets(found)
    return found


def references(expr: str) -> References:
    """Everything `expr` names. Raises PromQLError."""
    stream = tokens(expr)
    selectors: list[Selector] = []
    labels: set[str] = set()
    made: set[str] = set()
    position = 0
    while position < len(stream):
        token = stream[position]
        following = stream[position + 1].text if position + 1 < len(stream) else ""
        if token.kind != "word":
            position += 1
        elif token.text in _LABEL_LISTS and following == "(":
            end = _closing(stream, position + 1)
            labels.update(t.text for t in stream[position + 2 : end] if t.kind == "word")
            position = end + 1
        elif token.text.lower() in _WORDS or following == "(" or following in ("by", "without"):
            if token.text in ("label_replace", "label_join"):
                made.add(_written_label(stream, position + 1))
            position += 1
        else:
            selector, position = _selector(stream, position)
            selectors.append(selector)
    return References(tuple(selectors), frozenset(labels), frozenset(made))


def fill_variables(expr: str, values: Mapping[str, str]) -> str:
    """Grafana's `$name` and `${name}` replaced. Raises PromQLError for one without a value."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in values:
            raise PromQLError(f"no value for the variable ${name}")
        return values[name]

    return re.sub(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))", value, expr)


def legend_labels(legend: str) -> Iterator[str]:
    for match in re.finditer(r"\{\{\s*(\w+)\s*\}\}", legend):
        yield match.group(1)


def _selector(stream: list[Token], position: int) -> tuple[Selector, int]:
    name = stream[position].text
    if position + 1 == len(stream) or stream[position + 1].text != "{":
        return Selector(name), position + 1
    end = _closing(stream, position + 1)
    inside = stream[position + 2 : end]
    matchers = []
    for start in range(0, len(inside), 4):
        group = inside[start : start + 4]
        if [t.kind for t in group[:3]] != ["word", "sign", "string"] or (len(group) == 4 and group[3].text != ","):
            raise PromQLError(f"not a list of matchers after {name}")
        matchers.append(Matcher(group[0].text, group[1].text, group[2].text[1:-1]))
    return Selector(name, tuple(matchers)), end + 1


def _written_label(stream: list[Token], opening: int) -> str:
    depth = 0
    for position in range(opening, len(stream)):
        depth += {"(": 1, ")": -1}.get(stream[position].text, 0)
        if depth == 1 and stream[position].text == "," and stream[position + 1].kind == "string":
            return stream[position + 1].text[1:-1]
    raise PromQLError("label_replace names no label")


def _closing(stream: list[Token], opening: int) -> int:
    depth = 0
    for position in range(opening, len(stream)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(stream[position].text, 0)
        if depth == 0:
            return position
    raise PromQLError("a bracket is not closed")


def _check_brackets(stream: list[Token]) -> None:
    pairs, opened = {")": "(", "}": "{", "]": "["}, []
    for token in stream:
        if token.text in pairs.values():
            opened.append(token.text)
        elif token.text in pairs and (not opened or opened.pop() != pairs[token.text]):
            raise PromQLError(f"{token.text} closes nothing")
    if opened:
        raise PromQLError(f"{opened[-1]} is not closed")
