"""The outermost layer of the API, plain ASGI: request ids, header limits, error answers, access log, the first span.

Every exception of a request ends here, and is turned into an answer in one place.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from app.access_log import log_finished
from app.errors import HeadersTooLargeError, UrlTooLongError, answer_for, as_sightline_error
from app.exchange import Send
from app.limits import EdgeLimits
from app.observer import RequestObserver, RequestTrace
from deployments.errors import InternalError, RequestAbortedError
from deployments.tracing import W3C_FIELDS, NoTracer, Span, Tracer, request_context

logger = logging.getLogger(__name__)

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

TRACE_KEY = "sightline_trace"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_FIXED_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
]
_W3C_HEADERS = frozenset(name.encode() for name in W3C_FIELDS)
_QUIET = frozenset(("/health", "/ready", "/metrics", "/metrics/targets"))


class EdgeMiddleware:
    """Puts a RequestTrace into the scope under TRACE_KEY."""

    def __init__(
        self, app: AsgiApp, limits: EdgeLimits, observer: RequestObserver, tracer: Tracer | None = None
    ) -> None:
        self._app, self._limits, self._observer = app, limits, observer
        self._tracer, self._no_tracer = tracer or NoTracer(), NoTracer()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(self._observer, _request_id(scope))
        scope[TRACE_KEY] = trace
        is_quiet = scope["path"] in _QUIET
        tracer = self._no_tracer if is_quiet else self._tracer
        with tracer.span("request", request_context(trace.request_id, _w3c_headers(scope)), "server") as span:
            trace.context = span.context
            answer = _Answer(send, trace)
            try:
                self._check_head(scope)
                await self._app(scope, receive, answer.send)
            except asyncio.CancelledError:
                # By the server around us, which does so once the client has left.
                note_error(RequestAbortedError("The request was cancelled."), trace)
                raise
            except Exception as error:
                await self._fail(error, trace, answer)
            finally:
                trace.end()
                if not is_quiet:
                    log_finished(trace, scope["method"])
                    _note_end(span, trace)

    def _check_head(self, scope: Any) -> None:
        limits = self._limits
        url_bytes = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
        if url_bytes > limits.max_url_bytes:
            raise UrlTooLongError(f"The URL has {url_bytes} bytes, the limit is {limits.max_url_bytes}.")
        header_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if header_bytes > limits.max_header_bytes:
            raise HeadersTooLargeError(
                f"The headers have {header_bytes} bytes, the limit is {limits.max_header_bytes}."
            )

    async def _fail(self, error: Exception, trace: RequestTrace, answer: _Answer) -> None:
        note_error(error, trace)
        if answer.started:
            if not isinstance(error, RequestAbortedError):
                raise error  # Half an answer is out: only closing the connection tells the client.
            return
        made = answer_for(error)
        headers = [(b"content-type", made.media_type.encode()), (b"content-length", b"%d" % len(made.body))]
        headers += [(name.lower().encode(), value.encode()) for name, value in made.headers.items()]
        await answer.send({"type": "http.response.start", "status": made.status, "headers": headers})
        await answer.send({"type": "http.response.body", "body": made.body})


def note_error(error: BaseException, trace: RequestTrace) -> None:
    """Remember the outcome for log and metrics; log faults of ours with their cause."""
    ours = as_sightline_error(error)
    trace.status, trace.error_code = ours.status, ours.code
    if isinstance(ours, InternalError):
        fields = {"fields": {"request_id": trace.request_id}}
        logger.error("request failed: %s", ours.message, exc_info=error, extra=fields)


def _note_end(span: Span, trace: RequestTrace) -> None:
    span.name(trace.endpoint)
    span.note(
        {
            "http.route": trace.endpoint,
            "http.response.status_code": trace.status,
            "gen_ai.usage.input_tokens": trace.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": trace.usage.completion_tokens,
            **{f"sightline.{stage}_s": seconds for stage, seconds in trace.stage_seconds.items()},
        }
    )
    if trace.status >= 500:
        span.fail(trace.error_code or str(trace.status))


def _w3c_headers(scope: Any) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _W3C_HEADERS}


class _Answer:
    """Adds the fixed headers to an answer, and remembers its status."""

    def __init__(self, send: Send, trace: RequestTrace) -> None:
        self._send, self._trace = send, trace
        self.started = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if not self._trace.status:
                self._trace.status = message["status"]
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            headers += [header for header in _FIXED_HEADERS if header[0] not in names]
            headers.append((b"x-request-id", self._trace.request_id.encode()))
            message = {**message, "headers": headers}
        await self._send(message)


def _request_id(scope: Any) -> str:
    """The caller's id if it is harmless in logs and headers, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return f"req-{uuid.uuid4().hex}"
