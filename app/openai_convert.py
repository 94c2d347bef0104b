"""From a validated OpenAI request to a Call: turns, media, sampling and grammar in the words of the stages.

Here is judged what depends on the served model and on the operator's limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from app.openai_schema import (
    AnyMessage,
    AssistantMessage,
    ChatCompletionRequest,
    ChatTemplateOptions,
    CompletionRequest,
    ContentPart,
    Generation,
    ImagePart,
    ImageUrlPart,
    JsonObjectResponse,
    JsonSchemaResponse,
    NamedToolChoice,
    RefusalPart,
    StructuredOutputs,
    TextPart,
    TokenizeChatRequest,
    TokenizeTextRequest,
    ToolCall,
    ToolMessage,
    VideoPart,
    VideoUrlPart,
)
from app.pipeline import Call
from app.settings import ApiSettings
from app.tool_calls import CALL_CLOSE
from app.tool_grammar import forced_tool_calls
from cache_service.tenants import Tenant
from deployments.errors import InvalidRequestError, NotFoundError
from deployments.messages import ChatPrompt, GrammarSpec, MediaInput, SamplingParams, TextPrompt

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them only overflows."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions, where no answer has a natural end."""
_RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    )
)


@dataclass(frozen=True, slots=True)
class _Content:
    template: str | list[dict[str, str]]
    """Text, or the parts with media as bare `{"type": "image"}`."""
    media: list[MediaInput]


