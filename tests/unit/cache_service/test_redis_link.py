import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from cache_service.circuit_breaker import BreakerState, CircuitBreaker
from cache_service.redis_link import LinkError, LinkErrors, RedisLink


class LibraryError(Exception):
    pass


class ReplyError(LibraryError):
    pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """The client's other side: what a call meets is up to the test."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.pings = 0
        self.clients = 0
        self.closed = False

    def connect(self) -> "Server":
        self.clients += 1
        return self

    async def answer(self) -> str:
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        return "answer"

    async def ping(self) -> None:
        self.pings += 1
        await self.answer()

    async def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def ask(server: Server) -> Awaitable[str]:
    return server.answer()


def make(
    server: Server,
    clock: Callable[[], float] | None = None,
    connections: int = 2,
    connect_timeout_s: float = 20.0,
) -> RedisLink[Server]:
    clock = clock or Clock()
    return RedisLink(
        server.connect,
        probe=Server.ping,
        disconnect=Server.close,
        errors=LinkErrors(failures=(LibraryError, OSError, asyncio.TimeoutError), replies=(ReplyError,)),
        breaker=CircuitBreaker(failure_threshold=2, open_s=10, probe_timeout_s=1, start_open=True, clock=clock),
        connections=connections,
        connect_timeout_s=connect_timeout_s,
        clock=clock,
    )


async def test_start_opens_all_connections_ahead() -> None:
    server = Server()
    link = make(server, connections=3)
    assert await link.start()
    assert server.pings == 3
    assert await link.call(ask, 1) == "answer"
    await link.close()
    assert server.closed
    with pytest.raises(LinkError):
        await link.call(ask, 1)


async def test_the_first_call_waits_for_the_first_probe() -> None:
    link = make(Server())
    assert await link.call(ask, 1) == "answer"
    await link.close()


async def test_the_first_call_waits_no_longer_than_its_bound() -> None:
    server = Server()
    server.hangs = True
    link = make(server)
    with pytest.raises(LinkError):
        await link.call(ask, 0)
    assert link.stats.skipped == 1
    await link.close()


@pytest.mark.parametrize(
    "error",
    [LibraryError("x"), ConnectionResetError(), TimeoutError(), OSError(113, "no route")],
)
async def test_failures_of_any_kind_become_one_and_open_the_breaker(error: Exception) -> None:
    server = Server()
    link = make(server)
    await link.start()
    server.error = error
    for _ in range(2):
        with pytest.raises(LinkError):
            await link.call(ask, 1)
    assert link.breaker.state is BreakerState.OPEN
    with pytest.raises(LinkError, match="breaker"):
        await link.call(ask, 1)
    assert (link.stats.failures, link.stats.skipped) == (2, 1)
    await link.close()


async def test_the_servers_own_errors_do_not_open_it() -> None:
    server = Server()
    link = make(server)
    await link.start()
    server.error = ReplyError("OOM")
    for _ in range(5):
        with pytest.raises(LinkError):
            await link.call(ask, 1)
    assert link.breaker.allows_calls()
    assert (link.stats.error_replies, link.stats.failures) == (5, 0)
    await link.close()


async def test_a_hanging_server_is_left_after_the_bound_and_joins_again_by_a_probe_in_the_background() -> None:
    server, clock = Server(), Clock()
    link = make(server, clock)
    await link.start()
    server.hangs = True
    for _ in range(2):
        with pytest.raises(LinkError):
            await link.call(ask, 0)
    clock.now = 10
    with pytest.raises(LinkError):  # starts the probe, and does not wait for it
        await link.call(ask, 1)
    assert link.stats.skipped == 1
    assert not link.breaker.allows_calls()
    server.hangs = False
    clock.now = 20  # the hanging probe has outlived its time: it is replaced
    assert await link.start()
    assert await link.call(ask, 1) == "answer"
    await link.close()


async def test_a_probe_is_bounded() -> None:
    server = Server()
    server.hangs = True
    link = make(server, connect_timeout_s=0.01)
    assert not await link.start()
    assert link.breaker.state is BreakerState.OPEN
    await link.close()


async def test_a_lost_server_is_looked_for_with_a_fresh_client() -> None:
    server, clock = Server(), Clock()
    link = make(server, clock)
    await link.start()
    assert server.clients == 1
    server.error = LibraryError("gone")
    for _ in range(2):
        with pytest.raises(LinkError):
            await link.call(ask, 1)
    clock.now = 10
    assert not await link.start()
    assert (server.clients, server.closed) == (2, True)
    await link.close()


async def test_waiting_for_a_slot_is_no_fault_of_the_server() -> None:
    server = Server()
    link = make(server, connections=1)
    await link.start()
    server.hangs = True
    first = asyncio.ensure_future(link.call(ask, 10))
    await asyncio.sleep(0)
    for _ in range(5):
        with pytest.raises(LinkError):
            await link.call(ask, 0.001)
    assert (link.stats.busy, link.stats.failures) == (5, 0)
    assert link.breaker.allows_calls()
    server.hangs = False
    assert await link.call(ask, 1, exempt=True) == "answer"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await link.call(ask, 1) == "answer"  # the cancelled caller's slot is free
    await link.close()


async def test_trouble_is_logged_once_a_minute_by_its_kind_only(caplog: pytest.LogCaptureFixture) -> None:
    server, clock = Server(), Clock()
    link = make(server, clock)
    server.error = LibraryError("connecting to 10.1.2.3:6379 with hunter2")
    with caplog.at_level(logging.INFO):
        for second in range(0, 59, 10):
            clock.now = second
            assert not await link.start()
        assert len(caplog.records) == 1
        clock.now = 61
        assert not await link.start()
        assert len(caplog.records) == 2
        server.error = None
        clock.now = 80
        assert await link.start()
    assert "LibraryError" in caplog.text
    assert "answers again" in caplog.text
    assert "hunter2" not in caplog.text
    assert "10.1.2.3" not in caplog.text
    await link.close()


async def test_faults_of_ours_are_not_swallowed() -> None:
    link = make(Server())

    async def bug(server: Server) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await link.call(bug, 1)
    await link.close()


async def test_close_survives_a_broken_client() -> None:
    server = Server()
    link = make(server)
    await link.start()
    server.error = LibraryError("gone")
    await link.close()
