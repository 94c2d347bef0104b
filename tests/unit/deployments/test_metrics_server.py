"""A replica's own page over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from deployments.metrics_server import MetricsServer


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    async def page() -> bytes:
        return b"up 1\n"

    server = MetricsServer("127.0.0.1", page)
    yield server
    await server.close()


async def test_the_page_and_nothing_else(server: MetricsServer) -> None:
    address = await server.address()
    assert address == await server.address()
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as client:
        answer = await client.get("/metrics?x=1")
        assert (answer.status_code, answer.text) == (200, "up 1\n")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/metrics")).status_code == 404


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET /metrics HTTP/1.1\r\n", b"x" * 100_000])
async def test_who_does_not_speak_http_is_cut_off(server: MetricsServer, sent: bytes) -> None:
    host, _, port = (await server.address()).partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    if len(sent) < 100_000:
        writer.write_eof()
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_connections_are_bounded(server: MetricsServer) -> None:
    host, _, port = (await server.address()).partition(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(16)]
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b""
    for _, each in [*held, (reader, writer)]:
        each.close()
