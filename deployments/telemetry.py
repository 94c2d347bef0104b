"""What every replica tells about itself, in one object: metrics, a JSON log, spans. Knows Serve's replica context."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve

from deployments.errors import SightlineError
from deployments.metrics import Read, ReplicaMetrics, render
from deployments.metrics_server import MetricsServer
from deployments.replica_log import install_json_log, quiet_callers_faults
from deployments.telemetry_config import TelemetryConfig
from deployments.tracing import REQUEST_ID, Context, Span, open_tracer

logger = logging.getLogger("sightline.stage")


@dataclass(slots=True)
class StageRecord:
    """What one request's work in a replica was, filled while it goes on."""

    span: Span
    fields: dict[str, int | str] = field(default_factory=dict)
    """Small numbers and words, never payloads."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)


class ReplicaTelemetry:
    """Args:
    read: Counters and gauges that a core keeps as data.
    refresh: Awaited before each reading of the metrics.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        read: Read | None = None,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        context = serve.get_replica_context()
        deployment, replica = context.deployment, context.replica_id.unique_id
        quiet_callers_faults()
        install_json_log(config.log_level, {"deployment": deployment, "replica": replica})
        self.metrics = ReplicaMetrics(deployment, replica, read)
        self.tracer = open_tracer(config, deployment, replica)
        self._labels = {"deployment": deployment, "replica": replica}
        self._refresh = refresh
        self._server = MetricsServer(ray.util.get_node_ip_address(), self._page) if config.scrape_replicas else None

    async def collect(self) -> list[Metric]:
        """Every family of this replica now."""
        if self._refresh is not None:
            await self._refresh()
        return self.metrics.collect()

    async def target(self) -> dict[str, Any] | None:
        """Where Prometheus can scrape this replica, in the form of its HTTP discovery; None if it cannot."""
        if self._server is None:
            return None
        return {"targets": [await self._server.address()], "labels": self._labels}

    @contextmanager
    def stage(self, name: str, context: Context) -> Iterator[StageRecord]:
        """One request's work in this replica: a span, and a line of the log at DEBUG."""
        began_s = time.perf_counter()
        outcome = "ok"
        with self.tracer.span(name, context) as span:
            record = StageRecord(span)
            try:
                yield record
            except (GeneratorExit, asyncio.CancelledError):
                outcome = "cancelled"
                raise
            except Exception as error:
                outcome = error.code if isinstance(error, SightlineError) else type(error).__name__
                raise
            finally:
                self._end(name, context, record, outcome, time.perf_counter() - began_s)

    def _end(self, name: str, context: Context, record: StageRecord, outcome: str, seconds: float) -> None:
        attributes: dict[str, Any] = {f"sightline.{key}": value for key, value in record.fields.items()}
        attributes |= {f"sightline.{stage}_s": value for stage, value in record.stage_seconds.items()}
        record.span.note(attributes)
        if logger.isEnabledFor(logging.DEBUG):
            fields = {
                "request_id": context.get(REQUEST_ID, ""),
                "outcome": outcome,
                "seconds": round(seconds, 6),
                **record.fields,
                "stage_seconds": {stage: round(value, 6) for stage, value in record.stage_seconds.items()},
            }
            logger.debug("%s", name, extra={"fields": fields})

    async def _page(self) -> bytes:
        return render([await self.collect()])