class RequestConverter:
    """One per ingress replica.

    Args:
        new_id: Makes the unique part of engine ids.
    """

    def __init__(self, settings: ApiSettings, new_id: Callable[[], str]) -> None:
        self._settings, self._limits, self._new_id = settings, settings.limits, new_id

    def chat(self, request: ChatCompletionRequest, tenant: Tenant) -> Call:
        self.check_model(request.model)
        max_tokens = request.max_completion_tokens or request.max_tokens
        tools_active = self._tools_active(request)
        prompt, media = self._chat_prompt(request, tenant, with_tools=tools_active)
        max_tokens_param = (
            "max_completion_tokens"
            if request.max_completion_tokens is not None
            else "max_tokens"
            if request.max_tokens is not None
            else None
        )
        _check_tenant_tokens(max_tokens_param or "max_tokens", max_tokens, tenant)
        stop: tuple[str, ...] = ()
        if tools_active and not request.parallel_tool_calls and request.tool_choice in (None, "auto"):
            stop = (CALL_CLOSE,)  # Nothing constrains the text, so the first call ends it.
        return Call(
            engine_id=self._new_id(),
            prompt=prompt,
            prompt_param="messages",
            media=media,
            sampling=self._sampling(
                request,
                max_tokens=max_tokens,
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                logprobs_param="top_logprobs",
                extra_stop=stop,
                grammar=self._tool_grammar(request) or self._grammar(request),
            ),
            max_tokens_param=max_tokens_param,
            tenant=tenant,
            mm_processor_kwargs=_check_mm_kwargs(request.mm_processor_kwargs),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def completions(self, request: CompletionRequest, tenant: Tenant) -> tuple[Call, ...]:
        """One call for each prompt."""
        self.check_model(request.model)
        _at_most("prompt", len(request.prompt), self._limits.max_prompts, "prompts")
        max_tokens = request.max_tokens or COMPLETION_MAX_TOKENS
        _check_tenant_tokens("max_tokens", max_tokens, tenant)
        sampling = self._sampling(
            request,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            logprobs_param="logprobs",
            extra_stop=(),
            grammar=self._grammar(request),
        )
        return tuple(
            Call(
                engine_id=self._new_id(),
                prompt=self._text_prompt(prompt, request.add_special_tokens),
                prompt_param="prompt",
                sampling=sampling,
                max_tokens_param="max_tokens",
                tenant=tenant,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
            for prompt in request.prompt
        )

    def tokenize(self, request: TokenizeChatRequest | TokenizeTextRequest, tenant: Tenant) -> Call:
        if request.model is not None:
            self.check_model(request.model)
        media: tuple[MediaInput, ...] = ()
        kwargs: Mapping[str, object] = {}
        prompt: ChatPrompt | TextPrompt
        if isinstance(request, TokenizeChatRequest):
            prompt, media = self._chat_prompt(request, tenant, with_tools=bool(request.tools))
            kwargs = _check_mm_kwargs(request.mm_processor_kwargs)
        else:
            prompt = TextPrompt(text=request.prompt, add_special_tokens=request.add_special_tokens)
        return Call(
            engine_id=self._new_id(),
            prompt=prompt,
            prompt_param="prompt",
            media=media,
            mm_processor_kwargs=kwargs,
            sampling=SamplingParams(max_tokens=1),
            max_tokens_param=None,
            tenant=tenant,
        )

    def check_model(self, name: str) -> None:
        if name not in self._settings.served_model_name:
            raise NotFoundError(
                "The model does not exist on this server; GET /v1/models lists what is served.",
                code="model_not_found",
                param="model",
            )

    # ---- prompt
    def _text_prompt(self, prompt: str | list[int], add_special_tokens: bool) -> TextPrompt:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("prompt must not be empty.", param="prompt")
            return TextPrompt(text=prompt, add_special_tokens=add_special_tokens)
        self._check_token_ids("prompt", prompt)
        return TextPrompt(token_ids=tuple(prompt), add_special_tokens=False)

    def _chat_prompt(
        self, request: ChatTemplateOptions, tenant: Tenant, *, with_tools: bool
    ) -> tuple[ChatPrompt, tuple[MediaInput, ...]]:
        _at_most("messages", len(request.messages), self._limits.max_messages, "messages")
        num_parts = sum(len(message.content or ()) for message in request.messages)
        _at_most("messages", num_parts, self._limits.max_content_parts, "content parts")
        reserved = sorted(_RESERVED_TEMPLATE_KWARGS.intersection(request.chat_template_kwargs))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {reserved[0]}.", param=f"chat_template_kwargs.{reserved[0]}"
            )
        messages: list[Mapping[str, Any]] = []
        media: list[MediaInput] = []
        for i, message in enumerate(request.messages):
            content = self._content(message, f"messages[{i}]")
            media.extend(content.media)
            messages.append(_template_message(message, content.template, f"messages[{i}]"))
        self._check_media_counts(media, tenant)
        tools = tuple(_template_tool(tool) for tool in request.tools) if with_tools else None
        prompt = ChatPrompt(
            messages=tuple(messages),
            tools=tools,
            template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        return prompt, tuple(media)

    def _content(self, message: AnyMessage, path: str) -> _Content:
        parts: list[dict[str, str]] = []
        media: list[MediaInput] = []
        for i, part in enumerate(message.content or ()):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            elif isinstance(part, RefusalPart):
                parts.append({"type": "text", "text": part.refusal})
            else:
                item = self._media(part, f"{path}.content[{i}]")
                media.append(item)
                parts.append({"type": item.modality})
        if media:
            return _Content(parts, media)
        # As one string: templates that know no parts read it too, and those that do would join the parts alike.
        return _Content("".join(part["text"] for part in parts), media)

    def _media(self, part: ContentPart, path: str) -> MediaInput:
        if isinstance(part, ImageUrlPart):
            url = part.image_url.url if part.image_url else None
            detail = part.image_url.detail if part.image_url else "auto"
            return self._media_input("image", f"{path}.image_url", "url", url, part.uuid, detail=detail)
        if isinstance(part, VideoUrlPart):
            url = part.video_url.url if part.video_url else None
            return self._media_input("video", f"{path}.video_url", "url", url, part.uuid)
        if isinstance(part, ImagePart):
            return self._media_input("image", f"{path}.image", "", part.image, part.uuid)
        assert isinstance(part, VideoPart)
        if isinstance(part.video, list):
            _at_most(f"{path}.video", len(part.video), self._limits.max_video_frames, "frames")
            if not all(part.video):
                raise InvalidRequestError("A frame's URL is empty.", param=f"{path}.video")
            return self._media_input("video", f"{path}.video", "", None, part.uuid, frames=tuple(part.video))
        return self._media_input("video", f"{path}.video", "", part.video, part.uuid)

    def _media_input(
        self,
        modality: Literal["image", "video"],
        param: str,
        field: str,
        url: str | None,
        uuid: str | None,
        *,
        detail: Literal["auto", "low", "high"] = "auto",
        frames: tuple[str, ...] = (),
    ) -> MediaInput:
        place = f"{param}.{field}" if field else param
        if url is None and not frames and uuid is None:
            raise InvalidRequestError(
                f"{place} is missing: a data: or http(s) URL is needed, or a uuid that is known already.",
                code="missing_required_parameter",
                param=param,
            )
        if url is not None and not url.strip():
            raise InvalidRequestError(f"{place} is empty: a data: or http(s) URL is needed.", param=param)
        if uuid is not None and len(uuid) > self._limits.max_uuid_chars:
            raise InvalidRequestError(
                f"The uuid has {len(uuid)} characters, the limit is {self._limits.max_uuid_chars}.",
                param=f"{param.rpartition('.')[0]}.uuid",
            )
        return MediaInput(modality=modality, param=param, url=url, uuid=uuid, detail=detail, frames=frames)

    def _check_media_counts(self, media: Sequence[MediaInput], tenant: Tenant) -> None:
        for modality, words in (("image", "images"), ("video", "videos")):
            limit = self._limits.limit_mm_per_prompt.get(modality, 0)
            _check_count([item for item in media if item.modality == modality], words, limit, "the limit")
        if tenant.limits.max_images_per_request is not None:
            _check_count(media, "images and videos", tenant.limits.max_images_per_request, "the limit of this key")

    # ---- sampling
    def _sampling(
        self,
        request: Generation,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        logprobs_param: str,
        extra_stop: tuple[str, ...],
        grammar: GrammarSpec | None,
    ) -> SamplingParams:
        self._check_sampling(request, logprobs, logprobs_param)
        defaults = self._settings.sampling_defaults
        temperature = _first(request.temperature, defaults.temperature)
        return SamplingParams(
            max_tokens=max_tokens or self._settings.max_model_len,
            min_tokens=request.min_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=_first(request.top_p, defaults.top_p),
            top_k=max(0, _first(request.top_k, defaults.top_k)),
            min_p=_first(request.min_p, defaults.min_p),
            seed=None if request.seed is None else request.seed % 2**63,
            n=request.n,
            stop=tuple(dict.fromkeys((*request.stop, *extra_stop))),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
            ignore_eos=request.ignore_eos,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=tuple(request.logit_bias.items()),
            logprobs=logprobs,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            grammar=grammar,
        )

    def _check_sampling(self, request: Generation, logprobs: int | None, logprobs_param: str) -> None:
        limits = self._limits
        _value_at_most("n", request.n, limits.max_n)
        _value_at_most(logprobs_param, logprobs or 0, limits.max_logprobs)
        _at_most("stop", len(request.stop), limits.max_stop_strings, "entries")
        for i, stop in enumerate(request.stop):
            _at_most(f"stop[{i}]", len(stop), limits.max_stop_chars, "characters")
        _at_most("stop_token_ids", len(request.stop_token_ids), limits.max_stop_token_ids, "entries")
        _at_most("logit_bias", len(request.logit_bias), limits.max_logit_bias, "entries")
        self._check_token_ids("stop_token_ids", request.stop_token_ids)
        self._check_token_ids("logit_bias", tuple(request.logit_bias))

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._settings.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            largest = max(token_ids)
            seen = str(largest) if largest < 2**63 else "over 2**63"
            raise InvalidRequestError(
                f"{param} holds the token id {seen}; the largest of this model is {vocab_size - 1}.",
                code="invalid_token_id",
                param=param,
            )

    # ---- grammar
    def _tools_active(self, request: ChatCompletionRequest) -> bool:
        if not request.tools:
            return False
        if self._settings.tool_call_parser is None:
            raise InvalidRequestError(
                "tools are not supported: the served model writes no tool calls.",
                code="unsupported_parameter",
                param="tools",
            )
        _at_most("tools", len(request.tools), self._limits.max_tools, "entries")
        for i, tool in enumerate(request.tools):
            param = f"tools[{i}].function.parameters"
            if tool.function.parameters.get("type", "object") != "object":
                raise InvalidRequestError(f"{param} must be the schema of an object.", param=param)
            self._check_schema(param, tool.function.parameters)
        return request.tool_choice != "none"

    def _tool_grammar(self, request: ChatCompletionRequest) -> GrammarSpec | None:
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

    def _grammar(self, request: Generation) -> GrammarSpec | None:
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
        _at_most(param, len(value), self._limits.max_schema_bytes, "characters")
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
        _at_most(param, len(text), self._limits.max_schema_bytes, "bytes")
        return text.decode()


def _template_message(message: AnyMessage, content: str | list[dict[str, str]], path: str) -> dict[str, Any]:
    # Templates know no developer; OpenAI's own rule is that it takes the system message's place.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None and message.refusal is not None:
            turn["content"] = message.refusal
        if message.reasoning_content is not None:
            turn["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            turn["tool_calls"] = [
                _template_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
            ]
    return turn


def _template_call(call: ToolCall, path: str) -> dict[str, Any]:
    """Arguments as an object: templates write them as JSON, and a string would be quoted twice."""
    param = f"{path}.function.arguments"
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except ValueError:
        raise InvalidRequestError(f"{param} is not valid JSON.", code="invalid_json", param=param) from None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must be the JSON text of an object.", param=param)
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}


def _template_tool(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.function.name,
        "description": tool.function.description,
        "parameters": tool.function.parameters,
    }
    return {"type": "function", "function": function}


def _check_mm_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Flat and small; which names exist is for the preprocessor to say."""
    for name, value in kwargs.items():
        safe = name if name.isidentifier() and len(name) <= 64 else "?"
        scalars = value if isinstance(value, list) and len(value) <= 16 else [value]
        if not all(isinstance(v, int | float | str | bool) for v in scalars) or len(str(value)) > 256:
            raise InvalidRequestError(
                f"mm_processor_kwargs.{safe} must be a number, a short text or a short list of them.",
                param=f"mm_processor_kwargs.{safe}",
            )
    return kwargs


def _check_tenant_tokens(param: str, max_tokens: int | None, tenant: Tenant) -> None:
    limit = tenant.limits.max_completion_tokens
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise InvalidRequestError(
            f"{param} is {max_tokens}, the limit of this key is {limit}.", code="limit_exceeded", param=param
        )


def _check_count(media: Sequence[MediaInput], words: str, limit: int, whose: str) -> None:
    if len(media) > limit:
        raise InvalidRequestError(
            f"The request has {len(media)} {words}, {whose} is {limit}.",
            code="too_many_media",
            param=media[limit].param,
        )


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _at_most(param: str, count: int, limit: int, words: str) -> None:
    if count > limit:
        raise InvalidRequestError(
            f"{param} has {count} {words}, the limit is {limit}.", code="limit_exceeded", param=param
        )


def _value_at_most(param: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequestError(f"{param} is {value}, the limit is {limit}.", code="limit_exceeded", param=param)
