"""Request bodies: read with a limit that counts real bytes, then parsed as JSON within limits of depth and size.

Media stays what it is in JSON, a string: nothing here decodes base64 or looks into a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from app.errors import RequestTimeoutError, UnsupportedMediaTypeError
from app.limits import MIB, EdgeLimits
from deployments.errors import InvalidRequestError, OverloadedError, PayloadTooLargeError, RequestAbortedError

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

_PARSED_ON_LOOP_BYTES = 1 * MIB
"""Larger bodies are parsed in a thread: a body of 96 MiB takes about half a second."""
_LINGER_BYTES = 1024 * MIB

_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyReader:
    """Reads bodies and accounts for those that are held. One per ingress replica.

    Args:
        linger_s: How long a client that sends too much is listened to, so that it reads its answer.
    """

    def __init__(self, limits: EdgeLimits, linger_s: float = 10.0) -> None:
        self._limits, self._linger_s = limits, linger_s
        self.buffered_bytes = 0

    @contextmanager
    def account(self) -> Iterator[BodyAccount]:
        """Bytes noted on the account count as held until the block is left or the account is settled."""
        account = BodyAccount(self, self._limits.max_buffered_body_bytes)
        try:
            yield account
        finally:
            account.settle()

    async def read(self, receive: Receive, content_length: int | None, account: BodyAccount) -> bytes:
        """The whole body. Raises PayloadTooLargeError, RequestTimeoutError, OverloadedError, RequestAbortedError."""
        if content_length is not None and content_length > self._limits.max_body_bytes:
            await self._discard(receive)
            raise self._too_large(content_length)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await self._read(receive, account)
        except TimeoutError:
            raise RequestTimeoutError(
                f"The request body did not arrive within {self._limits.body_timeout_s:g} seconds."
            ) from None

    async def _read(self, receive: Receive, account: BodyAccount) -> bytes:
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestAbortedError("The client went away while sending the request body.")
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size > self._limits.max_body_bytes:
                chunks.clear()
                if more:
                    await self._discard(receive)
                raise self._too_large(size)
            account.add(len(chunk))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while and keep nothing: a client that is cut off while it sends never sees why."""
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                while more and size < _LINGER_BYTES:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message["type"] != "http.disconnect" and message.get("more_body", False)

    def _too_large(self, seen_bytes: int) -> PayloadTooLargeError:
        limit = self._limits.max_body_bytes
        return PayloadTooLargeError(
            f"The request body is too large: at least {seen_bytes} bytes, the limit is {limit} ({limit / MIB:g} MiB)."
        )


class BodyAccount:
    """One request's share of the reader's bytes."""

    def __init__(self, reader: BodyReader, limit_bytes: int) -> None:
        self._reader, self._limit_bytes = reader, limit_bytes
        self._held_bytes = 0

    def add(self, size_bytes: int) -> None:
        if self._reader.buffered_bytes + size_bytes > self._limit_bytes:
            raise OverloadedError("The server holds too many request bodies right now.", retry_after_s=1)
        self._reader.buffered_bytes += size_bytes
        self._held_bytes += size_bytes

    def settle(self) -> None:
        """Give the bytes back; calling it again changes nothing."""
        self._reader.buffered_bytes -= self._held_bytes
        self._held_bytes = 0


def check_content_headers(content_type: str | None, content_encoding: str | None) -> None:
    """Raises UnsupportedMediaTypeError for bodies that are declared to be something else than plain JSON."""
    if content_encoding and content_encoding.strip().lower() != "identity":
        raise UnsupportedMediaTypeError(
            "Compressed request bodies are not supported; send the body without Content-Encoding.",
            code="unsupported_content_encoding",
        )
    if not content_type:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not re.fullmatch(r"application/[\w.-]+\+json", media_type):
        raise UnsupportedMediaTypeError("The request body must be JSON; send `Content-Type: application/json`.")


async def parse_body(body: bytes, limits: EdgeLimits) -> dict[str, Any]:
    """`parse_json`, in a thread where it would hold up other requests."""
    if len(body) <= _PARSED_ON_LOOP_BYTES:
        return parse_json(body, limits)
    return await asyncio.to_thread(parse_json, body, limits)


def parse_json(body: bytes, limits: EdgeLimits) -> dict[str, Any]:
    """The object in a body. Raises InvalidRequestError with code invalid_json or json_too_complex.

    NaN and Infinity are not JSON and are refused; of a repeated key the last value counts.
    """
    if not body.strip():
        raise InvalidRequestError("The request body is empty; a JSON object is needed.", code="invalid_json")
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_values > limits.max_json_values:
        raise _too_complex(f"has too many values: up to {num_values}, the limit is {limits.max_json_values}")
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise _json_error(body, error) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    _check_containers(value, limits)
    return value


def _check_containers(value: object, limits: EdgeLimits) -> None:
    """Walks level by level and gives up as soon as a limit is passed, so that its own cost is bounded."""
    level: list[object] = [value]
    depth = num_containers = 0
    while level:
        depth += 1
        num_containers += len(level)
        if depth > limits.max_json_depth:
            raise _too_complex(f"is nested deeper than {limits.max_json_depth} levels")
        if num_containers > limits.max_json_containers:
            raise _too_complex(f"has more than {limits.max_json_containers} arrays and objects")
        inner: list[object] = []
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            inner.extend(c for c in children if isinstance(c, dict | list))  # type: ignore[attr-defined]
        level = inner


def _too_complex(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body {what}.", code="json_too_complex")


def _json_error(body: bytes, error: ValueError) -> InvalidRequestError:
    if _SURROGATE_ESCAPE.search(body):
        param = _find_lone_surrogate(body)
        if param is not None:
            return InvalidRequestError(
                f"The text at {param or 'the top level'} holds half of a surrogate pair, which is not valid Unicode.",
                code="invalid_unicode",
                param=param or None,
            )
    position = getattr(error, "pos", None)
    where = f" at character {position}" if isinstance(position, int) else ""
    return InvalidRequestError(f"The request body is not valid JSON{where}.", code="invalid_json")


def _find_lone_surrogate(body: bytes) -> str | None:
    """Path of the first text with a lone surrogate; None if there is none or the body is broken otherwise."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            if _SURROGATE.search(value):
                return path
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", child) for i, child in reversed(list(enumerate(value))))
        elif isinstance(value, dict):
            for key, child in reversed(list(value.items())):
                safe = key if key.isidentifier() else "?"
                stack.append((f"{path}.{safe}" if path else safe, child))
                if _SURROGATE.search(key):
                    return path or ""
    return None
