"""Fetches http(s) URLs under bounds, and makes the one decision that matters where it cannot be dodged: at connect.

    URL ─rules─▶ place (per host, overall) ─▶ resolve ─▶ every address checked ─▶ connect to a checked address
     ▲                                                                                        │
     └────────────── redirect: parsed and judged like the first URL, few hops ◀── answer ─────┘

A connection is only ever opened by `PinnedBackend`, which resolves the name itself, judges all addresses and connects
to one of those it judged, so a name that changes its answer between check and connect gains nothing. The name stays
the key of the connection pool, the Host header and the TLS server name. No proxy variables, no cookies, no credentials.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import httpcore

from deployments.errors import MediaError, MediaFetchError, UrlNotAllowedError
from deployments.preprocessor.config import FetchConfig
from deployments.preprocessor.url_guard import Address, FetchRules, FetchUrl

Resolver = Callable[[str, int], Awaitable[Sequence[Address]]]
"""Addresses of a host name, best first. Raises OSError if there are none."""

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_ADDRESSES_TRIED = 3
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def resolve(host: str, port: int) -> list[Address]:
    """The system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ip_address(entry[4][0]) for entry in found]


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections only to addresses that `rules` let through."""

    def __init__(self, rules: FetchRules, resolver: Resolver) -> None:
        self._rules = rules
        self._resolver = resolver
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port, timeout)
        self._rules.check_addresses(host, port, addresses)
        failure: Exception = httpcore.ConnectError("the name has no address")
        for address in addresses[:_MAX_ADDRESSES_TRIED]:
            try:
                return await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise UrlNotAllowedError("media are not fetched from local sockets")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _resolve(self, host: str, port: int, timeout_s: float | None) -> Sequence[Address]:
        literal = FetchUrl("http", host, port, "/").literal_address
        if literal is not None:
            return [literal]
        try:
            async with asyncio.timeout(timeout_s):
                return await self._resolver(host, port)
        except TimeoutError as exc:
            raise httpcore.ConnectTimeout("the name was not resolved in time") from exc
        except (OSError, UnicodeError, ValueError) as exc:
            raise httpcore.ConnectError("the name cannot be resolved") from exc


@dataclass(slots=True)
class FetchStats:
    fetches: int = 0
    fetched: int = 0
    """Fetches that brought a body."""
    redirects: int = 0
    bytes_read: int = 0
    """Bytes of bodies as they came over the wire, those of failed fetches included."""
    refused: int = 0
    timeouts: int = 0
    failures: int = 0
    in_flight: int = 0
    """Fetches under way now, waiting ones included."""


class MediaFetcher:
    """Fetches bodies of allowed URLs. Belongs to one event loop; `close` ends its connections.

    Args:
        resolver: The system's if left out.
        ssl_context: The system's trust if left out.
    """

    def __init__(
        self,
        config: FetchConfig,
        rules: FetchRules,
        *,
        resolver: Resolver = resolve,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._rules = rules
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or ssl.create_default_context(),
            max_connections=config.max_in_flight,
            max_keepalive_connections=min(config.max_in_flight, 32),
            keepalive_expiry=15.0,
            network_backend=PinnedBackend(rules, resolver),
        )
        self._places = asyncio.Semaphore(config.max_in_flight)
        self._host_places: dict[tuple[str, int], _HostPlaces] = {}
        contact = f" (+{config.contact})" if config.contact else ""
        self._headers = [
            (b"User-Agent", f"Sightline/0.1 media fetcher{contact}".encode()),
            (b"Accept", b"image/*,video/*;q=0.9,*/*;q=0.1"),
            (b"Accept-Encoding", b"identity"),
        ]
        self._timeouts = {
            "connect": config.connect_timeout_s,
            "read": config.idle_timeout_s,
            "write": config.idle_timeout_s,
            "pool": config.total_timeout_s,
        }
        self.stats = FetchStats()

    async def fetch(self, url: FetchUrl, max_bytes: int) -> bytes:
        """The body behind `url`, after redirects.

        Raises:
            UrlNotAllowedError: This URL or one that it redirects to may not be fetched.
            MediaFetchError: `media_fetch_failed` (the status, if one came, is in the message), `media_fetch_timeout`.
            MediaError: `media_too_large`, `empty_media`.
        """
        self.stats.fetches += 1
        self.stats.in_flight += 1
        try:
            async with asyncio.timeout(self._config.total_timeout_s):
                body = await self._follow(url, max_bytes)
            self.stats.fetched += 1
            return body
        except (TimeoutError, httpcore.TimeoutException):
            self.stats.timeouts += 1
            raise MediaFetchError(
                f"the media host did not answer in time; one fetch may take {self._config.total_timeout_s:g} s",
                code="media_fetch_timeout",
            ) from None
        except UrlNotAllowedError:
            self.stats.refused += 1
            raise
        except MediaError:
            self.stats.failures += 1
            raise
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ssl.SSLError):
            self.stats.failures += 1
            raise MediaFetchError(
                "the media host could not be reached, or broke off before the end of the body"
            ) from None
        finally:
            self.stats.in_flight -= 1

    async def close(self) -> None:
        await self._pool.aclose()

    async def _follow(self, url: FetchUrl, max_bytes: int) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            self._rules.check_url(url)
            async with self._place(url):
                answer = await self._get(url, max_bytes)
            if isinstance(answer, bytes):
                return answer
            self.stats.redirects += 1
            url = answer
        raise MediaFetchError(f"the media host redirects more than {self._config.max_redirects} times")

    async def _get(self, url: FetchUrl, max_bytes: int) -> bytes | FetchUrl:
        """One request: the body, or where the host sends us instead."""
        async with self._pool.stream(
            b"GET",
            httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target),
            headers=[(b"Host", url.authority.encode()), *self._headers],
            extensions={"timeout": self._timeouts},
        ) as response:
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in headers:
                return url.join(_header_text(headers[b"location"]))
            if response.status != 200:
                raise MediaFetchError(f"the media host answered with status {response.status}")
            return await self._read_body(response, headers, max_bytes)

    async def _read_body(self, response: httpcore.Response, headers: dict[bytes, bytes], max_bytes: int) -> bytes:
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        body = _BoundedBody(headers.get(b"content-encoding", b""), max_bytes)
        async for chunk in response.aiter_stream():
            self.stats.bytes_read += len(chunk)
            body.feed(chunk)
        return body.finish()

    @asynccontextmanager
    async def _place(self, url: FetchUrl) -> AsyncIterator[None]:
        """A place at the host first, then one overall, so that waiting for a slow host takes nothing from others."""
        key = (url.host, url.port)
        host = self._host_places.setdefault(key, _HostPlaces(self._config.max_in_flight_per_host))
        host.users += 1
        try:
            async with host.places, self._places:
                yield
        finally:
            host.users -= 1
            if host.users == 0:
                self._host_places.pop(key, None)


class _HostPlaces:
    def __init__(self, limit: int) -> None:
        self.places = asyncio.Semaphore(limit)
        self.users = 0


class _BoundedBody:
    """Collects a body, unpacked if the host packs it unasked, and stops at the limit, whichever form is larger."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        name = encoding.strip().lower().decode("latin-1")
        if name not in ("", "identity", *_ENCODINGS):
            raise MediaFetchError("the media host uses a content encoding that was not asked for")
        self._inflater = zlib.decompressobj(_ENCODINGS[name]) if name in _ENCODINGS else None
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._num_raw_bytes = 0
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> None:
        self._num_raw_bytes += len(chunk)
        if self._inflater is not None:
            chunk = self._inflate(chunk)
        self._num_bytes += len(chunk)
        if max(self._num_bytes, self._num_raw_bytes) > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._chunks.append(chunk)

    def finish(self) -> bytes:
        if self._inflater is not None and self._num_raw_bytes and not self._inflater.eof:
            raise MediaFetchError("the media host's compressed body is incomplete")
        if not self._num_bytes:
            raise MediaError("the media host answered with an empty body", code="empty_media")
        return b"".join(self._chunks)

    def _inflate(self, chunk: bytes) -> bytes:
        assert self._inflater is not None
        try:
            # One byte over the limit is enough to know; the rest stays compressed.
            return self._inflater.decompress(chunk, self._max_bytes - self._num_bytes + 1)
        except zlib.error:
            raise MediaFetchError("the media host's compressed body is damaged") from None


def _too_large(max_bytes: int) -> MediaError:
    return MediaError(f"the media is larger than the {max_bytes} bytes that are allowed", code="media_too_large")


def _header_text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
