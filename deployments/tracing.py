"""Spans of a request on its way through the stages. The only file that knows OpenTelemetry, an optional library.

A request's context is a small mapping that travels in the messages: its id for logs, and, where spans are made, the W3C
trace context of the span to hang the next one under. Spans are never ambient: who makes one names its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from deployments.errors import SightlineError
from deployments.telemetry_config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

REQUEST_ID = "x-request-id"
W3C_FIELDS = ("traceparent", "tracestate")
MAX_TRACESTATE_BYTES = 512
"""What W3C asks to be kept; a longer one is dropped, since it would travel with every message."""

Context = Mapping[str, str]
"""Keys: `x-request-id`, and `traceparent` and `tracestate` if the request is traced."""
Kind = Literal["server", "internal"]
Value = str | bool | int | float


class Span(Protocol):
    @property
    def context(self) -> Context:
        """For the messages of this span's children."""

    def name(self, name: str) -> None:
        """A better name than the one it began with."""

    def note(self, fields: Mapping[str, Value]) -> None:
        """Attributes by their names in OpenTelemetry."""

    def fail(self, what: str) -> None:
        """The work failed through a fault of ours; `what` is an error code, never a payload."""


class Tracer(Protocol):
    def span(self, name: str, context: Context, kind: Kind = "internal") -> AbstractContextManager[Span]:
        """A span under the context's one for as long as the block runs. An error in it marks the span."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True)
class NoSpan:
    """The request's context as it came, without what nobody will read."""

    context: Context

    def name(self, name: str) -> None: ...

    def note(self, fields: Mapping[str, Value]) -> None: ...

    def fail(self, what: str) -> None: ...


class NoTracer:
    """Makes no spans."""

    @contextmanager
    def span(self, name: str, context: Context, kind: Kind = "internal") -> Iterator[Span]:
        yield NoSpan({key: value for key, value in context.items() if key not in W3C_FIELDS})

    def close(self) -> None: ...


class OpenTelemetryTracer:
    """Spans of one provider, which nobody else uses: libraries' own instrumentation stays out of it."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("sightline")
        self._w3c = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, context: Context, kind: Kind = "internal") -> Iterator[Span]:
        from opentelemetry.context import Context as OtelContext
        from opentelemetry.trace import SpanKind, set_span_in_context

        # From an empty context, not the ambient one: a broken or missing `traceparent` begins a trace.
        parent = self._w3c.extract(dict(context), context=OtelContext())
        span = self._tracer.start_span(name, parent, SpanKind.SERVER if kind == "server" else SpanKind.INTERNAL)
        carrier: dict[str, str] = {}
        self._w3c.inject(carrier, set_span_in_context(span, OtelContext()))
        made = _OpenTelemetrySpan(span, {**{k: v for k, v in context.items() if k not in W3C_FIELDS}, **carrier})
        if REQUEST_ID in context:
            made.note({"sightline.request_id": context[REQUEST_ID]})
        try:
            yield made
        except SightlineError as error:
            made.note({"error.type": error.code})
            if error.status >= 500:
                made.fail(error.code)
            raise
        except Exception as error:
            made.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def close(self) -> None:
        self._provider.shutdown()


class _OpenTelemetrySpan:
    def __init__(self, span: OtelSpan, context: Context) -> None:
        self._span, self.context = span, context

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def note(self, fields: Mapping[str, Value]) -> None:
        self._span.set_attributes(fields)

    def fail(self, what: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, what)


def request_context(request_id: str, headers: Mapping[str, str]) -> Context:
    """A new request's context from its id and the W3C headers that the client sent."""
    context = {REQUEST_ID: request_id}
    for name in W3C_FIELDS:
        value = headers.get(name, "")
        if value and len(value) <= MAX_TRACESTATE_BYTES:
            context[name] = value
    return context


def check_tracing(config: TelemetryConfig) -> None:
    """Raise ValueError if spans are asked for and cannot be made here."""
    if config.otlp_traces_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"telemetry.otlp_traces_endpoint is {config.otlp_traces_endpoint!r}, but {error.name} is not installed; "
            "install sightline[otel], or leave the option out"
        ) from None


def open_tracer(config: TelemetryConfig, deployment: str, replica: str) -> Tracer:
    """Sends spans in batches from a thread of its own; a collector that is slow or down costs spans, never requests."""
    if config.otlp_traces_endpoint is None:
        return NoTracer()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.trace_sample_ratio)),
        resource=Resource.create(
            {"service.name": "sightline", "service.instance.id": replica, "sightline.deployment": deployment}
        ),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.otlp_traces_endpoint)))
    return OpenTelemetryTracer(provider)
