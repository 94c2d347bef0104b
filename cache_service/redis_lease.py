"""Leases on a Redis-compatible server: at most one holder of a key at a time, by its fencing token.

A lease is a key that holds the token and expires by itself; tokens come from a counter beside it (see redis_layout.py),
so a later holder always has a larger one. Taking, prolonging and giving back are scripts, each atomic on the server.
As M. Kleppmann's "How to do distributed locking" (2016) puts it: the lease saves work, the token keeps writes right.
"""

from __future__ import annotations

from typing import Any

from cache_service.cluster_flight import Lease, LeaseUnavailableError
from cache_service.redis_layout import KeyLayout
from cache_service.redis_link import LinkError, RedisLink

_FENCE_TTL_MS = 3600 * 1000
"""How long a counter outlives its last use: far longer than any computation, so no token is handed out twice."""

# KEYS lease, fence; ARGV lease ttl in ms, fence ttl in ms. The new token, or 0 if another holds the lease.
_ACQUIRE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local token = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], token, 'NX', 'PX', ARGV[1])
return token
"""

# KEYS lease; ARGV token, ttl in ms.
_EXTEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS lease; ARGV token.
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class RedisLeases:
    """LeaseStore over a link. `timeout_s` bounds each round trip."""

    def __init__(self, link: RedisLink[Any], layout: KeyLayout, *, timeout_s: float = 0.1) -> None:
        self._link = link
        self._layout = layout
        self._timeout_s = timeout_s

    async def acquire(self, key: bytes, ttl_s: float) -> Lease | None:
        token = await self._eval(
            _ACQUIRE, [self._layout.lease(key), self._layout.fence(key)], [_milliseconds(ttl_s), _FENCE_TTL_MS]
        )
        return Lease(key, token) if token else None

    async def extend(self, lease: Lease, ttl_s: float) -> bool:
        return bool(await self._eval(_EXTEND, [self._layout.lease(lease.key)], [lease.token, _milliseconds(ttl_s)]))

    async def release(self, lease: Lease) -> None:
        await self._eval(_RELEASE, [self._layout.lease(lease.key)], [lease.token])

    async def _eval(self, script: str, keys: list[bytes], arguments: list[int]) -> int:
        try:
            reply = await self._link.call(
                lambda client: client.eval(script, len(keys), *keys, *arguments), self._timeout_s, exempt=True
            )
        except LinkError as error:
            raise LeaseUnavailableError(str(error)) from None
        return int(reply)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
