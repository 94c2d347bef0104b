"""Options of the Redis tier, validated where they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cache_service.redis_url import RedisTarget, parse_redis_url

MiB = 1024 * 1024

_POSITIVE = (
    "read_timeout_s",
    "min_bytes_per_s",
    "write_timeout_s",
    "connect_timeout_s",
    "connections",
    "write_queue_bytes",
    "write_queue_entries",
    "breaker_failures",
    "breaker_open_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTierConfig:
    url: str = field(repr=False)
    """redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (redis_url.py)."""
    username: str | None = None
    """ACL user; overrides the URL's."""
    password: str | None = field(default=None, repr=False)
    """Password; overrides the URL's."""
    sentinel_username: str | None = None
    """ACL user of the sentinels themselves, if they ask for one."""
    sentinel_password: str | None = field(default=None, repr=False)
    """Password of the sentinels themselves, if they ask for one."""
    tls_ca_file: str | None = None
    """PEM file of authorities to trust over TLS; the system's if None."""
    tls_cert_file: str | None = None
    """PEM client certificate, where the server asks for one."""
    tls_key_file: str | None = None
    """PEM key of the client certificate."""
    tls_check_hostname: bool = True
    """Whether the server's certificate must name the host we asked for."""
    key_prefix: str = "sightline"
    """First word of every key, for servers that are shared with others."""
    ttl_s: float = 24 * 3600.0
    """Seconds after its write that an entry expires."""
    max_value_bytes: int = 4 * MiB
    """Longest single string stored; longer values are split or skipped."""
    oversize: Literal["chunk", "skip"] = "chunk"
    """What happens to values above max_value_bytes."""
    max_bytes: int = 256 * MiB
    """Longest value stored at all."""
    read_timeout_s: float = 0.05
    """Bound of one read step, before the allowance for its bytes; a look-up has one step, or two for split values."""
    min_bytes_per_s: float = 200e6
    """Slowest transfer worth waiting for: each step's bound grows by its largest possible bytes over this rate."""
    write_timeout_s: float = 1.0
    """Bound of one write behind the response, before the allowance for its bytes."""
    connect_timeout_s: float = 1.0
    """Bound of a probe, which connects in the background; no request waits for it longer than for a read."""
    connections: int = 4
    """Reads under way at the same time; connections to that number are opened ahead."""
    write_queue_bytes: int = 256 * MiB
    """Bound of values waiting to be written; later ones are dropped."""
    write_queue_entries: int = 1024
    """Bound of the number of values waiting to be written."""
    breaker_failures: int = 3
    """Failures in a row after which Redis is left alone."""
    breaker_open_s: float = 10.0
    """Seconds that Redis is left alone before the next probe."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        parse_redis_url(self.url)
        for option in _POSITIVE:
            if not getattr(self, option) > 0:
                raise ValueError(f"{option} must be above 0: {getattr(self, option)}")
        if self.ttl_s < 0.001:
            raise ValueError(f"ttl_s must be at least a millisecond: {self.ttl_s}")
        if self.max_value_bytes < 1024:
            raise ValueError(f"max_value_bytes must be at least 1024: {self.max_value_bytes}")
        if self.max_bytes < self.max_value_bytes:
            raise ValueError(f"max_bytes must be at least max_value_bytes: {self.max_bytes} < {self.max_value_bytes}")
        if self.oversize not in ("chunk", "skip"):
            raise ValueError(f"oversize must be 'chunk' or 'skip': {self.oversize!r}")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.key_prefix):
            raise ValueError(f"key_prefix must be letters, digits, - and _: {self.key_prefix!r}")

    @property
    def target(self) -> RedisTarget:
        return parse_redis_url(self.url)

    def read_bound_s(self, num_bytes: int) -> float:
        """Seconds that one read step of up to `num_bytes` may take."""
        return self.read_timeout_s + num_bytes / self.min_bytes_per_s

    def write_bound_s(self, num_bytes: int) -> float:
        return self.write_timeout_s + num_bytes / self.min_bytes_per_s
