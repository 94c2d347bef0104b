"""The requests of the OpenAI API with vLLM's extensions, as pydantic models, and nothing about how they are served.

Rules, the same everywhere:
- `null` is the same as leaving the field out.
- Types are strict: `"8"` is no number, `true` is no number, `8.0` is no whole number.
- An unknown field is refused by name, at every level; so is an option that is known elsewhere but not supported here,
  unless it is sent with the value that means "off".
- Fields that only label a request (`user`, `metadata`, `store`, ...) are accepted and change nothing.

Numbers that depend on the model or on the operator's limits are judged in openai_convert.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

INT64 = 2**63
MAX_FIELDS = 256
"""Fields of one object whose fields this API defines."""


def invalid(message: str, code: str = "invalid_value") -> PydanticCustomError:
    """An error whose text goes to the caller as it stands: no value of unbounded size may be in it."""
    return PydanticCustomError("sightline", "{message}", {"message": message, "code": code})  # type: ignore[arg-type]


def _unsupported(reason: str) -> PydanticCustomError:
    return invalid(reason, "unsupported_parameter")


class Lenient(BaseModel):
    """Base: strict types, no unknown fields, null means left out, unsupported options refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {}
    """Field -> (values that mean "off", what to do instead)."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:  # Each unknown one would become an error of its own.
            raise invalid(f"An object has {len(data)} fields, the limit is {MAX_FIELDS}.", "json_too_complex")
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.unsupported:
                off, reason = cls.unsupported[name]
                if any(type(value) is type(o) and value == o for o in off):
                    continue
                raise _unsupported(f"{name} is not supported{f': {reason}' if reason else ''}.")
            kept[name] = value
        return kept


# ---------------------------------------------------------------------------------------------------------------------
# Content parts
# ---------------------------------------------------------------------------------------------------------------------
class CacheControl(Lenient):
    """Markers that some clients put on parts. Prefixes are cached without them, so they change nothing."""

    model_config = ConfigDict(extra="ignore")


class Part(Lenient):
    cache_control: CacheControl | None = None


class TextPart(Part):
    type: Literal["text"]
    text: str


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str


class ImageUrl(Lenient):
    url: str | None = None
    detail: Literal["auto", "low", "high"] = "auto"


class VideoUrl(Lenient):
    url: str | None = None


def _wrap_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class MediaPart(Part):
    uuid: str | None = Field(default=None, min_length=1)


class ImageUrlPart(MediaPart):
    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_wrap_url, json_schema_input_type=ImageUrl | str)] | None = None


class VideoUrlPart(MediaPart):
    type: Literal["video_url"]
    video_url: Annotated[VideoUrl, BeforeValidator(_wrap_url, json_schema_input_type=VideoUrl | str)] | None = None


class ImagePart(MediaPart):
    """The form of Qwen's own examples."""

    type: Literal["image"]
    image: str | None = None


def _video(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
        return value
    raise invalid("video must be a URL or a list of picture URLs, one for each frame.", "invalid_type")


class VideoPart(MediaPart):
    """The form of Qwen's own examples: one URL, or the frames as picture URLs."""

    type: Literal["video"]
    video: Annotated[str | list[str], BeforeValidator(_video)] | None = None


ContentPart = TextPart | RefusalPart | ImageUrlPart | VideoUrlPart | ImagePart | VideoPart
PART_TYPES = ("text", "refusal", "image_url", "video_url", "image", "video")
_REFUSED_PARTS = {
    "input_audio": "audio is not supported; parts may be text, image_url or video_url",
    "audio_url": "audio is not supported; parts may be text, image_url or video_url",
    "audio": "audio is not supported; parts may be text, image_url or video_url",
    "file": "files are not supported; send pictures as image_url",
    "image_embeds": "embeddings are not accepted; send the picture as image_url",
    "input_text": "this is a part of the Responses API; use text",
    "input_image": "this is a part of the Responses API; use image_url",
    "image_pil": "this only exists inside a Python process; use image_url",
}


def _split_content(value: Any) -> Any:
    """A string is one text part; parts of kinds that can never work are refused with what to do instead."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise invalid("content must be a string or a list of parts.", "invalid_type")
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]


def _known_part(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _REFUSED_PARTS:
            raise invalid(f"The part's type is {kind!r}: {_REFUSED_PARTS[kind]}.", "unsupported_content_part")
    return value


Content = Annotated[
    list[Annotated[Annotated[ContentPart, Field(discriminator="type")], BeforeValidator(_known_part)]],
    Field(fail_fast=True),
    BeforeValidator(_split_content, json_schema_input_type=str | list[ContentPart]),
]


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------
class FunctionCall(Lenient):
    name: str = Field(min_length=1, max_length=256)
    arguments: str = ""


class ToolCall(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Sent back by clients that keep streamed calls as they came."""


class Message(Lenient):
    """What all turns may carry. Answers of this server may be sent back as they are."""

    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        "function_call": ((), "use tool_calls"),
        "audio": ((), "audio is not supported"),
        "annotations": (([],), "annotations are not supported"),
    }
    name: str | None = None


