"""The HTTP API as clients see it: a real server on loopback, the openai client and raw HTTP, stages from fakes.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from app.admission import Admission, AdmissionConfig
from app.auth import Authenticator
from app.ingress import ServerHooks, create_app
from app.limits import EdgeLimits
from app.observer import Usage
from app.openai_schema import ChatCompletionRequest, CompletionRequest
from app.pipeline import Pipeline
from cache_service.tenants import TenantRegistry
from deployments.errors import (
    DeadlineError,
    InternalError,
    MediaError,
    NotReadyError,
    OverloadedError,
    RateLimitError,
    ReplicaLostError,
)
from deployments.messages import (
    ChatPrompt,
    DeltaBatch,
    GenerationStats,
    Logprob,
    PreparedPrompt,
    PrepareRequest,
    SequenceDelta,
    TokenLogprobs,
)
from tests.fakes import FakeEngine, FakePreprocessor
from tests.unit.app.helpers import MODEL, eventually, make_settings

CHAT = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "hi"}
GET: Any = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
CALL = 'So: <tool_call>\n{"name": "get", "arguments": {"city": "Oslo"}}\n</tool_call>'
KEY, OPERATOR_KEY = "sk-0123456789abcdef", "sk-fedcba9876543210"


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], **options}


@dataclass
class RecordingObserver:
    begun: list[str] = field(default_factory=list)
    first_tokens: list[str] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    def started(self, endpoint: str) -> None:
        self.begun.append(endpoint)

    def first_token(self, endpoint: str, seconds: float) -> None:
        self.first_tokens.append(endpoint)

    def token_gap(self, endpoint: str, seconds: float, num_tokens: int) -> None:
        self.gaps.append(num_tokens)

    def finished(
        self,
        endpoint: str,
        status: int,
        seconds: float,
        stage_seconds: Mapping[str, float],
        usage: Usage,
        tenant: str = "",
    ) -> None:
        self.ended.append((endpoint, status))
        self.usages.append(usage)


class Hooks:
    """What the application around the API would do."""

    def __init__(self) -> None:
        self.ready_error: Exception | None = None
        self.resets = 0

    async def check_ready(self) -> None:
        if self.ready_error is not None:
            raise self.ready_error

    async def metrics_text(self) -> bytes:
        return b"# TYPE x counter\nx_total 1\n"

    async def metrics_targets(self) -> list[Mapping[str, Any]]:
        return [{"targets": ["h:1"], "labels": {}}]

    async def reset_prefix_cache(self) -> None:
        self.resets += 1


class Server:
    """One API over fakes; `start()` serves it on a free port."""

    def __init__(
        self,
        *,
        admission: AdmissionConfig | None = None,
        registry: TenantRegistry | None = None,
        preprocessor: FakePreprocessor | None = None,
        engine: FakeEngine | None = None,
        **settings: Any,
    ) -> None:
        self.preprocessor, self.engine = preprocessor or FakePreprocessor(), engine or FakeEngine()
        self.observer, self.hooks = RecordingObserver(), Hooks()
        self.settings = make_settings(**settings)
        self.admission = Admission(admission or AdmissionConfig())
        self.pipeline = Pipeline(
            self.preprocessor,
            self.engine,
            self.admission,
            max_model_len=self.settings.max_model_len,
            request_timeout_s=self.settings.request_timeout_s,
        )
        hooks = ServerHooks(
            check_ready=self.hooks.check_ready,
            metrics_text=self.hooks.metrics_text,
            metrics_targets=self.hooks.metrics_targets,
            reset_prefix_cache=self.hooks.reset_prefix_cache,
        )
        self.app = create_app(
            self.pipeline, self.settings, Authenticator(registry or TenantRegistry()), hooks, self.observer
        )
        self.url = ""

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[Server]:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started)
            yield self
        finally:
            server.should_exit = True
            await task
            listener.close()

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False, **options)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        http_client = openai.DefaultAsyncHttpxClient(timeout=20, trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http_client)

    async def outcomes(self, count: int) -> list[tuple[str, int]]:
        """Endpoint and status of the requests so far; a client may have its answer before the request has ended."""
        await eventually(lambda: len(self.observer.ended) >= count)
        return self.observer.ended

    async def idle(self) -> None:
        """Wait until no request holds a place; fails if one never gives it back."""
        await eventually(lambda: not (self.admission.stats.running or self.admission.stats.queued))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server().start() as running:
        yield running


async def post(server: Server, data: Any, path: str = CHAT, **options: Any) -> httpx.Response:
    async with server.client() as client:
        return await client.post(path, json=data, **options)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def events_of(text: str) -> list[Any]:
    """Data of all events; comments are left out."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------
