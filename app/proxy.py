"""Around Serve's own HTTP proxies: what clients see when an ingress replica, or its whole node, is lost.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.proxy:middlewares     in the environment of every node

A proxy alone answers with a bare 500 if the replica dies before its answer has begun, and just ends the connection
afterwards. With this middleware the first is tried again at another replica, and the second ends with the error event
`replica_lost`. What Serve itself refuses gets OpenAI's form of an error as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.middleware import Middleware

from app.errors import answer_for
from app.openai_stream import error_events
from deployments.errors import (
    DeadlineError,
    InternalError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    RateLimitError,
    ReplicaLostError,
    SightlineError,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

REQUEST_ID, RETRY_AFTER = b"x-request-id", b"retry-after"
SERVE_PATHS = "/-/"
"""Serve's own routes (health, routes), which load balancers read."""
ROUTES = "/-/routes"


def middlewares() -> list[Middleware]:
    """What Serve asks the import path for."""
    return [Middleware(LostReplicaMiddleware)]


class LostReplicaMiddleware:
    """Pure ASGI, one per proxy.

    Args:
        max_attempts: Tries of a request whose replica was lost before its answer began.
        max_replay_bytes: Bodies held at once for another try, each until its answer begins. A request that finds no
            room is tried once.
    """

    def __init__(self, app: App, *, max_attempts: int = 3, max_replay_bytes: int = 256 << 20) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}; allowed: 1 or more")
        self._app, self._max_attempts = app, max_attempts
        self._budget = _Budget(max_replay_bytes)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(SERVE_PATHS):
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(REQUEST_ID) or uuid.uuid4().hex.encode()
        others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID]
        body = _Body(receive, self._budget)
        answer = _Answer(send, request_id, on_start=body.release)
        try:
            for attempt in range(1, self._max_attempts + 1):
                # One id over all attempts; the proxy would make up another each time.
                headers = [*others, (REQUEST_ID, request_id)]
                await self._app({**scope, "headers": headers}, body.receive, answer.send)
                if answer.is_unknown_path:
                    await answer.end_unserved(serves_others=await self._has_routes(scope))
                if answer.has_ended or body.client_left:
                    return
                if answer.has_started or attempt == self._max_attempts or not body.can_replay():
                    break
        finally:
            body.release()
        await answer.end_as_lost()

    async def _has_routes(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether the proxy knows of any application; there is none before the first start and in a shutdown."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app({**scope, "method": "GET", "path": ROUTES, "raw_path": ROUTES.encode()}, receive, send)
        body = b"".join(message.get("body", b"") for message in messages).strip()
        return bool(messages) and messages[0].get("status") == 200 and body != b"{}"


class _Budget:
    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes


class _Body:
    """A request's messages, kept so that they can be received again."""

    def __init__(self, receive: Receive, budget: _Budget) -> None:
        self._receive, self._budget = receive, budget
        self._kept: list[Message] = []
        self._kept_bytes = 0
        self._position = 0
        self._keeps = True
        self.client_left = False

    async def receive(self) -> Message:
        if self._position < len(self._kept):
            message = self._kept[self._position]
        else:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_left = True
                return message
            self._keep(message)
        self._position += 1
        return message

    def can_replay(self) -> bool:
        """Start again from the first message; False if it is gone."""
        self._position = 0
        return self._keeps

    def release(self) -> None:
        self._keeps = False
        self._kept.clear()
        self._budget.free_bytes += self._kept_bytes
        self._kept_bytes = 0

    def _keep(self, message: Message) -> None:
        if not self._keeps:
            return
        size_bytes = len(message.get("body", b""))
        if size_bytes > self._budget.free_bytes:
            self.release()
            return
        self._kept.append(message)
        self._kept_bytes += size_bytes
        self._budget.free_bytes -= size_bytes


class _Answer:
    """What goes out to the client, and how far it has got."""

    def __init__(self, send: Send, request_id: bytes, on_start: Callable[[], None]) -> None:
        self._send, self._request_id, self._on_start = send, request_id, on_start
        self._refusal: Message | None = None
        """Start of an answer by Serve itself; its text stays here."""
        self._is_stream = False
        self.has_started = False
        self.has_ended = False
        self.is_unknown_path = False
        """Serve knows no application for the path; what to say of that is `end_unserved`'s business."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if message["status"] >= 400 and headers.get(b"content-type", b"").startswith(b"text/plain"):
                self._refusal = message
                return
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self._start()
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            if self._refusal is not None and self._refusal["status"] == 404:
                self.is_unknown_path = True
                return
            self.has_ended = True
            if self._refusal is not None:
                await self._refuse(_as_ours(self._refusal["status"]), dict(self._refusal["headers"]))
                return
        elif self._refusal is not None:
            return
        await self._send(message)

    async def end_unserved(self, serves_others: bool) -> None:
        """The end of a request for a path that no application has."""
        assert self._refusal is not None
        error: SightlineError = NotFoundError("No application serves this path.", code="unknown_route")
        if not serves_others:
            message = "No application runs right now: the server is starting or shutting down."
            error = NotReadyError(message, code="unavailable", retry_after_s=1)
        await self._refuse(error, dict(self._refusal["headers"]))

    async def end_as_lost(self) -> None:
        """The end of an answer whose replica is gone. One that has begun and is no stream is left cut off."""
        if not self.has_started:
            message = "The server lost the replica that worked on this request; ask again."
            await self._refuse(OverloadedError(message, code="unavailable", retry_after_s=1), {})
        elif self._is_stream:
            self.has_ended = True
            events = error_events(ReplicaLostError("the ingress replica is gone"))
            await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _start(self) -> None:
        self.has_started = True
        self._on_start()

    async def _refuse(self, error: SightlineError, headers: Mapping[bytes, bytes]) -> None:
        self._start()
        self.has_ended = True
        made = answer_for(error)
        listed = [
            (b"content-type", made.media_type.encode()),
            (b"content-length", b"%d" % len(made.body)),
            (REQUEST_ID, self._request_id),
        ]
        retry_after = headers.get(RETRY_AFTER) or made.headers.get("Retry-After", "").encode()
        if retry_after:
            listed.append((RETRY_AFTER, retry_after))
        await self._send({"type": "http.response.start", "status": made.status, "headers": listed})
        await self._send({"type": "http.response.body", "body": made.body, "more_body": False})


def _as_ours(status: int) -> SightlineError:
    """What Serve itself answers with this status, in our words."""
    if status == 408:
        return DeadlineError("The request was not finished within the proxy's time limit.")
    if status == 429:
        return RateLimitError("The server's queue is full.", code="queue_full")
    if status == 503:
        return OverloadedError("No replica can take the request right now.", code="unavailable")
    return InternalError(f"the proxy answered {status}")
