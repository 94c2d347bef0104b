from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from app.limits import EdgeLimits
from app.openai_convert import RequestConverter
from app.openai_schema import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest, TokenizeTextRequest
from app.openai_validation import validate
from app.pipeline import Call
from app.settings import SamplingDefaults
from cache_service.tenants import OpenTenant, Tenant, TenantLimits
from deployments.errors import InvalidRequestError, NotFoundError, SightlineError
from deployments.messages import ChatPrompt, TextPrompt
from tests.unit.app.helpers import MODEL, make_settings

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
GET = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}


def converter(**options: Any) -> RequestConverter:
    ids = itertools.count(1)
    return RequestConverter(make_settings(**options), lambda: f"id{next(ids)}")


def chat(request: dict[str, Any] | None = None, tenant: Tenant | None = None, **options: Any) -> Call:
    body = validate(ChatCompletionRequest, {"model": MODEL, "messages": [USER], **(request or {})})
    return converter(**options).chat(body, tenant or OpenTenant())


def refusal(request: dict[str, Any], tenant: Tenant | None = None, **options: Any) -> SightlineError:
    with pytest.raises(SightlineError) as caught:
        chat(request, tenant, **options)
    return caught.value


def messages_of(call: Call) -> list[dict[str, Any]]:
    assert isinstance(call.prompt, ChatPrompt)
    return [dict(message) for message in call.prompt.messages]


# ---- prompt
def test_text_is_one_string_however_it_was_sent() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    assert messages_of(chat({"messages": [parts]})) == [{"role": "user", "content": "ab"}]
    assert messages_of(chat()) == [{"role": "user", "content": "hi"}]


def test_media_keep_their_order_and_know_their_place() -> None:
    content = [
        {"type": "text", "text": "first"},
        {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}, "uuid": "u"},
        {"type": "video_url", "video_url": "http://b"},
        {"type": "image", "image": "data:c"},
        {"type": "video", "video": ["data:d", "data:e"]},
        {"type": "image_url", "image_url": {}, "uuid": "known"},
    ]
    call = chat({"messages": [USER, {"role": "tool", "content": content, "tool_call_id": "c1"}]})
    assert messages_of(call)[1] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [
            {"type": "text", "text": "first"},
            {"type": "image"},
            {"type": "video"},
            {"type": "image"},
            {"type": "video"},
            {"type": "image"},
        ],
    }
    assert [(m.modality, m.param, m.url, m.uuid, m.detail, m.frames) for m in call.media] == [
        ("image", "messages[1].content[1].image_url", "data:a", "u", "low", ()),
        ("video", "messages[1].content[2].video_url", "http://b", None, "auto", ()),
        ("image", "messages[1].content[3].image", "data:c", None, "auto", ()),
        ("video", "messages[1].content[4].video", None, None, "auto", ("data:d", "data:e")),
        ("image", "messages[1].content[5].image_url", None, "known", "auto", ()),
    ]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"detail": "low"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": " "}}, "image_url"),
        ({"type": "image_url", "image_url": None}, "image_url"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "video_url", "video_url": {"url": ""}}, "video_url"),
        ({"type": "image"}, "image"),
        ({"type": "video", "video": ["a", ""]}, "video"),
        ({"type": "image", "image": "data:x", "uuid": "u" * 300}, "uuid"),
    ],
)
def test_media_without_a_url(part: dict[str, Any], param: str) -> None:
    error = refusal({"messages": [{"role": "user", "content": [part]}]})
    assert (error.status, error.param) == (400, f"messages[0].content[0].{param}")


def test_tool_calls_reach_the_template_as_objects() -> None:
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"x": 1}'}}],
    }
    assert messages_of(chat({"messages": [USER, turn]}))[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"x": 1}}}],
    }
    for arguments in ("{", "[1]"):
        turn["tool_calls"] = [{"function": {"name": "get", "arguments": arguments}}]
        assert refusal({"messages": [turn]}).param == "messages[0].tool_calls[0].function.arguments"


def test_a_developer_speaks_as_the_system() -> None:
    assert messages_of(chat({"messages": [{"role": "developer", "content": "a", "name": "n"}]})) == [
        {"role": "system", "content": "a", "name": "n"}
    ]


