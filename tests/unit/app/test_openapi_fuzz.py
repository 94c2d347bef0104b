"""Requests generated from our own description of the API: whatever it allows or forbids, no answer is a 500.

The stages are scripted; what is tried here is routing, bodies, schema and conversion.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.contract.test_http_api import Server

schemathesis = pytest.importorskip("schemathesis")


def test_no_fault_of_ours() -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", Server().app)
    statuses: Counter[tuple[str, int]] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=15,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def call(case: Any) -> None:
            answer = case.call()
            assert answer.status_code < 500, answer.text
            statuses[case.path, answer.status_code] += 1

        call()
    assert len({path for path, _ in statuses}) == len(schema)
    assert sum(count for (path, _), count in statuses.items() if path == "/v1/chat/completions") >= 10