class SystemMessage(Message):
    role: Literal["system"]
    content: Content


class DeveloperMessage(Message):
    role: Literal["developer"]
    content: Content


class UserMessage(Message):
    role: Literal["user"]
    content: Content


class AssistantMessage(Message):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = []
    refusal: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.refusal is None and self.reasoning_content is None:
            raise invalid("An assistant message needs content or tool_calls.", "missing_required_parameter")
        return self


class ToolMessage(Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
ROLES = ("system", "developer", "user", "assistant", "tool")


# ---------------------------------------------------------------------------------------------------------------------
# Tools and structured output
# ---------------------------------------------------------------------------------------------------------------------
class FunctionDefinition(Lenient):
    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Lenient):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Lenient):
    name: str = Field(min_length=1, max_length=64)


class NamedToolChoice(Lenient):
    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise invalid("tool_choice must be none, auto, required or an object that names a function.")
    if not isinstance(value, str | dict):
        raise invalid("tool_choice must be a string or an object.", "invalid_type")
    return value if isinstance(value, str) else NamedToolChoice.model_validate(value)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    BeforeValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedToolChoice),
]


class JsonSchemaFormat(Lenient):
    name: str = Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")
    description: str = ""
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class TextResponse(Lenient):
    type: Literal["text"]


class JsonObjectResponse(Lenient):
    type: Literal["json_object"]


class JsonSchemaResponse(Lenient):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextResponse | JsonObjectResponse | JsonSchemaResponse, Field(discriminator="type")]


class StructuredOutputs(Lenient):
    """vLLM's `structured_outputs`: exactly one of its fields."""

    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        "structural_tag": ((), "use json, regex, choice or grammar"),
        "disable_fallback": ((False, True), ""),
        "disable_any_whitespace": ((False,), ""),
        "disable_additional_properties": ((False,), ""),
        "whitespace_pattern": ((), ""),
    }
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise invalid("structured_outputs needs exactly one of json, regex, choice, grammar, json_object.")
        return self


class StreamOptions(Lenient):
    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        "include_obfuscation": ((False, True), ""),
        "continuous_usage_stats": ((False,), "use include_usage"),
    }
    include_usage: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------------------------------
