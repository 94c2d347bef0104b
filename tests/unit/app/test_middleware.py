"""A request that the server around the application cancels."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from app.limits import EdgeLimits
from app.middleware import EdgeMiddleware
from app.observer import NullObserver


async def test_a_cancelled_request_counts_as_one_whose_client_left(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.Event()

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        began.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "path": "/v1/chat/completions", "method": "POST", "headers": []}
    with caplog.at_level(logging.INFO, "sightline.access"):
        request = asyncio.create_task(EdgeMiddleware(hangs, EdgeLimits(), NullObserver())(scope, None, send))
        await began.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    (record,) = caplog.records
    assert record.fields["status"] == 499  # type: ignore[attr-defined]
