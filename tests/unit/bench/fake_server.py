"""An OpenAI-compatible server without a model, in a thread of its own: streams words, or fails as it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import orjson
from aiohttp import web

Behaviour = Literal["answer", "refuse", "break", "cut", "error", "unfinished", "silent", "hang"]
MODEL = "fake-vl"


class FakeServer:
    """Args:
    behaviour: Of the n-th chat request.
    pause_s: Before the first token.
    with_metrics: Whether /metrics shows stages as ours does.
    """

    def __init__(
        self,
        behaviour: Callable[[int], Behaviour] = lambda number: "answer",
        *,
        pause_s: float = 0.0,
        with_metrics: bool = True,
    ) -> None:
        self._behaviour, self._pause_s, self._with_metrics = behaviour, pause_s, with_metrics
        self.bodies: list[bytes] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_in_flight = self._in_flight = 0
        self._stage_s = {"receive": 0.0, "prefill": 0.0, "generation": 0.0}
        self._answered = self._finished = self._refused = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self.url = ""

    def __enter__(self) -> FakeServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        if self._with_metrics:
            app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        first_s = self._stage_s["receive"] + self._stage_s["prefill"]
        lines = [
            f'sightline_requests_total{{endpoint="/v1/chat/completions",status="200"}} {self._finished}',
            f'sightline_requests_total{{endpoint="/v1/chat/completions",status="429"}} {self._refused}',
            f"sightline_time_to_first_token_seconds_sum {first_s}",
            f"sightline_time_to_first_token_seconds_count {self._answered}",
            *(f'sightline_request_stage_seconds_sum{{stage="{stage}"}} {s}' for stage, s in self._stage_s.items()),
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.perf_counter()
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            body = await request.read()
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            return await self._answer(request, orjson.loads(body), self._behaviour(number), arrived_s)
        finally:
            self._in_flight -= 1

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], behaviour: Behaviour, arrived_s: float
    ) -> web.StreamResponse:
        received_s = time.perf_counter()
        if behaviour == "refuse":
            self._refused += 1
            error = {"message": "try later", "type": "rate_limit_error", "code": "rate_limited", "param": None}
            return web.json_response({"error": error}, status=429)
        if behaviour == "break":
            return web.Response(text="<html>bad gateway</html>", status=502)
        if behaviour == "hang":
            await asyncio.sleep(3600)
        await asyncio.sleep(self._pause_s)
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        first_s = time.perf_counter()
        self._answered += 1
        num_tokens = 0 if behaviour == "silent" else asked["max_tokens"]
        await stream.write(event({"role": "assistant", "content": ""}))
        for index in range(num_tokens):
            if index == num_tokens // 2 and behaviour in ("cut", "error"):
                if behaviour == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                else:
                    await stream.write(b'data: {"error": {"message": "it is gone", "code": "replica_lost"}}\n\n')
                return stream
            await stream.write(event({"content": f"t{index} "}))
        if behaviour == "unfinished":
            return stream
        usage = {"prompt_tokens": 17, "completion_tokens": num_tokens}
        await stream.write(event({}, finish_reason="length"))
        self._stage_s["receive"] += received_s - arrived_s
        self._stage_s["prefill"] += first_s - received_s
        self._stage_s["generation"] += time.perf_counter() - first_s
        self._finished += 1
        await stream.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n")
        return stream


def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
