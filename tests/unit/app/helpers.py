"""Small makers shared by the tests of the HTTP edge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.admission import Admission, AdmissionConfig
from app.observer import NullObserver, RequestTrace
from app.pipeline import Call, Pipeline
from app.settings import ApiSettings
from cache_service.tenants import OpenTenant, Tenant
from deployments.messages import ChatPrompt, SamplingParams
from tests.fakes import FakeEngine, FakePreprocessor

MODEL = "tiny-vl"


def make_settings(**options: Any) -> ApiSettings:
    return ApiSettings(**{"served_model_name": (MODEL,), "max_model_len": 64, "vocab_size": 1000, **options})


def make_pipeline(
    preprocessor: FakePreprocessor | None = None,
    engine: FakeEngine | None = None,
    admission: AdmissionConfig | None = None,
    **options: Any,
) -> Pipeline:
    return Pipeline(
        preprocessor or FakePreprocessor(),
        engine or FakeEngine(),
        Admission(admission or AdmissionConfig()),
        **{"max_model_len": 64, "request_timeout_s": 30.0, **options},
    )


def make_call(tenant: Tenant | None = None, **options: Any) -> Call:
    sampling = options.pop("sampling", None) or SamplingParams(max_tokens=8)
    return Call(
        **{
            "engine_id": "r1",
            "prompt": ChatPrompt(messages=({"role": "user", "content": "hi"},)),
            "prompt_param": "messages",
            "sampling": sampling,
            "max_tokens_param": "max_tokens",
            "tenant": tenant or OpenTenant(),
            **options,
        }
    )


def make_trace() -> RequestTrace:
    return RequestTrace(NullObserver(), "req-1")


async def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until the condition holds; TimeoutError if it never does."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)