async def test_chat_with_the_openai_client(server: Server) -> None:
    async with server.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=8)
    assert answer.choices[0].message.content == "a red circle"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert server.observer.begun == [CHAT]
    assert await server.outcomes(1) == [(CHAT, 200)]
    assert server.observer.first_tokens == [CHAT]
    assert len(server.observer.gaps) == 3
    assert server.observer.usages[0].completion_tokens == 3


async def test_streaming_with_the_openai_client(server: Server) -> None:
    async with server.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[USER], n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts, ends = ["", ""], [0, 0]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    assert texts == ["a red circle"] * 2
    assert ends == [1, 1]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


async def test_raw_stream(server: Server) -> None:
    answer = await post(server, body(stream=True))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = events_of(answer.text)
    assert done == "[DONE]"
    assert all(event["object"] == "chat.completion.chunk" and event["choices"] for event in events)
    assert all("finish_reason" in event["choices"][0] for event in events)


async def test_pictures_reach_the_preprocessor_untouched(server: Server) -> None:
    url = "data:image/png;base64," + "A" * 1_000_000
    content = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": url}}]
    answer = await post(server, {"model": MODEL, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 200
    request = server.preprocessor.requests[0]
    assert request.media[0].url == url
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages[0]["content"] == [{"type": "text", "text": "what"}, {"type": "image"}]


def logprobs_of(text: str) -> tuple[TokenLogprobs, ...]:
    token = Logprob(1, text, -0.25)
    return (TokenLogprobs(token, (token, Logprob(2, "other", -1.5))),)


async def test_logprobs_with_the_openai_client(server: Server) -> None:
    stats = GenerationStats(prompt_tokens=3, completion_tokens=2)
    server.engine.script = (
        (SequenceDelta(text="a", token_ids=(1,), logprobs=logprobs_of("a")),),
        (SequenceDelta(text="b", token_ids=(2,), logprobs=logprobs_of("b"), finish_reason="stop", stats=stats),),
    )
    async with server.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[USER], logprobs=True, top_logprobs=2)
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.content is not None
        assert [(t.token, t.logprob, len(t.top_logprobs)) for t in answer.choices[0].logprobs.content] == [
            ("a", -0.25, 2),
            ("b", -0.25, 2),
        ]
        text = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.text_offset == [0, 1]
    assert [r.sampling.logprobs for r in server.engine.requests.values()] == [2, 2]


async def test_text_completions_with_several_prompts(server: Server) -> None:
    async with server.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt=["x", "y"], n=2)
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
            (i, "a red circle", "stop") for i in range(4)
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
        texts = dict.fromkeys(range(4), "")
        async for chunk in await client.completions.create(model=MODEL, prompt=["x", "y"], n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == dict.fromkeys(range(4), "a red circle")
    await server.idle()


@pytest.mark.parametrize("split", range(0, len(CALL) + 1, 3))
async def test_tool_calls_in_a_stream(split: int) -> None:
    server = Server()
    stats = GenerationStats(prompt_tokens=3, completion_tokens=2)
    server.engine.script = (
        (SequenceDelta(text=CALL[:split]),),
        (SequenceDelta(text=CALL[split:]),),
        (SequenceDelta(finish_reason="stop", stats=stats),),
    )
    async with server.start(), server.openai() as client:
        name = arguments = content = ""
        ids, ends = [], []
        stream = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[GET], stream=True)
        async for chunk in stream:
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                ids += [call.id] if call.id else []
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
        whole = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[GET])
    assert (content, name, arguments, len(ids), ends) == ("So:", "get", '{"city": "Oslo"}', 1, ["tool_calls"])
    calls = whole.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert (calls[0].function.name, calls[0].function.arguments) == ("get", '{"city": "Oslo"}')
    assert whole.choices[0].finish_reason == "tool_calls"


async def test_no_tool_calls_where_none_are_wanted(server: Server) -> None:
    server.engine.text = CALL
    answer = (await post(server, body(tools=[GET], tool_choice="none"))).json()["choices"][0]
    assert answer["message"]["content"] == CALL
    assert "tool_calls" not in answer["message"]
    assert answer["finish_reason"] == "stop"


