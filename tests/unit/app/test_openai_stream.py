from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.observer import Usage
from app.openai_stream import AnswerHead, AnswerWriter, ChatWriter, CompletionWriter, error_events
from app.tool_calls import HermesToolParser
from deployments.errors import InternalError, MediaError
from deployments.messages import DeltaBatch, GenerationStats, Logprob, SequenceDelta, TokenLogprobs

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, image_tokens=2)
CALL = 'So: <tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'


def make_head(num_choices: int = 1, **options: Any) -> AnswerHead:
    return AnswerHead(**{"id": "chatcmpl-1", "model": "m", "created_s": 5, "num_choices": num_choices, **options})


def chat(num_choices: int = 1, *, tools: bool = False, **options: Any) -> ChatWriter:
    ids = itertools.count()
    return ChatWriter(
        make_head(num_choices, **options), HermesToolParser if tools else None, lambda: f"call_{next(ids)}"
    )


def stream(writer: AnswerWriter, batches: list[DeltaBatch], usage: Usage = USAGE) -> list[dict[str, Any]]:
    """The JSON events of a stream, whose framing is checked on the way."""
    text = b"".join([*(writer.events(batch) for batch in batches), writer.last_events(usage)]).decode()
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def whole(writer: AnswerWriter, batches: list[DeltaBatch]) -> dict[str, Any]:
    for batch in batches:
        writer.keep(batch)
    answer: dict[str, Any] = json.loads(writer.body(USAGE))
    return answer


def entry(token: str, logprob: float = -0.5, top: int = 0) -> TokenLogprobs:
    return TokenLogprobs(Logprob(1, token, logprob), tuple(Logprob(i, f"{token}{i}", -1.0 - i) for i in range(top)))


def gather(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Per choice: content, tool calls, finish reasons, as a client puts them together."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"content": "", "calls": {}, "finish": [], "roles": []})
    for event in events:
        for choice in event["choices"]:
            seen, delta = choices[choice["index"]], choice["delta"]
            assert not seen["finish"], "nothing follows the finish reason"
            seen["content"] += delta.get("content") or ""
            if "role" in delta:
                seen["roles"].append(delta["role"])
            for call in delta.get("tool_calls", ()):
                known = seen["calls"].setdefault(call["index"], {"arguments": "", "ids": [], "names": []})
                known["arguments"] += call["function"]["arguments"]
                known["ids"] += [call["id"]] if "id" in call else []
                known["names"] += [call["function"]["name"]] if "name" in call["function"] else []
            if choice["finish_reason"] is not None:
                seen["finish"].append(choice["finish_reason"])
    return choices


def test_chat_stream_shape() -> None:
    batches: list[DeltaBatch] = [
        (SequenceDelta(text="a"),),
        (SequenceDelta(text="b", finish_reason="stop", stop_reason="!"),),
    ]
    role, first, second, end = stream(chat(), batches)
    assert role == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert [e["choices"][0]["delta"] for e in (first, second, end)] == [{"content": "a"}, {"content": "b"}, {}]
    assert [e["choices"][0]["finish_reason"] for e in (first, second, end)] == [None, None, "stop"]
    assert end["choices"][0]["stop_reason"] == "!"


def test_a_batch_is_one_write() -> None:
    writer = chat(2)
    events = writer.events((SequenceDelta(index=0, text="a"), SequenceDelta(index=1, text="b")))
    assert events.count(b"data: ") == 4, "a role and a piece for each choice"


def test_usage_only_if_asked_for_and_last() -> None:
    batches: list[DeltaBatch] = [(SequenceDelta(text="a", finish_reason="length"),)]
    assert all("usage" not in event for event in stream(chat(), batches))
    *events, last = stream(chat(include_usage=True), batches)
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4, "image_tokens": 2},
    }


def test_whole_chat_shape() -> None:
    answer = whole(chat(), [(SequenceDelta(text="a"),), (SequenceDelta(text="b", finish_reason="length"),)])
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["total_tokens"] == 10


def test_every_choice_ends_once() -> None:
    batches: list[DeltaBatch] = [
        (SequenceDelta(index=1, text="x"), SequenceDelta(index=0, text="y")),
        (SequenceDelta(index=1, finish_reason="stop"),),
        (SequenceDelta(index=0, text="z", finish_reason="length"),),
    ]
    seen = gather(stream(chat(2), batches))
    assert {i: (c["content"], c["finish"], c["roles"]) for i, c in seen.items()} == {
        0: ("yz", ["length"], ["assistant"]),
        1: ("x", ["stop"], ["assistant"]),
    }
    answer = whole(chat(2), batches)
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "yz", "length"),
        (1, "x", "stop"),
    ]


