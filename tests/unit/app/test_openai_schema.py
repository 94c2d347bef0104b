from __future__ import annotations

from typing import Any

import pytest

from app.openai_schema import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest
from app.openai_validation import param_path, validate
from deployments.errors import InvalidRequestError

USER = {"role": "user", "content": "hi"}
GET = {"type": "function", "function": {"name": "get"}}


def chat(**options: Any) -> ChatCompletionRequest:
    return validate(ChatCompletionRequest, {"model": "m", "messages": [USER], **options})


def refusal(data: dict[str, Any], model: Any = ChatCompletionRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(model, data)
    return caught.value


def chat_refusal(**options: Any) -> InvalidRequestError:
    return refusal({"model": "m", "messages": [USER], **options})


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        # Types
        ({"max_tokens": "ten"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 8.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 8.0}, "max_tokens", "invalid_type"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": False}, "temperature", "invalid_type"),
        ({"stream": "yes please"}, "stream", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"seed": "x"}, "seed", "invalid_type"),
        ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "invalid_type"),
        ({"model": 5}, "model", "invalid_type"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tool_choice": 5}, "tool_choice", "invalid_type"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        # Ranges
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": True}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"AI": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
        ({"stop": ""}, "stop[0]", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"request_id": "a b"}, "request_id", "invalid_value"),
        # Combinations
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message", "invalid_value"),
        # Unknown and unsupported
        ({"max_token": 4}, "max_token", "unknown_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "unsupported_parameter",
        ),
        ({"a b\n": 1}, "?", "unknown_parameter"),
        # Tools and formats
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [GET, GET]}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "sometimes", "tools": [GET]}, "tool_choice", "invalid_value"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [GET]},
            "tool_choice",
            "invalid_value",
        ),
        ({"tool_choice": {"type": "function"}, "tools": [GET]}, "tool_choice.function", "missing_required_parameter"),
        (
            {"tool_choice": "required", "tools": [GET], "response_format": {"type": "json_object"}},
            "tool_choice",
            "invalid_value",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": "json"}, "response_format", "invalid_type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "x"}}},
            "response_format.json_schema.schema",
            "invalid_type",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "invalid_value",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], param: str, code: str) -> None:
    error = chat_refusal(**options)
    assert (error.param, error.code) == (param, code)
    assert len(error.message) < 300
    assert "pydantic" not in error.message
    assert "Input should" not in error.message


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"content": "hi"}, ".role", "missing_required_parameter"),
        ({"role": "usr", "content": "hi"}, ".role", "invalid_value"),
        ({"role": 5, "content": "hi"}, ".role", "invalid_value"),
        ({"role": "user"}, ".content", "missing_required_parameter"),
        ({"role": "user", "content": None}, ".content", "missing_required_parameter"),
        ({"role": "user", "content": 5}, ".content", "invalid_type"),
        ({"role": "user", "content": [{}]}, ".content[0].type", "missing_required_parameter"),
        ({"role": "user", "content": [5]}, ".content[0]", "invalid_type"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "missing_required_parameter"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, ".content[0].text", "invalid_type"),
        ({"role": "user", "content": [{"type": "hologram"}]}, ".content[0].type", "invalid_value"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0]", "unsupported_content_part"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, ".content[0].image_url", "invalid_type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]},
            ".content[0].image_url.url",
            "invalid_type",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "ultra"}}]},
            ".content[0].image_url.detail",
            "invalid_value",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}, "foo": 1}]},
            ".content[0].foo",
            "unknown_parameter",
        ),
        ({"role": "user", "content": [{"type": "video", "video": []}]}, ".content[0].video", "invalid_type"),
        ({"role": "user", "content": "hi", "colour": 1}, ".colour", "unknown_parameter"),
        ({"role": "assistant"}, "", "missing_required_parameter"),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call", "unsupported_parameter"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            ".tool_calls[0].function.arguments",
            "invalid_type",
        ),
    ],
)
def test_messages_that_are_refused(message: dict[str, Any], param: str, code: str) -> None:
    error = chat_refusal(messages=[USER, message])
    assert (error.param, error.code) == (f"messages[1]{param}", code)


def test_a_message_never_echoes_a_payload() -> None:
    secret = "A" * 300
    for options in ({"temperature": secret}, {"tool_choice": secret}, {secret: 1}, {"messages": [{"role": secret}]}):
        error = chat_refusal(**options)
        assert "AAAAAAAAA" not in error.message + str(error.param)


def test_a_crowd_of_unknown_fields_is_one_error() -> None:
    error = chat_refusal(**{f"f{i}": 1 for i in range(300)})
    assert (error.code, error.param) == ("json_too_complex", None)


def test_close_names_are_suggested_and_bounds_are_told() -> None:
    assert "Did you mean max_tokens?" in chat_refusal(max_token=4).message
    assert chat_refusal(temperature=2.5).message == "temperature is 2.5; it must be at most 2."


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_what_is_missing_is_named(missing: str) -> None:
    data = {"model": "m", "messages": [USER]}
    for value in (data | {missing: None}, {k: v for k, v in data.items() if k != missing}):
        assert refusal(value).param == missing
    assert refusal(data | {"messages": []}).param == "messages"


def test_null_is_the_same_as_left_out() -> None:
    names = [field.alias or name for name, field in ChatCompletionRequest.model_fields.items()]
    nulls = dict.fromkeys([*names, *ChatCompletionRequest.unsupported], None)
    assert validate(ChatCompletionRequest, {**nulls, "model": "m", "messages": [USER]}) == chat()


def test_values_that_mean_off_are_accepted() -> None:
    for name, (off, _) in ChatCompletionRequest.unsupported.items():
        for value in off:
            assert chat(**{name: value}) == chat()
    assert chat_refusal(echo=0).param == "echo", "0 is not false"


def test_labels_change_nothing_but_are_accepted() -> None:
    chat(user="u", metadata={"a": None}, store=False, service_tier="auto", safety_identifier="s", prompt_cache_key="k")


def test_an_answer_of_ours_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get", "arguments": "{}"}}],
    }
    body = chat(messages=[USER, answer, {"role": "tool", "tool_call_id": "call_1", "content": "42"}])
    assert len(body.messages) == 3


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, wanted: Any) -> None:
    assert validate(CompletionRequest, {"model": "m", "prompt": prompt}).prompt == wanted


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [True], [[-1]], 5, {}, [None], [1.5]])
def test_prompts_that_are_refused(prompt: Any) -> None:
    assert refusal({"model": "m", "prompt": prompt}, CompletionRequest).param == "prompt"


@pytest.mark.parametrize("option", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"tools": [GET]}])
def test_text_completion_options_that_are_refused(option: dict[str, Any]) -> None:
    error = refusal({"model": "m", "prompt": "a", **option}, CompletionRequest)
    assert (error.param, error.code) == (next(iter(option)), "unsupported_parameter")


def test_tokenize_takes_the_same_messages() -> None:
    assert validate(TokenizeChatRequest, {"messages": [USER]}).model is None
    assert refusal({"messages": [{"role": "user"}]}, TokenizeChatRequest).param == "messages[0].content"


def test_paths_are_written_as_users_write_them() -> None:
    loc = ("messages", 0, "user", "content", 1, "image_url", "image_url", "url")
    assert param_path(loc) == "messages[0].content[1].image_url.url"
    assert param_path(("messages", 0, "content", 1, "text", "text")) == "messages[0].content[1].text"
    assert param_path(()) == ""
