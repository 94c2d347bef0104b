"""Spans of the ingress and the stages, kept in memory."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import httpx
import pytest

from app.auth import Authenticator
from app.ingress import CHAT, ServerHooks, create_app
from cache_service.tenants import TenantRegistry
from deployments.errors import InternalError, InvalidRequestError
from deployments.telemetry_config import TelemetryConfig
from deployments.tracing import (
    REQUEST_ID,
    NoTracer,
    OpenTelemetryTracer,
    check_tracing,
    open_tracer,
    request_context,
)
from tests.fakes import FakeEngine, FakePreprocessor
from tests.unit.app.helpers import MODEL, make_pipeline, make_settings

sdk = pytest.importorskip("opentelemetry.sdk.trace")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
W3C = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Traced:
    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor

        self._exporter = in_memory.InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = OpenTelemetryTracer(provider)

    @property
    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def traced() -> Traced:
    return Traced()


def hex_ids(span: Any) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def test_a_stage_s_span_hangs_under_the_one_its_message_names(traced: Traced) -> None:
    with traced.tracer.span("outer", request_context("req-1", W3C), "server") as outer:
        message = dict(outer.context)  # what crosses to another process
    with traced.tracer.span("inner", message) as inner:
        inner.note({"sightline.items": 2})
    spans = traced.spans
    assert message[REQUEST_ID] == "req-1"
    assert message["tracestate"] == "vendor=1"
    assert hex_ids(spans["outer"])[0] == hex_ids(spans["inner"])[0] == TRACE
    assert f"{spans['outer'].parent.span_id:016x}" == PARENT
    assert spans["inner"].parent.span_id == spans["outer"].context.span_id
    assert spans["inner"].attributes == {"sightline.request_id": "req-1", "sightline.items": 2}


def test_a_callers_fault_is_noted_and_a_fault_of_ours_marks_the_span(traced: Traced) -> None:
    for name, error in (("theirs", InvalidRequestError("no", code="bad")), ("ours", InternalError("broken"))):
        with pytest.raises(type(error)), traced.tracer.span(name, {}):
            raise error
    with pytest.raises(ValueError), traced.tracer.span("bug", {}):
        raise ValueError("a secret")
    spans = traced.spans
    assert {name: span.status.is_ok for name, span in spans.items()} == {"theirs": True, "ours": False, "bug": False}
    assert spans["theirs"].attributes["error.type"] == "bad"
    assert spans["bug"].status.description == "ValueError"
    assert not any(span.events for span in spans.values())


@pytest.mark.parametrize("sent", [{}, {"traceparent": "broken"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}])
def test_without_a_usable_context_a_trace_begins(traced: Traced, sent: dict[str, str]) -> None:
    with traced.tracer.span("first", request_context("req-1", sent)):
        pass
    assert traced.spans["first"].parent is None


def test_a_tracestate_that_is_too_long_does_not_travel() -> None:
    context = request_context("req-1", {**W3C, "tracestate": "v=" + "x" * 512})
    assert context == {REQUEST_ID: "req-1", "traceparent": W3C["traceparent"]}


def test_without_a_tracer_only_the_request_id_travels() -> None:
    with NoTracer().span("x", request_context("req-1", W3C)) as span:
        assert span.context == {REQUEST_ID: "req-1"}


async def _nothing() -> None:
    return None


def make_app(preprocessor: FakePreprocessor, engine: FakeEngine, traced: Traced) -> Any:
    async def page() -> bytes:
        return b""

    async def targets() -> list[Any]:
        return []

    hooks = ServerHooks(check_ready=_nothing, metrics_text=page, metrics_targets=targets, reset_prefix_cache=_nothing)
    pipeline = make_pipeline(preprocessor, engine)
    return create_app(pipeline, make_settings(), Authenticator(TenantRegistry()), hooks, tracer=traced.tracer)


async def ask(app: Any, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.get("/health")
        return await client.post(CHAT, json=body, headers=headers)


async def test_the_ingress_spans_a_request_and_passes_its_context_to_every_stage(traced: Traced) -> None:
    preprocessor, engine = FakePreprocessor(), FakeEngine()
    answer = await ask(make_app(preprocessor, engine, traced), **W3C, **{"x-request-id": "mine"})
    assert answer.status_code == 200
    spans = traced.spans
    assert set(spans) == {CHAT}  # not /health
    span = spans[CHAT]
    trace_id, span_id = hex_ids(span)
    assert (trace_id, f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.attributes["sightline.request_id"] == "mine"
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    (prepare,), (generate,) = preprocessor.requests, engine.requests.values()
    assert prepare.trace_context == generate.trace_context
    assert prepare.trace_context["traceparent"] == f"00-{TRACE}-{span_id}-01"
    assert prepare.trace_context[REQUEST_ID] == "mine"


async def test_a_failed_request_marks_the_span(traced: Traced) -> None:
    preprocessor = FakePreprocessor()
    preprocessor.error = InternalError("broken")
    assert (await ask(make_app(preprocessor, FakeEngine(), traced))).status_code == 500
    assert not traced.spans[CHAT].status.is_ok


# ---- options
def test_no_endpoint_makes_no_spans() -> None:
    assert isinstance(open_tracer(TelemetryConfig(), "Ingress", "r1"), NoTracer)
    check_tracing(TelemetryConfig())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"otlp_traces_endpoint": "collector:4318"}, "collector:4318"),
        ({"trace_sample_ratio": 1.5}, "trace_sample_ratio is 1.5; allowed: 0 to 1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TelemetryConfig(**options)


def test_a_missing_library_is_said_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    original = builtins.__import__

    def without_exporter(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError("no", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_exporter)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint .* install sightline\[otel\]"):
        check_tracing(TelemetryConfig(otlp_traces_endpoint="http://collector:4318/v1/traces"))