def test_chat_logprobs() -> None:
    delta = SequenceDelta(text="a", logprobs=(entry("a", float("-inf"), top=2),), finish_reason="stop")
    answer = whole(chat(logprobs=True), [(delta,)])
    token = answer["choices"][0]["logprobs"]["content"][0]
    assert (token["token"], token["logprob"], token["bytes"]) == ("a", -9999.0, [97])
    assert [t["token"] for t in token["top_logprobs"]] == ["a0", "a1"]
    _, piece, end = stream(chat(logprobs=True), [(delta,)])
    assert piece["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]
    assert end["choices"][0]["logprobs"] is None


def test_logprobs_give_a_tokens_own_bytes() -> None:
    half = TokenLogprobs(Logprob(1, "\ufffd", -1.0, b"\xc3"))
    answer = whole(chat(logprobs=True), [(SequenceDelta(logprobs=(half,), finish_reason="stop"),)])
    assert answer["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xC3]


def test_logprobs_wait_for_held_back_text() -> None:
    batches: list[DeltaBatch] = [
        (SequenceDelta(text="<tool", logprobs=(entry("<tool"),)),),
        (SequenceDelta(text="box", logprobs=(entry("box"),)),),
        (SequenceDelta(logprobs=(entry("end"),), finish_reason="stop"),),
    ]
    events = stream(chat(tools=True, logprobs=True), batches)
    per_event = [[t["token"] for t in (event["choices"][0]["logprobs"] or {}).get("content", ())] for event in events]
    assert per_event == [[], ["<tool", "box"], ["end"]]


@pytest.mark.parametrize("split", range(len(CALL) + 1))
@pytest.mark.parametrize(("ended", "shown"), [("stop", "tool_calls"), ("length", "length")])
def test_tool_calls_at_every_split(split: int, ended: Any, shown: str) -> None:
    batches: list[DeltaBatch] = [
        (SequenceDelta(text=CALL[:split]),),
        (SequenceDelta(text=CALL[split:]),),
        (SequenceDelta(finish_reason=ended),),
    ]
    choice = gather(stream(chat(tools=True), batches))[0]
    assert choice["content"] == "So:"
    assert choice["calls"] == {0: {"arguments": '{"x": 1}', "ids": ["call_0"], "names": ["get"]}}
    assert choice["finish"] == [shown]
    answer = whole(chat(tools=True), batches)["choices"][0]
    assert answer["message"]["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "get", "arguments": '{"x": 1}'}}
    ]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("So:", shown)


def test_calls_alone_have_no_content() -> None:
    call = CALL.removeprefix("So: ")
    answer = whole(chat(tools=True), [(SequenceDelta(text=f"{call}\n{call}", finish_reason="stop"),)])
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert [c["id"] for c in message["tool_calls"]] == ["call_0", "call_1"]


def test_text_completion() -> None:
    batches: list[DeltaBatch] = [
        (SequenceDelta(text="ab", logprobs=(entry("a", top=1), entry("b", top=1))),),
        (SequenceDelta(text="c", logprobs=(entry("c", top=1),), finish_reason="stop"),),
    ]
    answer = whole(CompletionWriter(make_head(logprobs=True)), batches)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "abc",
            "logprobs": {
                "tokens": ["a", "b", "c"],
                "token_logprobs": [-0.5, -0.5, -0.5],
                "top_logprobs": [{"a": -0.5, "a0": -1.0}, {"b": -0.5, "b0": -1.0}, {"c": -0.5, "c0": -1.0}],
                "text_offset": [0, 1, 2],
            },
            "finish_reason": "stop",
        }
    ]
    events = stream(CompletionWriter(make_head(logprobs=True)), batches)
    assert [event["choices"][0]["text"] for event in events] == ["ab", "c"]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0, 1], [2]]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=20),
    st.lists(st.integers(1, 4), max_size=20),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_answer(pieces: list[tuple[int, str]], sizes: list[int], tools: bool) -> None:
    deltas = [SequenceDelta(index=index, text=text) for index, text in pieces]
    deltas += [SequenceDelta(index=i, finish_reason="stop") for i in range(3)]
    batches: list[DeltaBatch] = []
    while deltas:
        size = sizes.pop() if sizes else 1
        batches.append(tuple(deltas[:size]))
        deltas = deltas[size:]
    seen = gather(stream(chat(3, tools=tools), batches))
    answer = whole(chat(3, tools=tools), batches)
    assert [seen[i]["content"] for i in range(3)] == [c["message"]["content"] for c in answer["choices"]]


def test_errors_in_a_stream_show_nothing_internal() -> None:
    said = error_events(MediaError("The picture is cut.", param="messages[0]"))
    assert said.endswith(b"data: [DONE]\n\n")
    assert b"The picture is cut." in said
    assert b"secret" not in error_events(InternalError("secret"))


def test_usage_counts_a_shared_prompt_once() -> None:
    usage = Usage()
    for _ in range(2):
        usage.add(GenerationStats(prompt_tokens=7, completion_tokens=3, cached_tokens=4, image_tokens=2))
    assert usage == Usage(prompt_tokens=7, completion_tokens=6, cached_tokens=4, image_tokens=2)
