"""Where a Redis-compatible server is, as one URL. Pure: opens nothing.

    redis://[user:password@]host[:port][/db]
    rediss://…                                       over TLS; so are rediss+sentinel and rediss+cluster
    unix://[user:password@]/path/to.sock[?db=0]
    redis+sentinel://[user:password@]host[:port],host[:port]/service[/db]
    redis+cluster://[user:password@]host[:port],host[:port]

User and password may be percent-encoded. Messages of errors never show the URL, since it may hold a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qs, unquote

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379


class Topology(Enum):
    SINGLE = "single"
    UNIX = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTarget:
    topology: Topology
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    """(host, port) pairs: one server, the sentinels, or some nodes of a cluster."""
    socket_path: str = ""
    service: str = ""
    """Name of the monitored primary, for sentinels."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)


_SCHEMES = {
    "redis": (Topology.SINGLE, False),
    "rediss": (Topology.SINGLE, True),
    "unix": (Topology.UNIX, False),
    "redis+sentinel": (Topology.SENTINEL, False),
    "rediss+sentinel": (Topology.SENTINEL, True),
    "redis+cluster": (Topology.CLUSTER, False),
    "rediss+cluster": (Topology.CLUSTER, True),
}


def parse_redis_url(url: str) -> RedisTarget:
    """ValueError says what is wrong with the URL without showing it."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"a Redis URL starts with one of {', '.join(name + '://' for name in _SCHEMES)}")
    topology, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    before_path, slash, path = rest.partition("/")
    credentials, at, netloc = before_path.rpartition("@")
    username, password = _credentials(credentials) if at else (None, None)
    options = parse_qs(query, keep_blank_values=True)
    if unknown := sorted(set(options) - {"db"}):
        raise ValueError(f"a Redis URL has no options besides db: {unknown}")
    if topology is Topology.UNIX:
        if not path:
            raise ValueError("a unix:// URL needs an absolute socket path")
        db = _db(options["db"][0]) if "db" in options else 0
        return RedisTarget(
            topology=topology, socket_path=unquote(slash + path), db=db, username=username, password=password
        )
    hosts = _hosts(netloc, DEFAULT_SENTINEL_PORT if topology is Topology.SENTINEL else DEFAULT_PORT)
    if topology is Topology.SINGLE and len(hosts) != 1:
        raise ValueError("a redis:// URL names one host; use redis+sentinel:// or redis+cluster:// for several")
    service, db_text = "", path
    if topology is Topology.SENTINEL:
        service, _, db_text = path.partition("/")
        if not service:
            raise ValueError("a redis+sentinel:// URL needs the service's name: host:port,host:port/service")
    if "db" in options:
        if db_text:
            raise ValueError("a Redis URL names the database in its path or as option db, not both")
        db_text = options["db"][0]
    db = _db(db_text) if db_text else 0
    if topology is Topology.CLUSTER and db:
        raise ValueError(f"a Redis cluster has database 0 only: {db = }")
    return RedisTarget(
        topology=topology, tls=tls, hosts=hosts, service=service, db=db, username=username, password=password
    )


def _credentials(text: str) -> tuple[str | None, str | None]:
    username, colon, password = text.partition(":")
    if not colon:  # `user@host`, without a password
        return unquote(username) or None, None
    return unquote(username) or None, unquote(password) or None


def _hosts(netloc: str, default_port: int) -> tuple[tuple[str, int], ...]:
    return tuple(_host(part, default_port) for part in netloc.split(","))


def _host(part: str, default_port: int) -> tuple[str, int]:
    if part.startswith("["):  # IPv6
        host, bracket, port = part[1:].partition("]")
        port = port.removeprefix(":")
        if not bracket:
            raise ValueError("a Redis URL's IPv6 address is not closed with ]")
    else:
        host, _, port = part.partition(":")
    if not host:
        raise ValueError("a Redis URL lacks a host name")
    if not port:
        return host, default_port
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("a Redis URL's port must be an integer from 1 to 65535")
    return host, int(port)


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a Redis URL's database must be a number, 0 or more")
    return int(text)
