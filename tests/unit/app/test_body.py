from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from app.body import BodyReader, check_content_headers, parse_body, parse_json
from app.errors import RequestTimeoutError, UnsupportedMediaTypeError
from app.limits import EdgeLimits
from deployments.errors import InvalidRequestError, OverloadedError, PayloadTooLargeError, RequestAbortedError

LIMITS = EdgeLimits()


class Messages:
    """An ASGI receive that hands out chunks, then waits for ever."""

    def __init__(self, *chunks: bytes, end: bool = True, last: Mapping[str, Any] | None = None) -> None:
        self._messages: list[Mapping[str, Any]] = [
            {"type": "http.request", "body": chunk, "more_body": not end or i < len(chunks) - 1}
            for i, chunk in enumerate(chunks)
        ]
        if last is not None:
            self._messages.append(last)

    @property
    def num_left(self) -> int:
        return len(self._messages)

    async def __call__(self) -> Mapping[str, Any]:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)


async def read(reader: BodyReader, receive: Any, content_length: int | None = None) -> bytes:
    with reader.account() as account:
        return await reader.read(receive, content_length, account)


async def test_chunks_are_joined() -> None:
    assert await read(BodyReader(LIMITS), Messages(b"ab", b"", b"c")) == b"abc"


async def test_the_limit_counts_real_bytes() -> None:
    reader = BodyReader(EdgeLimits(max_body_bytes=4), linger_s=0.01)
    assert await read(reader, Messages(b"ab", b"cd")) == b"abcd"
    for receive, length in ((Messages(b"ab", b"cde"), None), (Messages(b"ab", b"cde"), 2), (Messages(), 5)):
        with pytest.raises(PayloadTooLargeError, match="limit is 4"):
            await read(reader, receive, length)
    assert reader.buffered_bytes == 0


@pytest.mark.parametrize("content_length", [None, 1000])
async def test_rest_of_a_large_body_is_read_and_dropped(content_length: int | None) -> None:
    reader, messages = BodyReader(EdgeLimits(max_body_bytes=4)), Messages(*[b"abc"] * 50)
    with pytest.raises(PayloadTooLargeError):
        await read(reader, messages, content_length)
    assert messages.num_left == 0
    assert reader.buffered_bytes == 0


async def test_client_that_leaves_or_stalls_in_a_large_body_is_not_waited_for() -> None:
    reader = BodyReader(EdgeLimits(max_body_bytes=4), linger_s=0.05)
    gone = Messages(b"abcde", end=False, last={"type": "http.disconnect"})
    for receive in (gone, Messages(b"abcde", end=False)):
        with pytest.raises(PayloadTooLargeError):
            await read(reader, receive)


async def test_large_bodies_are_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    async def in_thread(function: Any, *args: Any) -> Any:
        used.append(function)
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", in_thread)
    assert await parse_body(b'{"a": 1}', LIMITS) == {"a": 1}
    assert used == []
    assert await parse_body(b'{"a": "' + b"x" * (2 << 20) + b'"}', LIMITS)
    assert used == [parse_json]
    with pytest.raises(InvalidRequestError):
        await parse_body(b" " * (2 << 20), LIMITS)


async def test_bodies_held_at_once_are_bounded() -> None:
    reader = BodyReader(EdgeLimits(max_buffered_body_bytes=4))
    with reader.account() as account:
        await reader.read(Messages(b"abc"), None, account)
        assert reader.buffered_bytes == 3
        with pytest.raises(OverloadedError) as caught:
            await read(reader, Messages(b"ab"))
        assert caught.value.retry_after_s
        account.settle()
        assert reader.buffered_bytes == 0
        assert await read(reader, Messages(b"abcd")) == b"abcd"
    assert reader.buffered_bytes == 0


async def test_slow_and_vanishing_clients() -> None:
    reader = BodyReader(EdgeLimits(body_timeout_s=0.01))
    with pytest.raises(RequestTimeoutError):
        await read(reader, Messages(b"a", end=False))

    async def gone() -> Mapping[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(RequestAbortedError):
        await read(reader, gone)


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"{", b"[1]", b'"a"', b"null", b'{"a": NaN}', b'{"a": Infinity}', b"\xff"]
)
def test_not_a_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(body, LIMITS)
    assert caught.value.code == "invalid_json"


def test_depth_and_size() -> None:
    deep = EdgeLimits(max_json_depth=3)
    assert parse_json(b'{"a": [[1]]}', deep) == {"a": [[1]]}
    for body in (b'{"a": [[[1]]]}', b'{"a": {"b": {"c": {}}}}'):
        with pytest.raises(InvalidRequestError, match="deeper than 3") as caught:
            parse_json(body, deep)
        assert caught.value.code == "json_too_complex"
    with pytest.raises(InvalidRequestError, match="limit is 4"):
        parse_json(b'{"a": [1, 2, 3, 4]}', EdgeLimits(max_json_values=4))
    with pytest.raises(InvalidRequestError, match="more than 3 arrays and objects"):
        parse_json(b'{"a": [[], {}]}', EdgeLimits(max_json_containers=3))
    for body in (b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(InvalidRequestError):
            parse_json(body, LIMITS)


def test_the_last_of_repeated_keys_counts() -> None:
    assert parse_json(b'{"a": 1, "a": 2}', LIMITS) == {"a": 2}


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"messages": [{"content": "ok"}, {"content": "a \ud83d b"}]}, "messages[1].content"),
        ({"messages": [{"content": [{"text": "\udc00"}]}]}, "messages[0].content[0].text"),
        ({"metadata": {"a b": "\ud800"}}, "metadata.?"),
        ({"stop": {"\ud800": 1}}, "stop"),
    ],
)
def test_half_a_surrogate_pair_is_found(value: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(json.dumps(value).encode(), LIMITS)
    assert (caught.value.code, caught.value.param) == ("invalid_unicode", param)


def test_whole_pairs_are_fine_and_other_faults_are_not_called_surrogates() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}', LIMITS) == {"a": "😀"}
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(b'{"a": "\\ud83d\\ude00"', LIMITS)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    "content_type", [None, "", "application/json", "Application/JSON; charset=utf-8", "application/x+json"]
)
def test_json_types(content_type: str | None) -> None:
    check_content_headers(content_type, None)


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [("text/plain", None), ("application/x-www-form-urlencoded", None), ("application/json", "gzip")],
)
def test_other_types(content_type: str, encoding: str | None) -> None:
    with pytest.raises(UnsupportedMediaTypeError):
        check_content_headers(content_type, encoding)
