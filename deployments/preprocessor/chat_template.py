"""A model's chat template: found in its folder, compiled once, rendered in a sandbox. Knows nothing about tokens.

The environment offers what transformers offers to templates: sandboxed, immutable, trimmed blocks, loop controls,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.checkpoint import CheckpointError, read_json
from deployments.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PROBE = "probe text"


class _TemplateRefusalError(Exception):
    """The template itself called `raise_exception`."""


class ChatTemplate:
    """Renders conversations.

    Args:
        source: Jinja text.
        tool_source: Used instead when a request brings tools; the same as `source` if None.
        variables: `bos_token` and the like.
    """

    def __init__(self, source: str, tool_source: str | None = None, variables: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateError as exc:
            raise CheckpointError(f"the model's chat template has an error: {exc}") from exc
        self._variables = dict(variables or {})
        self._takes_lists = {role: self._renders_lists(role) for role in ROLES}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        Raises:
            InvalidRequestError: Unknown role, or a conversation that the template refuses or fails on.
        """
        turns = [self._prepare(message, f"messages[{i}]") for i, message in enumerate(messages)]
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                **{
                    **self._variables,
                    **(template_kwargs or {}),
                    "messages": turns,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TemplateRefusalError as exc:
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {str(exc)[:200]}", param="messages"
            ) from None
        except Exception:  # templates are programs: any type can come out
            raise InvalidRequestError(
                "the model's chat template cannot render this conversation; check roles, contents and tools",
                param="messages",
            ) from None

    def _prepare(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A turn in the shape that templates expect: text for `content: null`, arguments as objects."""
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequestError(f"the role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        turn = dict(message)
        turn["content"] = self._prepare_content(role, message.get("content"))
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_prepare_tool_call(call) for call in turn["tool_calls"]]
        else:
            turn.pop("tool_calls", None)
        return turn

    def _prepare_content(self, role: str, content: Any) -> Any:
        if content is None:
            return ""
        if isinstance(content, str) or self._takes_lists[role]:
            return content
        if all(part.get("type") == "text" for part in content):
            return "\n".join(part["text"] for part in content)
        return content

    def _renders_lists(self, role: str) -> bool:
        """Whether this role's content may be a list of parts, judged by trying it."""
        turns: list[dict[str, Any]] = [{"role": role, "content": [{"type": "text", "text": _PROBE}]}]
        if role != "user":  # templates that insist on a user turn
            turns.insert(0 if role != "system" else 1, {"role": "user", "content": "hi"})
        try:
            text = self._template.render(messages=turns, tools=None, add_generation_prompt=False, **self._variables)
        except Exception:  # as in render
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def load_chat_template(folder: Path, alias: Callable[[str], str] = str) -> ChatTemplate | None:
    """The template of a model folder; None if it has none.

    Args:
        folder: Looked through for chat_template.jinja, chat_template.json and tokenizer_config.json, in this order.
        alias: Applied to the template's source and to the values of `bos_token` and the like.
    """
    config = read_json(folder, "tokenizer_config.json", default={})
    found = _find_source(folder, config)
    if not found:
        return None
    named = found if isinstance(found, dict) else {"default": found}
    if "default" not in named:
        raise CheckpointError(f"the model has no default chat template; it has {', '.join(sorted(named))}")
    variables = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text:
            variables[name] = alias(text)
    tool_source = named.get("tool_use")
    return ChatTemplate(alias(named["default"]), alias(tool_source) if tool_source else None, variables)


def _find_source(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = read_json(folder, "chat_template.json", default={}).get("chat_template") or config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return source


def _prepare_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        # Templates print an object; text that is none is passed on as the text it is.
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _TemplateRefusalError(str(message))
