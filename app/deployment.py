"""The Serve shim around the HTTP API. Adds to app/ingress.py: handles as ports, metrics, readiness."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.admission import Admission, AdmissionConfig
from app.auth import Authenticator
from app.ingress import CHAT, COMPLETIONS, ServerHooks, create_app
from app.observer import Usage
from app.pipeline import Pipeline
from app.replicas import Replicas
from app.settings import ApiSettings
from cache_service.tenant_file import load_tenants
from deployments.handles import EngineHandle, PreprocessorHandle
from deployments.metrics import ReplicaMetrics, Sample
from deployments.telemetry import ReplicaTelemetry
from deployments.telemetry_config import TelemetryConfig

logger = logging.getLogger("sightline")

ENDPOINTS = (CHAT, COMPLETIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressOptions:
    settings: ApiSettings
    admission: AdmissionConfig
    api_keys_file: str | None
    status_page: bool
    telemetry: TelemetryConfig


class Ingress:
    """HTTP in, ports out. One admission queue, one set of tenants and one pipeline per replica."""

    def __init__(
        self,
        options: IngressOptions,
        preprocessor: DeploymentHandle,
        engine: DeploymentHandle,
        others: Mapping[str, DeploymentHandle],
    ) -> None:
        context = serve.get_replica_context()
        self._telemetry = ReplicaTelemetry(options.telemetry, self._samples)
        tenants = load_tenants(options.api_keys_file, os.environ)
        if tenants.is_open:
            logger.warning("no API keys are configured: the server is open to everyone who can reach it")
        self._admission = Admission(options.admission)
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        settings = options.settings
        self._replicas = replicas = Replicas(
            {context.deployment: own, "Preprocessor": preprocessor, "LMEngine": engine, **others},
            settings.model if options.telemetry.vllm_metric_names else None,
        )
        pipeline = Pipeline(
            PreprocessorHandle(preprocessor),
            EngineHandle(engine),
            self._admission,
            max_model_len=settings.max_model_len,
            request_timeout_s=settings.request_timeout_s,
        )
        hooks = ServerHooks(
            check_ready=self._check_ready,
            metrics_text=replicas.metrics_text,
            metrics_targets=replicas.metrics_targets,
            reset_prefix_cache=replicas.reset_prefix_cache,
        )
        observer = PrometheusObserver(self._telemetry.metrics, frozenset(tenant.name for tenant in tenants.tenants))
        self._app = create_app(
            pipeline, settings, Authenticator(tenants), hooks, observer, tracer=self._telemetry.tracer
        )
        if options.status_page:
            from app.status_page import status_router

            self._app.include_router(status_router())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def ready(self) -> None:
        """Answering is being ready."""

    async def set_draining(self, draining: bool) -> int:
        """Refuse new requests, or take them again; returns the number of those under way here."""
        self._admission.is_closed = draining
        return self._admission.in_flight

    async def metrics(self) -> list[Metric]:
        return await self._telemetry.collect()

    async def metrics_target(self) -> dict[str, Any] | None:
        return await self._telemetry.target()

    async def _check_ready(self) -> None:
        self._admission.check_open()
        await self._replicas.check_ready()

    def _samples(self) -> list[Sample]:
        stats = self._admission.stats
        refused = {
            "rate": stats.refused_rate,
            "tenant": stats.refused_tenant,
            "queue": stats.refused_full,
            "queue_wait": stats.refused_waited,
        }
        return [
            ("requests_in_flight", ("running",), stats.running),
            ("requests_in_flight", ("queued",), stats.queued),
            *(("budget_rejections_total", (budget, "rejected"), count) for budget, count in refused.items()),
        ]


class PrometheusObserver:
    """app.observer.RequestObserver over the ingress replica's registry.

    Args:
        tenants: Names that may label series; whoever else calls is `other`.
    """

    def __init__(self, metrics: ReplicaMetrics, tenants: frozenset[str] = frozenset()) -> None:
        self._tenants = tenants
        self._tenant_requests = metrics.counter("tenant_requests_total")
        self._tenant_tokens = metrics.counter("tenant_tokens_total")
        self._requests = metrics.counter("requests_total")
        self._seconds = metrics.histogram("request_seconds")
        self._first_token = metrics.histogram("time_to_first_token_seconds")
        self._inter_token = metrics.histogram("inter_token_seconds")
        for endpoint in ENDPOINTS:
            # A first event shows as an increase only if there was a zero before.
            for status in ("200", "400", "429", "499", "500", "503"):
                self._requests.labels(endpoint, status)
        self._stages = metrics.histogram("request_stage_seconds")

    def started(self, endpoint: str) -> None:
        pass

    def first_token(self, endpoint: str, seconds: float) -> None:
        self._first_token.labels(endpoint).observe(seconds)

    def token_gap(self, endpoint: str, seconds: float, num_tokens: int) -> None:
        if num_tokens:
            self._inter_token.labels(endpoint).observe(seconds / num_tokens)

    def finished(
        self,
        endpoint: str,
        status: int,
        seconds: float,
        stage_seconds: Mapping[str, float],
        usage: Usage,
        tenant: str = "",
    ) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)
        for stage, value in stage_seconds.items():
            self._stages.labels(stage).observe(value)
        name = tenant if tenant in self._tenants else "other"
        self._tenant_requests.labels(name, str(status)).inc()
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.image_tokens, usage.completion_tokens)
        for kind, count in zip(("prompt", "cached", "image", "generated"), counts, strict=True):
            self._tenant_tokens.labels(name, kind).inc(count)
