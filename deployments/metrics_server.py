"""One replica's metrics over HTTP, for Prometheus to scrape it directly. Answers GET /metrics and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from deployments.metrics import CONTENT_TYPE

_MAX_HEAD_BYTES = 16 * 1024
_HEAD_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 16


class MetricsServer:
    """Belongs to one event loop. One answer a connection, a bounded number of them and of bytes read.

    Args:
        host: Address of this node to listen on.
        page: Makes the page, in Prometheus's text format.
    """

    def __init__(self, host: str, page: Callable[[], Awaitable[bytes]]) -> None:
        self._host, self._page = host, page
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._connections = 0

    async def address(self) -> str:
        """`host:port` that it listens on, from the first call on. Raises OSError if it cannot listen."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, self._host, 0, limit=_MAX_HEAD_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._connections += 1
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._answer(head))
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # who does not speak HTTP, or does not read, gets no answer
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if (method, path) != (b"GET", b"/metrics"):
            return _response(b"404 Not Found", "text/plain", b"not found\n")
        return _response(b"200 OK", CONTENT_TYPE, await self._page())


def _response(status: bytes, content_type: str, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, content_type.encode(), len(body)) + body