async def test_tokenize(server: Server) -> None:
    for data in ({"prompt": "x"}, {"messages": [USER]}):
        answer = await post(server, {"model": MODEL, **data}, "/tokenize")
        assert answer.json() == {"count": 3, "max_model_len": 64, "tokens": [1, 2, 3]}
    assert error_of(await post(server, {}, "/tokenize"))["param"] == "prompt"


async def test_models_and_the_rest() -> None:
    names = ("org/tiny-vl", "alias")
    async with Server(served_model_name=names, version="1.2").start() as server, server.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == list(names)
        assert (await client.get("/v1/models/org/tiny-vl")).json()["max_model_len"] == 64
        assert error_of(await client.get("/v1/models/other"))["code"] == "model_not_found"
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/version")).json() == {"version": "1.2"}
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "x_total 1" in metrics.text
        assert (await client.get("/metrics/targets")).json() == [{"targets": ["h:1"], "labels": {}}]
        assert (await client.get("/ready")).status_code == 200
        server.hooks.ready_error = NotReadyError("Starting.", retry_after_s=3)
        answer = await client.get("/ready")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
        assert error_of(answer)["code"] == "not_ready"
        document = (await client.get("/openapi.json")).json()
        assert "ChatCompletionRequest" in document["components"]["schemas"]


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("data", "status", "param", "code"),
    [
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"max_tokens": 62}, 400, "max_tokens", "context_length_exceeded"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"max_token": 3}, 400, "max_token", "unknown_parameter"),
    ],
)
async def test_what_is_wrong_has_its_own_status_streamed_or_not(
    server: Server, data: dict[str, Any], status: int, param: str, code: str, stream: bool
) -> None:
    answer = await post(server, body(stream=stream, **data))
    assert answer.status_code == status
    error = error_of(answer)
    assert (error["param"], error["code"]) == (param, code)
    assert await server.outcomes(1) == [(CHAT, status)]
    assert not server.engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["prepare", "submit", "first delta"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MediaError("The picture is cut.", param="messages[0].content[0].image_url"), 400, "invalid_image"),
        (RateLimitError("Slower."), 429, "rate_limit_exceeded"),
        (OverloadedError("Full."), 503, "overloaded"),
        (DeadlineError("Late."), 504, "deadline_exceeded"),
        (InternalError("secret"), 500, "internal_error"),
        (ValueError("secret"), 500, "internal_error"),
        (ReplicaLostError("secret"), 503, "unavailable"),
    ],
)
async def test_errors_of_the_stages_before_the_first_delta(
    server: Server, error: Exception, status: int, code: str, where: str, stream: bool
) -> None:
    if where == "prepare":
        server.preprocessor.error = error
    elif where == "submit":
        server.engine.submit_error = error
    else:
        server.engine.stream_error = error
    answer = await post(server, body(stream=stream))
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    await server.idle()


async def test_a_replica_lost_after_the_first_delta_is_named_as_such(server: Server) -> None:
    failure = SequenceDelta(finish_reason="error", error=ReplicaLostError("secret"))
    server.engine.script = ((SequenceDelta(text="a"),), (failure,))
    *_, last, done = events_of((await post(server, body(stream=True))).text)
    assert done == "[DONE]"
    assert last["error"]["code"] == "replica_lost"
    assert "secret" not in last["error"]["message"]


async def test_an_error_after_the_first_delta_ends_the_stream(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    failure = SequenceDelta(finish_reason="error", error=InternalError("secret"))
    server.engine.script = ((SequenceDelta(text="a"),), (failure,))
    answer = await post(server, body(stream=True), headers={"x-request-id": "mine-1"})
    assert answer.status_code == 200
    *_, last, done = events_of(answer.text)
    assert done == "[DONE]"
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert await server.outcomes(1) == [(CHAT, 500)]
    failed = next(record for record in caplog.records if "request failed" in record.message)
    assert failed.fields == {"request_id": "mine-1"}  # type: ignore[attr-defined]
    async with server.openai() as client:
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model=MODEL, messages=[USER], stream=True):
                pass
    await server.idle()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"[" * 100_000,
        b'{"a": NaN}',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
    ],
)
async def test_broken_bodies(server: Server, content: bytes) -> None:
    async with server.client() as client:
        answer = await client.post(CHAT, content=content)
    assert answer.status_code == 400
    error_of(answer)