def _list_of_one(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise invalid("logit_bias must be an object of token ids and numbers.", "invalid_type")
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise invalid("The keys of logit_bias must be token ids.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid("The values of logit_bias must be numbers from -100 to 100.")
    return {int(key): float(bias) for key, bias in value.items()}


OFF_LISTS: tuple[object, ...] = ([],)

UNSUPPORTED_SAMPLING: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((1,), "use n"),
    "use_beam_search": ((False,), ""),
    "length_penalty": ((1, 1.0), ""),
    "prompt_logprobs": ((), ""),
    "allowed_token_ids": ((), "use logit_bias or structured_outputs"),
    "bad_words": (OFF_LISTS, ""),
    "logits_processors": (OFF_LISTS, ""),
    "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
    "return_token_ids": ((False,), ""),
    "return_tokens_as_token_ids": ((False,), ""),
    "spaces_between_special_tokens": ((True,), ""),
    "kv_transfer_params": ((), ""),
    "vllm_xargs": (({},), ""),
    "guided_json": ((), "use structured_outputs or response_format"),
    "guided_regex": ((), "use structured_outputs"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_decoding_backend": ((), ""),
    "guided_whitespace_pattern": ((), ""),
}


class Generation(Lenient):
    """What chat and text completions have in common."""

    model: str
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=INT64)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(fail_fast=True),
        BeforeValidator(_list_of_one, json_schema_input_type=str | list[str]),
    ] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100, allow_inf_nan=False)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias, json_schema_input_type=dict[str, float])] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str = Field(default="", max_length=1024)
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:\-]{1,128}$")
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _options_agree(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise at("stream_options", "stream_options is only allowed together with stream: true.")
        formatted = self.response_format is not None and self.response_format.type != "text"
        if self.structured_outputs is not None and formatted:
            raise at("structured_outputs", "structured_outputs and response_format exclude each other.")
        return self


def at(param: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """An error of a whole request that is blamed on one of its fields."""
    return PydanticCustomError(
        "sightline",
        "{message}",
        {"message": message, "code": code, "param": param},  # type: ignore[arg-type]
    )


class ChatTemplateOptions(Lenient):
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    mm_processor_kwargs: dict[str, Any] = {}
    messages: Annotated[list[Annotated[AnyMessage, Field(discriminator="role")]], Field(min_length=1, fail_fast=True)]

    @model_validator(mode="after")
    def _prompt_ends_once(self) -> ChatTemplateOptions:
        if self.continue_final_message and self.add_generation_prompt:
            raise at("continue_final_message", "continue_final_message needs add_generation_prompt: false next to it.")
        if self.continue_final_message and not isinstance(self.messages[-1], AssistantMessage):
            raise at("continue_final_message", "continue_final_message needs an assistant message at the end.")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise at("tools", "Two tools have the same name.")
        return self


class ChatCompletionRequest(ChatTemplateOptions, Generation):
    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        **UNSUPPORTED_SAMPLING,
        "functions": ((), "use tools"),
        "function_call": (("none",), "use tool_choice"),
        "audio": ((), "audio is not supported"),
        "modalities": ((["text"],), "answers are text"),
        "prediction": ((), ""),
        "reasoning_effort": ((), "use chat_template_kwargs"),
        "verbosity": ((), ""),
        "web_search_options": ((), ""),
        "chat_template": ((), "the model's own template is used"),
        "documents": ((), "put them into a message"),
        "echo": ((False,), ""),
        "add_special_tokens": ((False,), ""),
        "include_reasoning": ((True,), ""),
    }
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _chat_options_agree(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise at("top_logprobs", "top_logprobs is only allowed together with logprobs: true.")
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        forced = choice == "required" or isinstance(choice, NamedToolChoice)
        if forced and not self.tools:
            raise at("tool_choice", "tool_choice forces a call, but no tools are given.")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in {t.function.name for t in self.tools}:
            raise at("tool_choice", "tool_choice names a function that is not among the tools.")
        constrained = self.structured_outputs is not None or (
            self.response_format is not None and self.response_format.type != "text"
        )
        if forced and constrained:
            raise at("tool_choice", "A forced tool call and a response format exclude each other.")


def _prompts(value: Any) -> Any:
    """A string, a list of strings, token ids, or a list of lists of token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if _are_token_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(p, str) or _are_token_ids(p) for p in value):
        return value
    raise invalid("prompt must be a string, a list of token ids, or a list of either; none may be empty.")


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


class CompletionRequest(Generation):
    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        **UNSUPPORTED_SAMPLING,
        "echo": ((False,), "put the prompt before the answer yourself"),
        "suffix": (("",), "the model cannot fill in the middle"),
        "prompt_embeds": ((), ""),
        "tools": (OFF_LISTS, "use /v1/chat/completions"),
    }
    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True


class TokenizeChatRequest(ChatTemplateOptions):
    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        "return_token_strs": ((False,), ""),
        "add_special_tokens": ((False,), ""),
        "chat_template": ((), "the model's own template is used"),
    }
    model: str | None = None


class TokenizeTextRequest(Lenient):
    unsupported: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {"return_token_strs": ((False,), "")}
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
