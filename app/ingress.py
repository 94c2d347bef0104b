"""The HTTP API: routes, and how a request becomes a generation. Built from parts that are given; knows nothing of Ray.

EdgeMiddleware ─▶ route ─▶ who calls ─▶ body ─▶ JSON ─▶ schema ─▶ Call ─▶ GenerationResponse ─▶ Pipeline
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from app.auth import Authenticator
from app.body import BodyAccount, BodyReader, check_content_headers, parse_body
from app.connection import ClientConnection
from app.errors import MethodNotAllowedError, answer_for
from app.exchange import GenerationResponse, merge
from app.middleware import TRACE_KEY, EdgeMiddleware, note_error
from app.observer import NullObserver, RequestObserver, RequestTrace
from app.openai_convert import RequestConverter
from app.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Generation,
    NamedToolChoice,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.openai_stream import AnswerHead, AnswerWriter, ChatWriter, CompletionWriter
from app.openai_validation import validate
from app.pipeline import Call, Pipeline
from app.settings import ApiSettings
from app.tool_calls import HermesToolParser
from cache_service.tenants import Tenant
from deployments.errors import InvalidRequestError, NotFoundError, PermissionDeniedError
from deployments.messages import DeltaBatch, SequenceDelta
from deployments.tracing import Tracer

M = TypeVar("M", bound=BaseModel)

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
TIMINGS_HEADER = "x-sightline-timings"
"""With the value 1 an answer ends with `sightline`: stage times and cache results, an extension of OpenAI's form."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHooks:
    """What the API asks of the application around it."""

    check_ready: Callable[[], Awaitable[None]]
    """Returns if requests can be served; raises NotReadyError."""
    metrics_text: Callable[[], Awaitable[bytes]]
    """All replicas' metrics in Prometheus's text format."""
    metrics_targets: Callable[[], Awaitable[list[Mapping[str, Any]]]]
    """Scrape targets in the form of Prometheus's HTTP discovery."""
    reset_prefix_cache: Callable[[], Awaitable[None]]
    """Forget all cached prefixes on all LM replicas."""


def create_app(
    pipeline: Pipeline,
    settings: ApiSettings,
    authenticator: Authenticator,
    hooks: ServerHooks,
    observer: RequestObserver | None = None,
    unix_time: Callable[[], float] = time.time,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The whole HTTP API as one ASGI application."""
    app = FastAPI(title="Sightline", version=settings.version, docs_url=None, redoc_url=None)
    api = _Api(pipeline, settings, authenticator, hooks, unix_time)
    _add_routes(app, api, settings)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_middleware(EdgeMiddleware, limits=settings.limits, observer=observer or NullObserver(), tracer=tracer)
    if settings.cors_allow_origins:
        # Outermost, so that error answers carry its headers too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id", TIMINGS_HEADER],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_routes(app: FastAPI, api: _Api, settings: ApiSettings) -> None:
    schemas: dict[str, Any] = {}

    def route(path: str, handler: Callable[..., Any], method: str, summary: str, *bodies: type[BaseModel]) -> None:
        extra = {"requestBody": _request_body(bodies, schemas)} if bodies else None
        app.add_api_route(
            path, handler, methods=[method], summary=summary, openapi_extra=extra, response_class=Response
        )

    route(CHAT, api.chat_completions, "POST", "An answer to a conversation", ChatCompletionRequest)
    route(COMPLETIONS, api.completions, "POST", "A continuation of a text", CompletionRequest)
    route(TOKENIZE, api.tokenize, "POST", "Token ids of a prompt", TokenizeTextRequest, TokenizeChatRequest)
    route("/v1/models", api.models, "GET", "The served models")
    route("/v1/models/{name:path}", api.model, "GET", "One served model")
    route("/health", api.health, "GET", "Whether the process is alive")
    route("/ready", api.ready, "GET", "Whether requests can be served")
    route("/version", api.version, "GET", "The server's version")
    route("/metrics", api.metrics, "GET", "Metrics of all replicas, in Prometheus's text format")
    route("/metrics/targets", api.metrics_targets, "GET", "Scrape targets, for Prometheus's HTTP discovery")
    if settings.enable_operator_routes:
        route("/reset_prefix_cache", api.reset_prefix_cache, "POST", "Forget all cached prefixes")
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _request_body(models: tuple[type[BaseModel], ...], schemas: dict[str, Any]) -> dict[str, Any]:
    """Handlers read bodies themselves, so their schemas are written into the API's description here."""
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return {
        "required": True,
        "content": {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}},
    }