async def test_the_router_answers_in_the_same_form(server: Server) -> None:
    async with server.client() as client:
        unknown = await client.get("/v1/nothing")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "unknown_route")
        method = await client.get(CHAT)
        assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
        assert method.headers["allow"] == "POST"
        media = await client.post(CHAT, content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
        assert (media.status_code, error_of(media)["code"]) == (415, "unsupported_media_type")
        closed = await client.post("/reset_prefix_cache")
        assert closed.status_code == 404


async def test_size_limits_of_the_edge() -> None:
    limits = EdgeLimits(max_body_bytes=2000, max_header_bytes=3000, max_url_bytes=200)
    async with Server(limits=limits).start() as server, server.client() as client:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b" " * 600

        for content in (b" " * 2001, chunks()):
            answer = await client.post(CHAT, content=content)
            assert (answer.status_code, error_of(answer)["code"]) == (413, "payload_too_large")
        fine = await client.post(CHAT, content=json.dumps(body()).encode())
        assert fine.status_code == 200
        answer = await client.get("/health", headers={"x-filler": "a" * 3000})
        assert (answer.status_code, error_of(answer)["code"]) == (431, "headers_too_large")
        answer = await client.get("/health?" + "a" * 200)
        assert (answer.status_code, error_of(answer)["code"]) == (414, "url_too_long")


async def test_a_chunked_body_works(server: Server) -> None:
    data = json.dumps(body()).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for i in range(0, len(data), 7):
            yield data[i : i + 7]

    async with server.client() as client:
        assert (await client.post(CHAT, content=chunks())).status_code == 200


async def test_a_slow_body_times_out() -> None:
    async with Server(limits=EdgeLimits(body_timeout_s=0.05)).start() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()


# ---------------------------------------------------------------------------------------------------------------------
# Keys, ids, headers
# ---------------------------------------------------------------------------------------------------------------------
def registry() -> TenantRegistry:
    tenants = [{"name": "acme", "keys": [KEY], "limits": {"max_concurrent_requests": 1}}]
    return TenantRegistry.from_mapping({"tenants": [*tenants, {"name": "ops", "keys": [OPERATOR_KEY]}]})


async def test_keys() -> None:
    options: dict[str, Any] = {"enable_operator_routes": True, "operator_tenants": frozenset({"ops"})}
    async with Server(registry=registry(), **options).start() as server, server.client() as client:
        answer = await client.post(CHAT, json=body())
        assert (answer.status_code, error_of(answer)["code"]) == (401, "missing_api_key")
        answer = await client.get("/v1/models", headers={"authorization": "Bearer sk-wrong"})
        assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200
        mine, ops = {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {OPERATOR_KEY}"}
        assert (await client.post(CHAT, json=body(), headers=mine)).status_code == 200
        assert server.preprocessor.requests[0].namespace == "tenant:acme"
        denied = await client.post("/reset_prefix_cache", headers=mine)
        assert (denied.status_code, error_of(denied)["code"]) == (403, "permission_denied")
        assert (await client.post("/reset_prefix_cache", headers=ops)).status_code == 200
        assert server.hooks.resets == 1


@pytest.mark.parametrize(("sent", "kept"), [("abc-1.2:3_4", True), ("a b", False), ("a" * 129, False), ("ä", False)])
async def test_request_ids(server: Server, sent: str, kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sightline.access"):
        answer = await post(server, body(temperature=9), headers={"x-request-id": sent.encode()})  # type: ignore[dict-item]
        await server.outcomes(1)
    seen = answer.headers["x-request-id"]
    assert (seen == sent) is kept
    assert seen
    line = next(record for record in caplog.records if record.name == "sightline.access")
    assert line.fields["request_id"] == seen  # type: ignore[attr-defined]
    assert line.fields["status"] == 400  # type: ignore[attr-defined]


async def test_logs_hold_no_payload_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with Server(registry=registry()).start() as server:
            data = body(messages=[{"role": "user", "content": "a private matter"}])
            headers = {"authorization": f"Bearer {KEY}"}
            assert (await post(server, data, headers=headers)).status_code == 200
            await post(server, data, "/v1/private-path", headers=headers)
            await eventually(lambda: sum(record.name == "sightline.access" for record in caplog.records) == 2)
    ours = [str(vars(record)) for record in caplog.records if record.name.startswith(("app", "sightline"))]
    assert len(ours) == 2
    assert not any(word in line for line in ours for word in ("private", KEY))


async def test_fixed_headers_and_cors() -> None:
    async with Server(cors_allow_origins=("https://ui.example",)).start() as server, server.client() as client:
        origin = {"origin": "https://ui.example"}
        preflight = await client.options(CHAT, headers={**origin, "access-control-request-method": "POST"})
        assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
        answer = await client.post(CHAT, json=body(n=0), headers=origin)
        assert answer.status_code == 400
        assert answer.headers["access-control-allow-origin"] == "https://ui.example"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (
            "access-control-allow-origin" not in (await client.get("/health", headers={"origin": "https://x"})).headers
        )


# ---------------------------------------------------------------------------------------------------------------------
# Leaving, pressure, time
# ---------------------------------------------------------------------------------------------------------------------
async def hang_up_after(server: Server, data: dict[str, Any], ready: asyncio.Event | None, until: bytes = b"") -> None:
    """Send a request, wait until bytes or an event are seen, close the connection."""
    content = json.dumps(data).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(content)) + content)
    if until:
        await reader.readuntil(until)
    if ready is not None:
        await ready.wait()
    writer.close()
    await writer.wait_closed()


async def until_submitted(server: Server) -> None:
    await eventually(lambda: server.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_delta_aborts(server: Server, stream: bool) -> None:
    server.engine.pause = asyncio.Event()
    submitted = asyncio.Event()
    client = asyncio.create_task(hang_up_after(server, body(stream=stream), submitted))
    await until_submitted(server)
    submitted.set()
    await client
    await server.idle()
    assert set(server.engine.aborted) == set(server.engine.requests)
    assert await server.outcomes(1) == [(CHAT, 499)]


class StallingEngine(FakeEngine):
    """Streams one word, then nothing until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def stream(self, request_id: str) -> AsyncIterator[DeltaBatch]:
        yield (SequenceDelta(text="begun"),)
        await self.go_on.wait()
        yield (SequenceDelta(finish_reason="stop", stats=GenerationStats(prompt_tokens=3, completion_tokens=1)),)


async def test_leaving_in_the_middle_of_a_stream_aborts() -> None:
    async with Server(engine=StallingEngine()).start() as server:
        await hang_up_after(server, body(stream=True), None, until=b'"begun"')
        await server.idle()
        assert set(server.engine.aborted) == set(server.engine.requests)
        assert await server.outcomes(1) == [(CHAT, 499)]


async def test_a_client_that_does_not_read_is_gone() -> None:
    limits = EdgeLimits(write_timeout_s=0.1)
    async with Server(limits=limits).start() as server:
        server.engine.script = ((SequenceDelta(text="x" * 1_000_000),),) * 64
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]), limit=1024)
        content = json.dumps(body(stream=True)).encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(content)) + content
        )
        assert await server.outcomes(1) == [(CHAT, 499)]
        await server.idle()
        assert set(server.engine.aborted) == set(server.engine.requests)
        writer.transport.abort()


class StuckPreprocessor(FakePreprocessor):
    """Never answers; notes that it was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.cancelled = asyncio.Event(), 0

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


async def test_leaving_cancels_preparation_and_waiting() -> None:
    stuck = StuckPreprocessor()
    async with Server(preprocessor=stuck, admission=AdmissionConfig(max_running_requests=1)).start() as server:
        running = asyncio.create_task(hang_up_after(server, body(), stuck.began))
        leave = asyncio.Event()
        waiting = asyncio.create_task(hang_up_after(server, body(), leave))
        await running
        leave.set()
        await waiting
        await server.idle()
        assert stuck.cancelled >= 1
        assert await server.outcomes(2) == [(CHAT, 499)] * 2


async def test_a_body_cut_in_the_middle_is_no_error_of_ours(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert await server.outcomes(1) == [(CHAT, 499)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_back_pressure_refuses_before_any_work() -> None:
    config = AdmissionConfig(max_running_requests=1, max_queued_requests=1)
    async with Server(admission=config).start() as server, server.client() as client:
        server.engine.pause = asyncio.Event()
        held = [asyncio.create_task(client.post(CHAT, json=body())) for _ in range(2)]
        await until_submitted(server)
        await eventually(lambda: server.admission.stats.queued)
        refused = await client.post(CHAT, json=body(stream=True))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "overloaded"
        assert len(server.preprocessor.requests) == 1
        assert (await client.get("/health")).status_code == 200
        server.engine.pause.set()
        assert [(await task).status_code for task in held] == [200, 200]


async def test_bodies_count_until_the_first_delta() -> None:
    content = json.dumps(body(stream=True)).encode()
    limits, engine = EdgeLimits(max_buffered_body_bytes=len(content)), StallingEngine()
    async with Server(engine=engine, limits=limits).start() as server, server.client() as client:
        server.preprocessor.gate = asyncio.Event()
        held = asyncio.create_task(client.post(CHAT, content=content))
        await eventually(lambda: server.preprocessor.requests)
        assert (await client.post(CHAT, content=content)).status_code == 503
        server.preprocessor.gate.set()
        await eventually(lambda: server.observer.first_tokens)
        async with client.stream("POST", CHAT, content=content) as second:
            assert second.status_code == 200, "the first answer has begun, so its body is counted no longer"
            engine.go_on.set()
        assert (await held).status_code == 200


async def test_a_keys_own_limit_is_a_429() -> None:
    async with Server(registry=registry()).start() as server, server.openai(KEY) as client:
        server.engine.pause = asyncio.Event()
        held = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=[USER]))
        await until_submitted(server)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=[USER])
        assert caught.value.code == "concurrency_limit_exceeded"
        server.engine.pause.set()
        await held


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_is_a_504(stream: bool) -> None:
    async with Server(request_timeout_s=0.05).start() as server:
        server.engine.pause = asyncio.Event()
        answer = await post(server, body(stream=stream))
        assert answer.status_code == 504
        assert "0.05 seconds" in error_of(answer)["message"]
        await server.idle()
        assert set(server.engine.aborted) == set(server.engine.requests)


async def test_the_deadline_in_a_stream_is_an_error_event() -> None:
    async with Server(engine=StallingEngine(), request_timeout_s=1.0).start() as server:
        *events, last, done = events_of((await post(server, body(stream=True))).text)
        assert events[-1]["choices"][0]["delta"] == {"content": "begun"}
        assert last["error"]["code"] == "deadline_exceeded"
        assert done == "[DONE]"
        assert await server.outcomes(1) == [(CHAT, 504)]


async def test_a_silent_stream_is_kept_alive() -> None:
    engine = StallingEngine()
    async with Server(engine=engine, keep_alive_s=0.02).start() as server, server.client() as client:
        seen = ""
        async with client.stream("POST", CHAT, json=body(stream=True)) as answer:
            async for text in answer.aiter_text():
                seen += text
                if seen.count(": keep-alive\n\n") >= 2:
                    engine.go_on.set()
        assert seen.count(": keep-alive\n\n") >= 2
        assert events_of(seen)[-1] == "[DONE]"


async def test_a_lost_replica_costs_the_client_nothing(server: Server) -> None:
    server.engine.losses = [ReplicaLostError("gone")]
    answer = await post(server, body(stream=True))
    assert (
        "".join(
            event["choices"][0]["delta"].get("content", "") for event in events_of(answer.text) if event != "[DONE]"
        )
        == "a red circle"
    )
    assert len(server.engine.requests) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Anything at all
# ---------------------------------------------------------------------------------------------------------------------
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    ["text", "image_url", "video_url", "image", "video", "function", "user", "tool", "json_schema", "auto"]
)
FIELDS = st.sampled_from(
    [*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, "best_of", "echo", "suffix", "unknown"]
)
PARTS = st.dictionaries(
    st.sampled_from(["type", "text", "image_url", "video_url", "image", "video", "uuid", "url", "detail"]), JSON | WORDS
)
TURNS = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id"]),
    JSON | WORDS | st.lists(PARTS, max_size=3),
)


SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    "/v1/completions": {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
}


@pytest.mark.parametrize("path", SOUND)
def test_no_request_makes_the_server_fail(path: str) -> None:
    transport = httpx.ASGITransport(Server().app, raise_app_exceptions=False)
    statuses: set[int] = set()

    async def send(data: Any) -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=json.dumps(data).encode(), headers=headers)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (data, answer.text)
        if answer.status_code != 200:
            assert len(error_of(answer)["message"]) < 500

    with asyncio.Runner() as runner:

        @hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(FIELDS, JSON | WORDS, max_size=3), st.none() | st.lists(TURNS, max_size=3))
        def run(options: dict[str, Any], turns: list[Any] | None) -> None:
            messages = {} if turns is None else {"messages": turns}
            runner.run(send({"model": MODEL, **SOUND[path], **options, **messages}))

        run()
    assert statuses >= {200, 400}
