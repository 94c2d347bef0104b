"""The middleware around Serve's proxies, over a proxy that loses its replicas as the real one does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from app.proxy import LostReplicaMiddleware, Message, Receive, Send, middlewares

PIECES = (b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")


class Proxy:
    """Serve's proxy: attempt i of a request sees the i-th fate. `after` n: its replica dies after n pieces of the
    answer; None: it lives."""

    def __init__(self, *fates: int | None, content_type: bytes = b"text/event-stream") -> None:
        self._fates, self._content_type = fates, content_type
        self.bodies: list[bytes] = []
        self.request_ids: list[bytes] = []

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        after = self._fates[len(self.bodies)]
        self.request_ids.append(dict(scope["headers"])[b"x-request-id"])
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        if after == 0:
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self._content_type)]})
        for i, piece in enumerate(PIECES[:after]):
            await send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(PIECES)})


class Client:
    def __init__(self, *chunks: bytes, headers: Iterable[tuple[bytes, bytes]] = (), leaves: bool = False) -> None:
        self._messages: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks) or leaves}
            for i, chunk in enumerate(chunks)
        ]
        self._headers = list(headers)
        self.status, self.headers, self.body, self.ended = 0, dict[bytes, bytes](), b"", False

    async def ask(self, app: LostReplicaMiddleware, path: str = "/v1/chat/completions") -> Client:
        await app({"type": "http", "method": "POST", "path": path, "headers": self._headers}, self._receive, self._send)
        return self

    async def _receive(self) -> Message:
        return self._messages.pop(0) if self._messages else {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        assert not self.ended
        if message["type"] == "http.response.start":
            assert not self.status
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body", False)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


async def test_an_answer_passes_untouched() -> None:
    proxy = Proxy(None)
    client = await Client(b"ab", b"cd").ask(LostReplicaMiddleware(proxy))
    assert (client.status, client.body, client.ended) == (200, b"".join(PIECES), True)
    assert proxy.bodies == [b"abcd"]


async def test_a_request_whose_answer_has_not_begun_is_tried_elsewhere_with_its_whole_body_and_one_id() -> None:
    proxy = Proxy(0, 0, None)
    client = await Client(b"ab", b"", b"cd").ask(LostReplicaMiddleware(proxy))
    assert (client.status, client.body) == (200, b"".join(PIECES))
    assert proxy.bodies == [b"abcd"] * 3
    assert len(set(proxy.request_ids)) == 1


async def test_a_request_that_kills_every_replica_is_tried_a_bounded_number_of_times() -> None:
    proxy = Proxy(*[0] * 9)
    client = await Client(b"poison", headers=[(b"x-request-id", b"mine")]).ask(LostReplicaMiddleware(proxy))
    assert len(proxy.bodies) == 3
    assert (client.status, client.error["code"], client.headers[b"retry-after"]) == (503, "unavailable", b"1")
    assert proxy.request_ids == [b"mine"] * 3
    assert client.headers[b"x-request-id"] == b"mine"


async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    proxy = Proxy(1, None)
    client = await Client(b"ab").ask(LostReplicaMiddleware(proxy))
    assert client.ended
    assert client.body.startswith(PIECES[0])
    event, done = client.body.removeprefix(PIECES[0]).decode().split("\n\n")[:2]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert done == "data: [DONE]"
    assert len(proxy.bodies) == 1


async def test_an_answer_that_is_no_stream_is_cut_off_and_never_completed_by_an_error() -> None:
    proxy = Proxy(1, None, content_type=b"application/json")
    client = await Client(b"ab").ask(LostReplicaMiddleware(proxy))
    assert (client.body, client.ended) == (PIECES[0], False)


async def test_a_client_that_has_left_is_not_answered() -> None:
    client = await Client(b"ab", leaves=True).ask(LostReplicaMiddleware(Proxy(None)))
    assert client.status == 0


async def test_bodies_beyond_the_budget_are_tried_once_and_the_budget_comes_back() -> None:
    proxy = Proxy(0, 0, None)
    app = LostReplicaMiddleware(proxy, max_replay_bytes=4)
    client = await Client(b"abc", b"de").ask(app)
    assert (client.status, proxy.bodies) == (503, [b"abcde"])
    client = await Client(b"ab", b"cd").ask(app)
    assert (client.status, proxy.bodies[1:]) == (200, [b"abcd"] * 2)


@pytest.mark.parametrize(
    ("status", "ours", "code"),
    [
        (408, 504, "deadline_exceeded"),
        (429, 429, "queue_full"),
        (500, 500, "internal_error"),
        (503, 503, "unavailable"),
    ],
)
async def test_what_serve_itself_refuses_has_openais_form(status: int, ours: int, code: str) -> None:
    async def refuse(scope: Any, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"6"), (b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"secr", "more_body": True})
        await send({"type": "http.response.body", "body": b"et", "more_body": False})

    client = await Client(b"ab").ask(LostReplicaMiddleware(refuse))
    assert (client.status, client.error["code"], client.ended) == (ours, code, True)
    assert client.headers[b"retry-after"] == b"7"
    assert b"secret" not in client.body


@pytest.mark.parametrize(
    ("routes_status", "routes", "status", "code"),
    [
        (200, b'{"/other":"other"}', 404, "unknown_route"),
        (200, b"{}", 503, "unavailable"),  # Serve after the last application was deleted
        (503, b"Route table is not populated yet.", 503, "unavailable"),
    ],
)
async def test_a_path_without_an_application_is_unknown_only_where_there_are_applications(
    routes_status: int, routes: bytes, status: int, code: str
) -> None:
    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        asks_routes = (scope["method"], scope["path"]) == ("GET", "/-/routes")
        answer, body = (routes_status, routes) if asks_routes else (404, b"Path '/v1/x' not found.")
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": answer, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    client = await Client(b"ab").ask(LostReplicaMiddleware(serve))
    assert (client.status, client.error["code"], client.ended) == (status, code, True)
    assert (b"retry-after" in client.headers) == (status == 503)


async def test_serves_own_routes_keep_their_plain_answers() -> None:
    async def health(scope: Any, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"DRAINING"})

    client = await Client().ask(LostReplicaMiddleware(health), "/-/healthz")
    assert (client.status, client.body) == (503, b"DRAINING")


def test_serve_takes_what_the_import_path_returns() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return

    assert validate_http_proxy_callback_return(middlewares())


def test_no_attempt_at_all_is_no_option() -> None:
    with pytest.raises(ValueError, match="max_attempts is 0"):
        LostReplicaMiddleware(Proxy(), max_attempts=0)
