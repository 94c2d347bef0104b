"""From tools and response formats to the grammar that bounds an answer."""

from __future__ import annotations

import json
from typing import Any, Literal

import orjson

from app.checks import at_most
from app.openai_schema import (
    ChatCompletionRequest,
    Generation,
    JsonObjectResponse,
    JsonSchemaResponse,
    NamedToolChoice,
    StructuredOutputs,
)
from app.settings import ApiSettings
from app.tool_grammar import forced_tool_calls
from deployments.errors import InvalidRequestError
from deployments.messages import GrammarSpec


class OutputGrammars:
    """One per ingress replica. Checks shape and size; whether a grammar is valid is for its compiler to say."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings, self._limits = settings, settings.limits

    def tools_active(self, request: ChatCompletionRequest) -> bool:
        """Whether the model may call tools. Raises InvalidRequestError for tools that cannot be served."""
        if not request.tools:
            return False
        if self._settings.tool_call_parser is None:
            raise InvalidRequestError(
                "tools are not supported: the served model writes no tool calls.",
                code="unsupported_parameter",
                param="tools",
            )
        at_most("tools", len(request.tools), self._limits.max_tools, "entries")
        for i, tool in enumerate(request.tools):
            param = f"tools[{i}].function.parameters"
            if tool.function.parameters.get("type", "object") != "object":
                raise InvalidRequestError(f"{param} must be the schema of an object.", param=param)
            self._check_schema(param, tool.function.parameters)
        return request.tool_choice != "none"

    def for_tools(self, request: ChatCompletionRequest) -> GrammarSpec | None:
        """Of a forced call; None if the model is free to call or not."""
        choice = request.tool_choice
        if choice == "required":
            functions = [tool.function for tool in request.tools]
        elif isinstance(choice, NamedToolChoice):
            functions = [tool.function for tool in request.tools if tool.function.name == choice.function.name]
        else:
            return None
        return forced_tool_calls(
            [(function.name, function.parameters) for function in functions],
            parallel=request.parallel_tool_calls and choice == "required",
            param="tools",
        )

    def for_format(self, request: Generation) -> GrammarSpec | None:
        """Of `response_format` or `structured_outputs`; None if any text will do."""
        if request.structured_outputs is not None:
            return self._structured(request.structured_outputs)
        form = request.response_format
        if isinstance(form, JsonObjectResponse):
            return GrammarSpec(kind="json_object")
        if isinstance(form, JsonSchemaResponse):
            param = "response_format.json_schema.schema"
            return GrammarSpec(
                kind="json_schema", value=self._check_schema(param, form.json_schema.json_schema), param=param
            )
        return None

    def _structured(self, options: StructuredOutputs) -> GrammarSpec:
        if options.json_ is not None:
            param = "structured_outputs.json"
            return GrammarSpec(kind="json_schema", value=self._schema_text(param, options.json_), param=param)
        if options.regex is not None:
            return self._text_grammar("regex", options.regex, "structured_outputs.regex")
        if options.choice is not None:
            return self._text_grammar("choice", json.dumps(options.choice), "structured_outputs.choice")
        if options.grammar is not None:
            return self._text_grammar("lark", options.grammar, "structured_outputs.grammar")
        return GrammarSpec(kind="json_object", param="structured_outputs.json_object")

    def _text_grammar(self, kind: Literal["regex", "choice", "lark"], value: str, param: str) -> GrammarSpec:
        at_most(param, len(value), self._limits.max_schema_bytes, "characters")
        return GrammarSpec(kind=kind, value=value, param=param)

    def _schema_text(self, param: str, schema: dict[str, Any] | str) -> str:
        if isinstance(schema, str):
            try:
                schema = orjson.loads(schema)
            except ValueError:
                schema = ""
            if not isinstance(schema, dict):
                raise InvalidRequestError(f"{param} must be a JSON schema: an object, or its JSON text.", param=param)
        return self._check_schema(param, schema)

    def _check_schema(self, param: str, schema: dict[str, Any]) -> str:
        text = orjson.dumps(schema)
        at_most(param, len(text), self._limits.max_schema_bytes, "bytes")
        return text.decode()
