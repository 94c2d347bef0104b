"""The fetcher against a media host on loopback that does all that media hosts do, and a canary that must stay alone."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest

from deployments.errors import MediaError, MediaFetchError, UrlNotAllowedError
from deployments.preprocessor.config import FetchConfig
from deployments.preprocessor.fetch import MediaFetcher, PinnedBackend
from deployments.preprocessor.url_guard import Address, FetchRules, parse_url

BODY = b"the picture's bytes" * 10
LIMIT = 10_000
Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """An HTTP server on loopback; `requests` holds head lines and headers as they came."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[str] = []
        self.connections = 0
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Host]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            await self._handler(head.split(" ")[1], writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def answer(body: bytes = BODY, status: int = 200, **headers: str) -> bytes:
    headers.setdefault("Content_Length", str(len(body)))
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\nConnection: close\r\n\r\n").encode() + body


def config(**options: object) -> FetchConfig:
    return FetchConfig(**{"total_timeout_s": 5.0, "connect_timeout_s": 2.0, **options})  # type: ignore[arg-type]


class Names:
    """A resolver whose answers are scripted; the last one repeats."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {
            name.replace("_", "."): [list(entry) for entry in entries] for name, entries in answers.items()
        }
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[Address]:
        await asyncio.sleep(0)
        self.asked.append(host)
        if host not in self._answers:
            raise OSError("no such name")
        entries = self._answers[host]
        entry = entries.pop(0) if len(entries) > 1 else entries[0]
        return [ip_address(text) for text in entry]


@asynccontextmanager
async def fetching(
    handler: Handler, options: FetchConfig | None = None, names: Names | None = None
) -> AsyncIterator[tuple[MediaFetcher, Host, str]]:
    """A fetcher that may reach exactly one loopback host, under its address and the name `media.test`."""
    async with Host(handler).serving() as host:
        rules = FetchRules(internal=(f"127.0.0.1:{host.port}", f"media.test:{host.port}"))
        fetcher = MediaFetcher(options or config(), rules, resolver=names or Names(media_test=[["127.0.0.1"]]))
        try:
            yield fetcher, host, f"http://media.test:{host.port}"
        finally:
            await fetcher.close()


def sends(data: bytes) -> Handler:
    async def handler(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await asyncio.sleep(0)

    return handler


async def failing(fetcher: MediaFetcher, url: str) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await fetcher.fetch(parse_url(url), LIMIT)
    return caught.value


# -- plain fetches ----------------------------------------------------------------------------------------------------
async def test_body_and_headers() -> None:
    async with fetching(sends(answer()), config(contact="https://example.org/bot")) as (fetcher, host, base):
        assert await fetcher.fetch(parse_url(base + "/a%2Fb?sig=x%3D#frag"), LIMIT) == BODY
    head = host.requests[0]
    assert head.startswith("GET /a%2Fb?sig=x%3D HTTP/1.1\r\n")
    assert f"Host: media.test:{host.port}\r\n" in head
    assert "User-Agent: Sightline/0.1 media fetcher (+https://example.org/bot)\r\n" in head
    assert "Accept-Encoding: identity\r\n" in head
    assert "cookie" not in head.lower()
    assert "authorization" not in head.lower()


async def test_proxy_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with fetching(sends(answer())) as (fetcher, _, base):
        assert await fetcher.fetch(parse_url(base), LIMIT) == BODY


@pytest.mark.parametrize("status", [204, 400, 401, 403, 404, 410, 429, 500, 503])
async def test_status_is_told_before_anything_is_decoded(status: int) -> None:
    async with fetching(sends(answer(b"no" if status != 204 else b"", status))) as (fetcher, _, base):
        error = await failing(fetcher, base)
    assert isinstance(error, MediaFetchError)
    assert error.code == "media_fetch_failed"
    assert str(status) in error.message


async def test_empty_body() -> None:
    async with fetching(sends(answer(b""))) as (fetcher, _, base):
        assert (await failing(fetcher, base)).code == "empty_media"


# -- bounds -----------------------------------------------------------------------------------------------------------
async def test_declared_length_over_the_limit() -> None:
    async with fetching(sends(answer(b"x", Content_Length=str(10 << 30)))) as (fetcher, _, base):
        assert (await failing(fetcher, base)).code == "media_too_large"


async def test_endless_body_is_stopped_at_the_limit() -> None:
    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"400\r\n" + b"\0" * 1024 + b"\r\n")
            await writer.drain()

    async with fetching(endless) as (fetcher, _, base):
        assert (await failing(fetcher, base)).code == "media_too_large"
        assert fetcher.stats.bytes_read < 500_000


@pytest.mark.parametrize(
    "data",
    [
        answer(BODY, Content_Length=str(len(BODY) + 5)),
        b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n400\r\nabc",
        b"this is no HTTP\r\n\r\n",
        b"",
    ],
)
async def test_broken_answers(data: bytes) -> None:
    async with fetching(sends(data)) as (fetcher, _, base):
        assert (await failing(fetcher, base)).code == "media_fetch_failed"


@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_packed_bodies_are_unpacked(name: str) -> None:
    packed = gzip.compress(BODY) if name == "gzip" else zlib.compress(BODY)
    async with fetching(sends(answer(packed, Content_Encoding=name))) as (fetcher, _, base):
        assert await fetcher.fetch(parse_url(base), LIMIT) == BODY


async def test_packed_bomb_stays_packed() -> None:
    packed = gzip.compress(b"\0" * (64 << 20))
    assert len(packed) > LIMIT
    async with fetching(sends(answer(packed, Content_Encoding="gzip"))) as (fetcher, _, base):
        with pytest.raises(MediaError) as caught:
            await fetcher.fetch(parse_url(base), 1 << 20)
    assert caught.value.code == "media_too_large"


@pytest.mark.parametrize(("body", "name"), [(gzip.compress(BODY)[:-9], "gzip"), (b"junk", "gzip"), (BODY, "br")])
async def test_damaged_or_unknown_packing(body: bytes, name: str) -> None:
    async with fetching(sends(answer(body, Content_Encoding=name))) as (fetcher, _, base):
        assert (await failing(fetcher, base)).code == "media_fetch_failed"


async def hang(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def drip(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("handler", "options"),
    [(hang, {"total_timeout_s": 0.2}), (hang, {"idle_timeout_s": 0.2}), (drip, {"total_timeout_s": 0.3})],
)
async def test_hosts_that_take_their_time(handler: Handler, options: dict[str, float]) -> None:
    async with fetching(handler, config(**options)) as (fetcher, _, base):
        error = await failing(fetcher, base)
        assert error.code == "media_fetch_timeout"
        assert fetcher.stats.timeouts == 1
        assert fetcher.stats.in_flight == 0


async def test_slow_name_servers_are_bounded() -> None:
    async def never(host: str, port: int) -> list[Address]:
        await asyncio.sleep(30)
        return []

    fetcher = MediaFetcher(config(connect_timeout_s=0.1), FetchRules(), resolver=never)
    assert (await failing(fetcher, "http://media.test/")).code == "media_fetch_timeout"
    await fetcher.close()


async def test_hanging_host_takes_no_places_from_others() -> None:
    async def handler(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer())
        await writer.drain()

    options = config(max_in_flight=3, max_in_flight_per_host=2, total_timeout_s=20.0)
    names = Names(media_test=[["127.0.0.1"]], slow_test=[["127.0.0.1"]])
    async with Host(hang).serving() as slow, Host(handler).serving() as good:
        rules = FetchRules(internal=("slow.test", "media.test"))
        fetcher = MediaFetcher(options, rules, resolver=names)
        hanging = [
            asyncio.create_task(fetcher.fetch(parse_url(f"http://slow.test:{slow.port}/"), LIMIT)) for _ in range(20)
        ]
        while slow.connections < 2:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            for _ in range(5):
                assert await fetcher.fetch(parse_url(f"http://media.test:{good.port}/"), LIMIT) == BODY
        assert slow.connections == 2
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert fetcher.stats.in_flight == 0
        assert not fetcher._host_places
        await fetcher.close()


# -- where it may go --------------------------------------------------------------------------------------------------
@asynccontextmanager
async def canary() -> AsyncIterator[Host]:
    async with Host(sends(answer(b"secret"))).serving() as host:
        yield host
        assert host.connections == 0, "a forbidden address was contacted"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.2",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "0.0.0.0",
        "[::]",
    ],
)
async def test_literal_addresses(host: str) -> None:
    async with canary() as other, fetching(sends(answer())) as (fetcher, _, _base):
        error = await failing(fetcher, f"http://{host}:{other.port}/")
        assert isinstance(error, UrlNotAllowedError)
        assert fetcher.stats.refused == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "169.254.169.254", "fe80::1"])
async def test_names_with_forbidden_addresses(address: str) -> None:
    names = Names(evil_test=[[address]])
    async with canary() as other, fetching(sends(answer()), names=names) as (fetcher, _, _base):
        assert isinstance(await failing(fetcher, f"http://evil.test:{other.port}/"), UrlNotAllowedError)


async def test_name_that_changes_its_answer_between_check_and_connect() -> None:
    """The first look-up says public, each later one loopback; the address that was checked is the one connected to."""
    names = Names(evil_test=[["203.0.113.9"], ["127.0.0.1"]])
    connected: list[str] = []

    class Network:
        async def connect_tcp(self, host: str, *args: object) -> object:
            connected.append(host)
            raise ConnectionRefusedError

    async def as_public(host: str, port: int) -> list[Address]:
        return [ip_address("93.184.216.34")] if not connected else [ip_address("127.0.0.1")]

    backend = PinnedBackend(FetchRules(), as_public)
    backend._network = Network()  # type: ignore[assignment]
    with pytest.raises(ConnectionRefusedError):
        await backend.connect_tcp("evil.test", 80)
    with pytest.raises(UrlNotAllowedError):
        await backend.connect_tcp("evil.test", 80)
    assert connected == ["93.184.216.34"]

    async with canary() as other, fetching(sends(answer()), names=names) as (fetcher, _, _base):
        for _ in range(3):
            assert isinstance(await failing(fetcher, f"http://evil.test:{other.port}/"), UrlNotAllowedError)


async def test_mixed_answers_are_refused_whole() -> None:
    names = Names(evil_test=[["93.184.216.34", "127.0.0.1"]])
    async with canary() as other, fetching(sends(answer()), names=names) as (fetcher, _, _base):
        assert isinstance(await failing(fetcher, f"http://evil.test:{other.port}/"), UrlNotAllowedError)


async def test_redirects_are_followed() -> None:
    async def hops(path: str, writer: asyncio.StreamWriter) -> None:
        left = int(path.strip("/"))
        writer.write(answer() if left == 0 else answer(b"", 302, Location=f"/{left - 1}"))
        await writer.drain()

    async with fetching(hops, config(max_redirects=3)) as (fetcher, _, base):
        assert await fetcher.fetch(parse_url(base + "/3"), LIMIT) == BODY
        error = await failing(fetcher, base + "/4")
        assert error.code == "media_fetch_failed"
        assert "more than 3" in error.message


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/c.png",
        "//127.0.0.1:{port}/c.png",
        "http://evil.test:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://media.test:{port}/",
        "file:///etc/hostname",
        "http://user@media.test:{port}/",
        "http://127.0.0.1:{port}\\@media.test/",
    ],
)
async def test_redirects_to_forbidden_places(location: str) -> None:
    names = Names(evil_test=[["127.0.0.1"]], media_test=[["127.0.0.1"]])
    async with canary() as other:
        target = location.format(port=other.port)
        async with fetching(sends(answer(b"", 302, Location=target)), names=names) as (fetcher, host, base):
            assert isinstance(await failing(fetcher, base), UrlNotAllowedError)
            assert len(host.requests) == 1


async def test_redirect_without_a_target_is_a_failure() -> None:
    async with fetching(sends(answer(b"", 302))) as (fetcher, _, base):
        assert "302" in (await failing(fetcher, base)).message


async def test_unknown_names_and_closed_ports() -> None:
    async with fetching(sends(answer())) as (fetcher, _, _base):
        assert (await failing(fetcher, "http://nowhere.test/")).code == "media_fetch_failed"
    fetcher = MediaFetcher(config(), FetchRules(internal=("127.0.0.1",)))
    assert (await failing(fetcher, "http://127.0.0.1:1/")).code == "media_fetch_failed"
    await fetcher.close()
