"""From any exception to the one form of an error answer: `{"error": {"message", "type", "param", "code"}}`.

A fault of ours says nothing about its inside; its text goes to the log with the request id.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import orjson

from deployments.errors import (
    InternalError,
    InvalidRequestError,
    ReplicaLostError,
    RequestAbortedError,
    SightlineError,
)


class MethodNotAllowedError(InvalidRequestError):
    status = 405
    default_code = "method_not_allowed"


class RequestTimeoutError(InvalidRequestError):
    """The client took too long to send its request."""

    status = 408
    default_code = "request_timeout"


class UrlTooLongError(InvalidRequestError):
    status = 414
    default_code = "url_too_long"


class UnsupportedMediaTypeError(InvalidRequestError):
    status = 415
    default_code = "unsupported_media_type"


class HeadersTooLargeError(InvalidRequestError):
    status = 431
    default_code = "headers_too_large"


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    status: int
    body: bytes
    headers: Mapping[str, str]
    """Retry-After where a retry makes sense."""

    media_type: ClassVar[str] = "application/json"


def as_sightline_error(error: BaseException) -> SightlineError:
    """The error itself if it is one of ours, else an InternalError in its place."""
    if isinstance(error, SightlineError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RequestAbortedError("The request was cancelled.")
    return InternalError(type(error).__name__)


def error_object(error: SightlineError) -> dict[str, dict[str, str | None]]:
    """The JSON object of an error answer or of an error event in a stream."""
    if isinstance(error, ReplicaLostError):
        message = "The server lost the replica that worked on this request; ask again."
        code = ReplicaLostError.default_code
    elif isinstance(error, InternalError):
        message, code = "The server failed to process this request.", "internal_error"
    else:
        message, code = error.message, error.code
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": code}}


def answer_for(error: BaseException) -> ErrorAnswer:
    ours = as_sightline_error(error)
    headers: dict[str, str] = {}
    if ours.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(ours.retry_after_s)))
    elif ours.status in (429, 503):
        headers["Retry-After"] = "1"
    return ErrorAnswer(ours.status, orjson.dumps(error_object(ours)), headers)
