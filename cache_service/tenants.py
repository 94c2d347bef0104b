"""Who calls: API keys, the tenants they belong to, and what each tenant may do. Knows nothing about HTTP or files.

Keys are random and long, so a plain digest of one is a safe thing to store (slow password hashes guard short secrets,
and would cost every request milliseconds). A key as text exists only in the caller's hands and while it is checked.

A tenant's cache namespace is its own, or its share group's where both the tenant and the operator want common entries:

    tenant `acme`, no group          -> `tenant:acme`
    tenants `red` and `blue`, `labs` -> `group:labs` for both
    server without keys (open)       -> the empty namespace
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_KEY_CHARS = 16
_BUCKET_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may ask for; None leaves the server's own limit alone."""

    requests_per_minute: float | None = None
    """Sustained rate of requests."""
    burst_requests: float | None = None
    """Requests that may come at once after a pause; a second's worth, at least one, if None."""
    max_concurrent_requests: int | None = None
    """Requests under way at the same time."""
    max_images_per_request: int | None = None
    """Pictures and videos in one request."""
    max_image_bytes: int | None = None
    """Encoded size of one picture or video."""
    max_completion_tokens: int | None = None
    """Tokens generated for one choice."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None:
                continue
            whole = option.name.startswith("max_")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                kind = "an integer" if whole else "a number"
                raise ValueError(f"{option.name} must be {kind} above 0, or left out: {value!r}")
        if self.burst_requests is not None and self.burst_requests < 1:
            raise ValueError(f"burst_requests must be 1 or more, or no request ever passes: {self.burst_requests}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    """Shows in logs and metrics; letters, digits, `._-`."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    share_group: str | None = None
    """Tenants with the same group share cache entries, and so can see by speed what the others have sent."""

    def __post_init__(self) -> None:
        for option, value in (("name", self.name), ("share_group", self.share_group)):
            if value is not None and not _NAME.fullmatch(value):
                raise ValueError(f"a tenant's {option} is 1 to 64 of letters, digits and ._-: {value!r}")

    @property
    def namespace(self) -> str:
        """Enters every cache key."""
        return f"group:{self.share_group}" if self.share_group is not None else f"tenant:{self.name}"


@dataclass(frozen=True, slots=True)
class OpenTenant(Tenant):
    """Everybody, on a server without keys."""

    name: str = "open"

    @property
    def namespace(self) -> str:
        return ""


def hash_api_key(key: str) -> str:
    """The form in which a key is stored: `sha256:` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class TenantRegistry:
    """API keys to tenants. Without any key the server is `open`: every caller is the `OpenTenant`.

    Args:
        tenants: (tenant, hashed keys) pairs; a tenant may have several keys, so that they can be rolled over.
    """

    def __init__(self, tenants: Iterable[tuple[Tenant, Iterable[str]]] = ()) -> None:
        self._by_prefix: dict[str, list[tuple[str, Tenant]]] = defaultdict(list)
        self._tenants: dict[str, Tenant] = {}
        hashes: set[str] = set()
        for tenant, key_hashes in tenants:
            if tenant.name in self._tenants:
                raise ValueError(f"two tenants are called {tenant.name!r}")
            self._tenants[tenant.name] = tenant
            for key_hash in key_hashes:
                if not _HASH.fullmatch(key_hash):
                    raise ValueError(f"a key of tenant {tenant.name!r} is not `sha256:` and 64 hex digits")
                if key_hash in hashes:
                    raise ValueError(f"tenant {tenant.name!r} has a key that is already taken")
                hashes.add(key_hash)
                self._by_prefix[_bucket(key_hash)].append((key_hash, tenant))
        self._num_keys = len(hashes)

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any]) -> TenantRegistry:
        """From a parsed document: `{"tenants": [{"name", "keys" or "key_hashes", "share_group", "limits"}]}`.

        `keys` are plain texts, for development and environment variables; `key_hashes` are for files. ValueError says
        which tenant and which option is wrong, and never shows a key.
        """
        _refuse_unknown("the tenant document", document, {"tenants"})
        entries = document.get("tenants", [])
        if not isinstance(entries, list):
            raise ValueError(f"`tenants` must be a list: {type(entries).__name__}")
        return cls([_parse_tenant(position, entry) for position, entry in enumerate(entries)])

    @property
    def is_open(self) -> bool:
        return self._num_keys == 0

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._tenants.values())

    def authenticate(self, key: str | None) -> Tenant | None:
        """The tenant a key belongs to; None if it is unknown or missing.

        Stored digests are compared in constant time. The bucket is chosen by digits of the presented key's digest,
        which a caller can neither choose nor learn from, so its size tells nothing about the stored keys.
        """
        if self.is_open:
            return OpenTenant()
        if key is None:
            return None
        presented = hash_api_key(key)
        found: Tenant | None = None
        for key_hash, tenant in self._by_prefix.get(_bucket(presented), ()):
            if hmac.compare_digest(key_hash, presented):
                found = tenant
        return found


def _bucket(key_hash: str) -> str:
    start = len("sha256:")
    return key_hash[start : start + _BUCKET_CHARS]


def _parse_tenant(position: int, entry: object) -> tuple[Tenant, list[str]]:
    where = f"tenants[{position}]"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a mapping: {type(entry).__name__}")
    _refuse_unknown(where, entry, {"name", "keys", "key_hashes", "share_group", "limits"})
    name = entry.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}.name must be a string: {type(name).__name__}")
    limits = entry.get("limits") or {}
    if not isinstance(limits, Mapping):
        raise ValueError(f"{where}.limits must be a mapping: {type(limits).__name__}")
    _refuse_unknown(f"{where}.limits", limits, {option.name for option in fields(TenantLimits)})
    hashes = _strings(f"{where}.key_hashes", entry.get("key_hashes"))
    for key in _strings(f"{where}.keys", entry.get("keys")):
        if len(key) < _MIN_KEY_CHARS:
            raise ValueError(f"{where}.keys: a key needs at least {_MIN_KEY_CHARS} characters, one has {len(key)}")
        hashes.append(hash_api_key(key))
    if not hashes:
        raise ValueError(f"{where} ({name!r}) has no keys: nobody could use it")
    try:
        return Tenant(name=name, limits=TenantLimits(**limits), share_group=entry.get("share_group")), hashes
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _strings(where: str, value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(element, str) for element in value):
        raise ValueError(f"{where} must be a list of strings")
    return list(value)


def _refuse_unknown(where: str, mapping: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(str(name) for name in mapping if name not in known)
    if unknown:
        raise ValueError(f"{where} has unknown options {unknown}; known ones are {sorted(known)}")