def test_template_options() -> None:
    request = {
        "messages": [USER, {"role": "assistant", "content": "so"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "mm_processor_kwargs": {"max_pixels": 784},
    }
    call = chat(request)
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.template_kwargs == {"enable_thinking": False}
    assert (call.prompt.add_generation_prompt, call.prompt.continue_final_message) == (False, True)
    assert call.mm_processor_kwargs == {"max_pixels": 784}
    assert refusal({"chat_template_kwargs": {"messages": []}}).param == "chat_template_kwargs.messages"
    assert refusal({"mm_processor_kwargs": {"a": {"b": 1}}}).param == "mm_processor_kwargs.a"
    assert refusal({"mm_processor_kwargs": {"a" * 99: None}}).param == "mm_processor_kwargs.?"


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"max_messages": 1}, {"messages": [USER, USER]}),
        ({"max_content_parts": 1}, {"messages": [USER, USER]}),
        ({"max_n": 1}, {"n": 2}),
        ({"max_stop_strings": 1}, {"stop": ["a", "b"]}),
        ({"max_stop_chars": 1}, {"stop": ["ab"]}),
        ({"max_stop_token_ids": 1}, {"stop_token_ids": [1, 2]}),
        ({"max_logit_bias": 1}, {"logit_bias": {"1": 1, "2": 1}}),
        ({"max_logprobs": 1}, {"logprobs": True, "top_logprobs": 2}),
        ({"max_tools": 1}, {"tools": [GET, OTHER]}),
        ({"max_schema_bytes": 20}, {"tools": [GET]}),
        ({"max_schema_bytes": 20}, {"structured_outputs": {"json": SCHEMA}}),
        ({"max_schema_bytes": 20}, {"structured_outputs": {"regex": "a" * 30}}),
    ],
)
def test_limits_name_limit_and_value(limits: dict[str, Any], request_: dict[str, Any]) -> None:
    assert chat(request_) is not None
    error = refusal(request_, limits=EdgeLimits(**limits))
    assert (error.status, error.code) == (400, "limit_exceeded")
    assert f"limit is {next(iter(limits.values()))}" in error.message
    assert error.param
    assert error.param.partition("[")[0].partition(".")[0] in request_


def test_media_counts() -> None:
    pictures = {"role": "user", "content": [{"type": "image", "image": "data:x"}] * 3}
    limits = EdgeLimits(limit_mm_per_prompt={"image": 2})
    error = refusal({"messages": [pictures]}, limits=limits)
    assert (error.code, error.param) == ("too_many_media", "messages[0].content[2].image")
    assert "3 images, the limit is 2" in error.message
    video = {"role": "user", "content": [{"type": "video", "video": "data:x"}]}
    assert refusal({"messages": [video]}, limits=limits).code == "too_many_media"
    tenant = Tenant(name="t", limits=TenantLimits(max_images_per_request=1))
    assert "limit of this key is 1" in refusal({"messages": [pictures]}, tenant).message


# ---- sampling
def test_defaults_come_from_the_checkpoint() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05)
    sampling = chat(sampling_defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.05)
    asked = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    sampling = chat(asked, sampling_defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0, 1)


def test_sampling_options_arrive() -> None:
    call = chat(
        {
            "max_tokens": 5,
            "max_completion_tokens": 6,
            "min_tokens": 2,
            "seed": -1,
            "n": 2,
            "stop": ["a", "b", "a"],
            "stop_token_ids": [7, 7],
            "ignore_eos": True,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"12": 3, "999": -100},
            "logprobs": True,
            "top_logprobs": 3,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": "s",
            "priority": -2,
        }
    )
    sampling = call.sampling
    assert (sampling.max_tokens, call.max_tokens_param, sampling.min_tokens) == (6, "max_completion_tokens", 2)
    assert (sampling.seed, sampling.n, sampling.stop, sampling.stop_token_ids) == (2**63 - 1, 2, ("a", "b"), (7,))
    assert (sampling.ignore_eos, sampling.presence_penalty, sampling.frequency_penalty) == (True, 0.5, -0.5)
    assert (sampling.logit_bias, sampling.logprobs) == (((12, 3.0), (999, -100.0)), 3)
    assert (sampling.include_stop_str_in_output, sampling.skip_special_tokens) == (True, False)
    assert (call.cache_salt, call.priority) == ("s", -2)


def test_tiny_temperatures_are_greedy_and_no_max_tokens_is_noted() -> None:
    assert chat({"temperature": 1e-9}).sampling.temperature == 0
    assert chat({"temperature": 0.01}).sampling.temperature == 0.01
    assert chat().max_tokens_param is None
    assert chat({"logprobs": True}).sampling.logprobs == 0
    assert chat().sampling.logprobs is None


@pytest.mark.parametrize(
    "request_", [{"logit_bias": {"1000": 1}}, {"stop_token_ids": [1000]}, {"stop_token_ids": [10**30]}]
)
def test_token_ids_lie_in_the_vocabulary(request_: dict[str, Any]) -> None:
    error = refusal(request_)
    assert (error.code, error.param) == ("invalid_token_id", next(iter(request_)))
    assert "999" in error.message