async def _http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router in the one form of errors."""
    assert isinstance(error, HTTPException)
    ours: InvalidRequestError | NotFoundError
    if error.status_code == 405:
        ours = MethodNotAllowedError(f"This route does not support {_word(request.method)}.")
    elif error.status_code == 404:
        ours = NotFoundError("There is no such route on this server.", code="unknown_route")
    else:
        ours = InvalidRequestError("The request is not valid.")
    trace: RequestTrace = request.scope[TRACE_KEY]
    note_error(ours, trace)
    made = answer_for(ours)
    return Response(made.body, made.status, {**made.headers, **(error.headers or {})}, media_type=made.media_type)


def _word(text: str) -> str:
    return text if text.isalpha() and len(text) <= 16 else "this method"


class _Api:
    def __init__(
        self,
        pipeline: Pipeline,
        settings: ApiSettings,
        authenticator: Authenticator,
        hooks: ServerHooks,
        unix_time: Callable[[], float],
    ) -> None:
        self._pipeline, self._settings, self._auth, self._hooks = pipeline, settings, authenticator, hooks
        self._unix_time = unix_time
        self._bodies = BodyReader(settings.limits)
        self._converter = RequestConverter(settings, new_id=lambda: uuid.uuid4().hex)

    # ---- generation
    async def chat_completions(self, request: Request) -> Response:
        trace, tenant = self._enter(request, CHAT)
        with ExitStack() as stack:
            account = stack.enter_context(self._bodies.account())
            body = validate(ChatCompletionRequest, await self._json(request, account))
            call = self._converter.chat(body, tenant)
            head = self._head(body, "chatcmpl", body.n, logprobs=body.logprobs)
            writer = ChatWriter(head, _parser_factory(body), lambda: f"call_{uuid.uuid4().hex[:24]}")
            trace.num_media = len(call.media)
            generation = self._pipeline.generate(call, trace, account.settle)
            return self._respond(generation, writer, trace, body.stream, stack.pop_all())

    async def completions(self, request: Request) -> Response:
        trace, tenant = self._enter(request, COMPLETIONS)
        with ExitStack() as stack:
            account = stack.enter_context(self._bodies.account())
            body = validate(CompletionRequest, await self._json(request, account))
            calls = self._converter.completions(body, tenant)
            head = self._head(body, "cmpl", body.n * len(calls), logprobs=body.logprobs is not None)
            generation = self._generate_all(calls, trace)
            return self._respond(generation, CompletionWriter(head), trace, body.stream, stack.pop_all())

    def _generate_all(self, calls: tuple[Call, ...], trace: RequestTrace) -> AsyncGenerator[DeltaBatch, None]:
        """One prompt's deltas as they are; those of several side by side, with indices that run through all choices."""
        if len(calls) == 1:
            return self._pipeline.generate(calls[0], trace)
        traces = [trace.fork() for _ in calls]
        generations = [self._pipeline.generate(call, part) for call, part in zip(calls, traces, strict=True)]
        return _joined(merge(generations, partial(_renumber, calls[0].sampling.n)), trace, traces)

    def _respond(
        self,
        generation: AsyncGenerator[DeltaBatch, None],
        writer: AnswerWriter,
        trace: RequestTrace,
        stream: bool,
        held: ExitStack,
    ) -> Response:
        trace.stream = stream
        answer = GenerationResponse(
            generation,
            writer,
            trace,
            stream=stream,
            keep_alive_s=self._settings.keep_alive_s,
            write_timeout_s=self._settings.limits.write_timeout_s,
            on_error=lambda error: note_error(error, trace),
            on_end=held.close,
        )
        return _AsgiResponse(answer)

    def _head(self, body: Generation, prefix: str, num_choices: int, *, logprobs: bool) -> AnswerHead:
        return AnswerHead(
            id=f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            model=body.model,
            created_s=int(self._unix_time()),
            num_choices=num_choices,
            logprobs=logprobs,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )

    # ---- the other routes
    async def tokenize(self, request: Request) -> Response:
        trace, tenant = self._enter(request, TOKENIZE)
        with self._bodies.account() as account:
            data = await self._json(request, account)
            if "messages" in data:
                call = self._converter.tokenize(validate(TokenizeChatRequest, data), tenant)
            else:
                call = self._converter.tokenize(validate(TokenizeTextRequest, data), tenant)
            async with ClientConnection(request.receive) as client:
                prepared = await client.run(self._pipeline.prepare(call, trace))
        tokens = list(prepared.token_ids)
        return _json({"count": len(tokens), "max_model_len": self._settings.max_model_len, "tokens": tokens})

    async def models(self, request: Request) -> Response:
        self._enter(request, "/v1/models")
        return _json({"object": "list", "data": [self._model(name) for name in self._settings.served_model_name]})

    async def model(self, request: Request, name: str) -> Response:
        self._enter(request, "/v1/models")
        self._converter.check_model(name)
        return _json(self._model(name))

    async def health(self) -> Response:
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        await self._hooks.check_ready()
        return _json({"status": "ready"})

    async def version(self) -> Response:
        return _json({"version": self._settings.version})

    async def metrics(self) -> Response:
        return Response(await self._hooks.metrics_text(), headers={"content-type": METRICS_TYPE})

    async def metrics_targets(self) -> Response:
        return _json(await self._hooks.metrics_targets())

    async def reset_prefix_cache(self, request: Request) -> Response:
        _, tenant = self._enter(request, "/reset_prefix_cache")
        if tenant.name not in self._settings.operator_tenants:
            raise PermissionDeniedError("This key may not use the operators' routes.")
        await self._hooks.reset_prefix_cache()
        return _json({"status": "ok"})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._settings.created_s,
            "owned_by": "sightline",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._settings.max_model_len,
        }

    def _enter(self, request: Request, endpoint: str) -> tuple[RequestTrace, Tenant]:
        trace: RequestTrace = request.scope[TRACE_KEY]
        trace.begin(endpoint)
        trace.wants_timings = request.headers.get(TIMINGS_HEADER) == "1"
        tenant = self._auth.authenticate(request.headers.get("authorization"))
        trace.tenant = tenant.name
        return trace, tenant

    async def _json(self, request: Request, account: BodyAccount) -> dict[str, Any]:
        headers = request.headers
        check_content_headers(headers.get("content-type"), headers.get("content-encoding"))
        length = headers.get("content-length", "")
        content_length = int(length) if length.isdecimal() and len(length) < 20 else None
        body = await self._bodies.read(request.receive, content_length, account)
        return await parse_body(body, self._settings.limits)


class _AsgiResponse(Response):
    """Lets a handler return any ASGI callable."""

    def __init__(self, answer: GenerationResponse) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer(scope, receive, send)


async def _joined(
    merged: AsyncGenerator[DeltaBatch, None], trace: RequestTrace, parts: list[RequestTrace]
) -> AsyncGenerator[DeltaBatch, None]:
    try:
        async for batch in merged:
            yield batch
    finally:
        await merged.aclose()
        trace.join(parts)


def _renumber(choices_per_prompt: int, prompt: int, batch: DeltaBatch) -> DeltaBatch:
    first = prompt * choices_per_prompt
    return [_with_index(delta, first + delta.index) for delta in batch]


def _with_index(delta: SequenceDelta, index: int) -> SequenceDelta:
    return SequenceDelta(
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        stats=delta.stats,
        error=delta.error,
    )


def _parser_factory(body: ChatCompletionRequest) -> Callable[[], HermesToolParser] | None:
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedToolChoice):
        return partial(HermesToolParser, forced=True, forced_name=body.tool_choice.function.name)
    if body.tool_choice == "required":
        only = body.tools[0].function.name if len(body.tools) == 1 else None
        return partial(HermesToolParser, forced=True, forced_name=only)
    return HermesToolParser


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
