"""A grammar that leaves a model nothing but well-formed tool calls; the form is the one tool_calls.py reads.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Written in Lark as llguidance reads it: `%json {...}` stands for any JSON text that the schema accepts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.tool_calls import CALL_CLOSE, CALL_OPEN
from deployments.messages import GrammarSpec


def forced_tool_calls(functions: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool, param: str) -> GrammarSpec:
    """One call of one of `functions`, each a name and the JSON schema of its arguments; several calls if `parallel`."""
    names = " | ".join(f"function_{i}" for i in range(len(functions)))
    lines = [
        f"start: call{' (_separator call)*' if parallel else ''}",
        f"call: {_literal(CALL_OPEN)} NEWLINE ({names}) NEWLINE {_literal(CALL_CLOSE)}",
        'NEWLINE: "\\n"',
    ]
    if parallel:
        lines.append("_separator: NEWLINE")
    for i, (name, schema) in enumerate(functions):
        head = _literal(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'function_{i}: {head} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps(_object_schema(schema))}")
    return GrammarSpec(kind="lark", value="\n".join(lines) + "\n", param=param)


def _object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whether or not the schema says so."""
    return {"type": "object", **schema}


def _literal(text: str) -> str:
    return json.dumps(text)
