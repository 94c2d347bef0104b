"""Options of what the application tells about itself: logs, traces, and where metrics can be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """The same for every replica of every deployment."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    log_level: LogLevel = "INFO"
    """Least level of the JSON log. INFO: one line a finished request; DEBUG: also one for each stage of it."""
    vllm_metric_names: bool = False
    """Show series on GET /metrics under vLLM's names too, where the meaning is equal."""
    scrape_replicas: bool = False
    """Each replica also serves its own page on a free port of its node, listed by GET /metrics/targets. The port asks
    for no key: let only Prometheus reach it."""
    otlp_traces_endpoint: str | None = None
    """URL to which spans are sent (OTLP over HTTP), such as http://collector:4318/v1/traces; None makes no spans."""
    trace_sample_ratio: float = 1.0
    """Share of requests that are traced where the client sends no `traceparent`; with one, its own flag decides."""

    def __post_init__(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_traces_endpoint is {endpoint!r}; allowed: an http:// or https:// URL")
        if not 0 <= self.trace_sample_ratio <= 1:
            raise ValueError(f"trace_sample_ratio is {self.trace_sample_ratio!r}; allowed: 0 to 1")
