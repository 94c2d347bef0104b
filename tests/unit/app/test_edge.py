"""The small parts of the edge: errors, keys, limits, settings, logs, connections."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from app.access_log import log_finished
from app.auth import Authenticator
from app.connection import ClientConnection
from app.errors import MethodNotAllowedError, answer_for
from app.limits import EdgeLimits
from app.settings import ApiSettings, SamplingDefaults
from cache_service.tenants import TenantRegistry
from deployments.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    ReplicaLostError,
    RequestAbortedError,
)
from deployments.replica_log import JsonFormatter
from tests.unit.app.helpers import make_settings, make_trace

KEY = "sk-0123456789abcdef"


# ---- errors
def test_the_form_of_errors() -> None:
    answer = answer_for(InvalidRequestError("No.", param="n", code="c"))
    assert answer.status == 400
    assert json.loads(answer.body) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": "n", "code": "c"}
    }


@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret path"),
        KeyError("secret"),
        RuntimeError(),
        InternalError("secret"),
    ],
)
def test_unexpected_exceptions_show_nothing(error: Exception) -> None:
    answer = answer_for(error)
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["code"] == "internal_error"
    assert b"secret" not in answer.body


def test_a_lost_replica_is_named_but_not_described() -> None:
    answer = answer_for(ReplicaLostError("secret"))
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["code"] == "replica_lost"
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (OverloadedError("x"), "1"),
        (RateLimitError("x", retry_after_s=0.2), "1"),
        (RateLimitError("x", retry_after_s=2.1), "3"),
        (InvalidRequestError("x"), None),
    ],
)
def test_retry_after_is_whole_seconds(error: Exception, wanted: str | None) -> None:
    assert answer_for(error).headers.get("Retry-After") == wanted


def test_errors_of_the_edge_pickle() -> None:
    again = pickle.loads(pickle.dumps(MethodNotAllowedError("No.")))
    assert (type(again), again.status) == (MethodNotAllowedError, 405)


# ---- keys
def registry() -> TenantRegistry:
    return TenantRegistry.from_mapping({"tenants": [{"name": "acme", "keys": [KEY]}]})


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer   {KEY} "])
def test_known_keys(header: str) -> None:
    assert Authenticator(registry()).authenticate(header).namespace == "tenant:acme"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        (f"Basic {KEY}", "missing_api_key"),
        (KEY, "missing_api_key"),
        (f"Bearer {KEY}x", "invalid_api_key"),
    ],
)
def test_other_keys(header: str | None, code: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        Authenticator(registry()).authenticate(header)
    assert caught.value.code == code
    assert KEY not in caught.value.message


def test_an_open_server_asks_for_nothing() -> None:
    assert Authenticator(TenantRegistry()).authenticate("Bearer anything").namespace == ""


# ---- options
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_body_bytes": 0}, "limits.max_body_bytes is 0"),
        ({"max_n": True}, "limits.max_n is True"),
        ({"max_json_depth": 1000}, "limits.max_json_depth is 1000"),
        ({"limit_mm_per_prompt": {"audio": 1}}, "audio"),
        ({"limit_mm_per_prompt": {"image": -1}}, "-1"),
    ],
)
def test_limits_that_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EdgeLimits(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"served_model_name": ()},
        {"max_model_len": 1},
        {"vocab_size": 0},
        {"request_timeout_s": 0},
        {"keep_alive_s": -1},
    ],
)
def test_settings_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_settings(**options)


@pytest.mark.parametrize(
    "options", [{"temperature": 3}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0}]
)
def test_sampling_defaults_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingDefaults(**options)


def test_the_first_name_is_the_models() -> None:
    settings: ApiSettings = make_settings(served_model_name=("a", "b"))
    assert settings.model == "a"


# ---- logs
def test_one_json_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    trace = make_trace()
    trace.endpoint, trace.status, trace.tenant = "/v1/chat/completions", 200, "acme"
    with caplog.at_level(logging.INFO, "sightline.access"):
        log_finished(trace, "BREW")
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert (line["request_id"], line["method"], line["endpoint"]) == ("req-1", "other", "/v1/chat/completions")
    assert (line["status"], line["tenant"], line["level"]) == (200, "acme", "INFO")
    assert line["time"].endswith("Z")


def test_exceptions_are_part_of_the_line() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "m %s", ("a",), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "m a"
    assert "ValueError: x" in line["exception"]


# ---- connections
class Wire:
    """An ASGI receive of a client that leaves when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self) -> Mapping[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_work_ends_with_its_result_or_error() -> None:
    async def fine() -> int:
        return 5

    async def bad() -> int:
        raise ValueError("x")

    async with ClientConnection(Wire()) as client:
        assert await client.run(fine()) == 5
        with pytest.raises(ValueError, match="x"):
            await client.run(bad())


async def test_a_client_that_leaves_cancels_the_work_and_its_clean_up_is_awaited() -> None:
    wire, steps = Wire(), []

    async def work() -> None:
        try:
            steps.append("began")
            wire.gone.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    async with ClientConnection(wire) as client:
        with pytest.raises(RequestAbortedError):
            await client.run(work())
    assert steps == ["began", "cleaned"]


async def test_the_clean_up_is_awaited_however_often_the_caller_is_cancelled() -> None:
    """A server may cancel a request whose client has left while its clean-up is under way."""
    began, may_end, steps = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            steps.append("cleaning")
            await may_end.wait()
            steps.append("cleaned")

    async def serve() -> None:
        async with ClientConnection(Wire()) as client:
            await client.run(work())

    serving = asyncio.create_task(serve())
    await began.wait()
    for _ in range(3):
        serving.cancel()
        await asyncio.sleep(0.01)
    assert not serving.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert steps == ["cleaning", "cleaned"]


async def test_being_cancelled_cancels_the_work() -> None:
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def handle() -> None:
        async with ClientConnection(Wire()) as client:
            await client.run(work())

    task = asyncio.create_task(handle())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()