def test_a_tenants_token_limit() -> None:
    tenant = Tenant(name="t", limits=TenantLimits(max_completion_tokens=4))
    assert chat({"max_tokens": 4}, tenant).sampling.max_tokens == 4
    assert refusal({"max_tokens": 5}, tenant).param == "max_tokens"
    assert refusal({"max_completion_tokens": 5}, tenant).param == "max_completion_tokens"


def test_unknown_models() -> None:
    error = refusal({"model": "other"})
    assert isinstance(error, NotFoundError)
    assert (error.param, error.code) == ("model", "model_not_found")


# ---- grammar and tools
def test_formats_become_grammars() -> None:
    def grammar(request: dict[str, Any]) -> tuple[str, str, str] | None:
        spec = chat(request).sampling.grammar
        return (spec.kind, spec.value, spec.param) if spec else None

    text = json.dumps(SCHEMA, separators=(",", ":"))
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert grammar({"response_format": {"type": "text"}}) is None
    assert grammar({"response_format": {"type": "json_object"}}) == ("json_object", "", "response_format")
    assert grammar({"response_format": named}) == ("json_schema", text, "response_format.json_schema.schema")
    for option, wanted in {
        "json": ("json_schema", text),
        "regex": ("regex", "a+"),
        "choice": ("choice", '["a", "b"]'),
        "grammar": ("lark", "start: /a/"),
        "json_object": ("json_object", ""),
    }.items():
        value = {"json": SCHEMA, "regex": "a+", "choice": ["a", "b"], "grammar": "start: /a/", "json_object": True}
        assert grammar({"structured_outputs": {option: value[option]}}) == (*wanted, f"structured_outputs.{option}")
    assert grammar({"structured_outputs": {"json": text}}) == ("json_schema", text, "structured_outputs.json")
    for bad in ("{", "[]"):
        assert refusal({"structured_outputs": {"json": bad}}).param == "structured_outputs.json"


def tools_in_prompt(call: Call) -> int:
    assert isinstance(call.prompt, ChatPrompt)
    return len(call.prompt.tools or ())


def test_tool_choice() -> None:
    tools = {"tools": [GET, OTHER]}
    auto, none = chat(tools), chat({**tools, "tool_choice": "none"})
    assert (tools_in_prompt(auto), auto.sampling.grammar, auto.sampling.stop) == (2, None, ())
    assert (tools_in_prompt(none), none.sampling.grammar) == (0, None)
    required = chat({**tools, "tool_choice": "required"})
    assert required.sampling.grammar is not None
    assert required.sampling.grammar.kind == "lark"
    assert "get" in required.sampling.grammar.value
    assert "other" in required.sampling.grammar.value
    named = chat({**tools, "tool_choice": {"type": "function", "function": {"name": "get"}}})
    assert named.sampling.grammar is not None
    assert "other" not in named.sampling.grammar.value
    assert tools_in_prompt(named) == 2


def test_one_call_at_most_ends_the_answer_after_it() -> None:
    one = {"tools": [GET], "parallel_tool_calls": False}
    assert chat(one).sampling.stop == ("</tool_call>",)
    forced = chat({**one, "tool_choice": "required"}).sampling
    assert forced.stop == ()
    assert forced.grammar is not None
    assert "_separator" not in forced.grammar.value


def test_tools_that_cannot_be_served() -> None:
    assert refusal({"tools": [GET]}, tool_call_parser=None).code == "unsupported_parameter"
    listed = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    assert refusal({"tools": [listed]}).param == "tools[0].function.parameters"


# ---- the other requests
def test_text_completions() -> None:
    body = validate(CompletionRequest, {"model": MODEL, "prompt": ["a", [1, 2]], "logprobs": 2})
    text, ids = converter().completions(body, OpenTenant())
    assert text.prompt == TextPrompt(text="a")
    assert ids.prompt == TextPrompt(token_ids=(1, 2), add_special_tokens=False)
    assert text.engine_id != ids.engine_id
    assert (text.sampling.max_tokens, text.max_tokens_param, text.sampling.logprobs) == (16, "max_tokens", 2)
    for prompt in ("", [1000], ["a"] * 65):
        with pytest.raises(InvalidRequestError) as caught:
            converter().completions(validate(CompletionRequest, {"model": MODEL, "prompt": prompt}), OpenTenant())
        assert caught.value.param == "prompt"


def test_tokenize() -> None:
    text = converter().tokenize(
        validate(TokenizeTextRequest, {"prompt": "a", "add_special_tokens": False}), OpenTenant()
    )
    assert text.prompt == TextPrompt(text="a", add_special_tokens=False)
    body = validate(TokenizeChatRequest, {"model": MODEL, "messages": [USER], "tools": [GET]})
    assert tools_in_prompt(converter().tokenize(body, OpenTenant())) == 1
    with pytest.raises(NotFoundError):
        converter().tokenize(validate(TokenizeTextRequest, {"prompt": "a", "model": "x"}), OpenTenant())
