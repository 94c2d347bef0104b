"""The shared cache tier: a Redis-compatible server (Redis, Valkey). The one file that knows the client library.

What a caller can rely on, whatever the server does:
- no method raises for the server's troubles: a look-up answers ERROR or MISS, a write is dropped and counted;
- a look-up takes at most two bounded steps (redis_config.py): all values, then the parts of those that were split;
- writes are behind: `put` queues and returns.

Values are opaque here; `tiered.py` has them verified and deletes what is corrupt. Names and splitting: redis_layout.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from cache_service.circuit_breaker import BreakerStats, CircuitBreaker
from cache_service.identity import SCHEMA_VERSION
from cache_service.redis_config import RedisTierConfig
from cache_service.redis_layout import (
    MANIFEST_BYTES,
    KeyLayout,
    Manifest,
    ManifestError,
    is_manifest,
    join_parts,
    parse_manifest,
    split_value,
)
from cache_service.redis_link import LinkError, LinkErrors, LinkStats, RedisLink
from cache_service.redis_url import Topology
from cache_service.tier import Lookup, LookupResult
from cache_service.write_behind import Write, WriteBehind, WriteBehindStats

Client = Redis | RedisCluster

ERRORS = LinkErrors(
    # A cluster's client has errors of its own, outside the library's tree.
    failures=(redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError, asyncio.TimeoutError),
    replies=(redis.exceptions.ResponseError,),
)

_READ_BYTES = 128 * 1024  # of one socket read: what asyncio's stream holds; the library asks for a quarter of it

# Stores the value unless a newer leader was given the key: KEYS value, fence; ARGV value, ttl in ms, token.
_FENCED_SET = """
local newest = redis.call('GET', KEYS[2])
if newest and newest ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTierStats:
    """A snapshot. Counters only grow; `queued_*`, `breaker` states go both ways."""

    hits: int
    misses: int
    errors: int
    corrupt: int
    bytes_in: int
    """Value bytes read."""
    bytes_out: int
    """Value bytes written."""
    dropped_writes: int
    """Refused by the full queue, too long, or not taken by the server."""
    fenced_writes: int
    """Refused by the server since a newer leader has the key."""
    breaker: BreakerStats
    link: LinkStats
    writes: WriteBehindStats


@dataclass(slots=True)
class _Counters:
    hits: int = 0
    misses: int = 0
    errors: int = 0
    corrupt: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    too_long: int = 0
    fenced: int = 0


class RedisTier:
    """Cache tier for values of one kind. Creating it opens nothing; the server may be absent then and join later.

    Args:
        kind: What the values are (`embedding`, `item`); part of every key's name.
        link: The way to the server; tiers of several kinds may share one.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        *,
        kind: str,
        link: RedisLink[Client],
        name: str = "redis",
        schema: int = SCHEMA_VERSION,
    ) -> None:
        self.name = name
        self.layout = KeyLayout(kind=kind, prefix=config.key_prefix, schema=schema)
        self.link = link
        self._config = config
        self._counters = _Counters()
        self._writes = WriteBehind(
            self._execute, max_bytes=config.write_queue_bytes, max_entries=config.write_queue_entries
        )

    @classmethod
    def connect(cls, config: RedisTierConfig, *, kind: str, name: str = "redis") -> RedisTier:
        """A tier with a link of its own."""
        return cls(config, kind=kind, link=open_link(config, name=name), name=name)

    async def start(self) -> bool:
        """Open connections ahead; False if the server is not there now, which is no error."""
        return await self.link.start()

    # -- reading ------------------------------------------------------------------------------------------------------
    async def get_many(self, keys: Sequence[bytes]) -> list[Lookup]:
        if not keys:
            return []
        lookups = await self.peek_many(keys)
        for key, lookup in zip(keys, lookups, strict=True):
            self._count(lookup)
            if lookup.result is LookupResult.CORRUPT:
                await self.delete(key)
        return lookups

    async def peek_many(self, keys: Sequence[bytes]) -> list[Lookup]:
        """`get_many` that neither counts nor deletes what is corrupt."""
        names = [self.layout.value(key) for key in keys]
        bound_s = self._config.read_bound_s(len(keys) * self._config.max_value_bytes)
        try:
            replies = await self.link.call(lambda client: _pipelined_get(client, names), bound_s)
        except LinkError:
            return [_ERROR] * len(keys)
        lookups: list[Lookup] = []
        split: dict[int, Manifest] = {}
        for position, reply in enumerate(replies):
            lookup = _MISS if reply is None else _ERROR
            if isinstance(reply, bytes) and is_manifest(reply):
                try:
                    split[position] = parse_manifest(reply, max_bytes=self._config.max_bytes)
                except ManifestError:
                    lookup = _CORRUPT
            elif isinstance(reply, bytes):
                lookup = Lookup(LookupResult.HIT, memoryview(reply))
            elif isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE"):
                lookup = _CORRUPT  # somebody else's list or hash under our name
            lookups.append(lookup)
        if split:
            await self._read_parts(keys, replies, split, lookups)
        return lookups

    async def _read_parts(
        self, keys: Sequence[bytes], heads: Sequence[object], split: dict[int, Manifest], lookups: list[Lookup]
    ) -> None:
        """Second step: fetch the parts of the split values and replace their look-ups."""
        names = [
            self.layout.part(keys[position], manifest.write_id, number)
            for position, manifest in split.items()
            for number in range(1, manifest.parts)
        ]
        bound_s = self._config.read_bound_s(sum(manifest.total_bytes for manifest in split.values()))
        try:
            replies = iter(await self.link.call(lambda client: _pipelined_get(client, names), bound_s) if names else ())
        except LinkError:
            return
        for position, manifest in split.items():
            parts = [next(replies) for _ in range(1, manifest.parts)]
            head = heads[position]
            assert isinstance(head, bytes)
            whole = [part for part in parts if isinstance(part, bytes)]
            if len(whole) != len(parts):
                lookups[position] = _MISS  # a part was evicted or has expired
                continue
            try:
                lookups[position] = Lookup(LookupResult.HIT, memoryview(join_parts(manifest, head, whole)))
            except ManifestError:
                lookups[position] = _CORRUPT

    # -- writing ------------------------------------------------------------------------------------------------------
    async def put(self, key: bytes, value: bytes | memoryview) -> bool:
        """Queue a value; False if it is too long or the queue is full. `value` must not change afterwards."""
        return self._offer(key, value, None) is not None

    async def put_fenced(self, key: bytes, value: bytes | memoryview, token: int | None) -> bool:
        """Write and wait for the outcome. With a token the server refuses it once a newer one was handed out."""
        write = self._offer(key, value, token)
        return False if write is None else await asyncio.shield(write.done)

    async def delete(self, key: bytes) -> None:
        self._writes.offer(key, None)

    async def delete_now(self, key: bytes) -> bool:
        """Delete and wait for the outcome."""
        write = self._writes.offer(key, None)
        return False if write is None else await asyncio.shield(write.done)

    async def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was queued is written or dropped; False if that takes longer."""
        return await self._writes.flush(timeout_s)

    async def close(self) -> None:
        await self._writes.close(self._config.write_timeout_s)
        await self.link.close()

    def stats(self) -> RedisTierStats:
        counters, writes = self._counters, self._writes.stats
        return RedisTierStats(
            hits=counters.hits,
            misses=counters.misses,
            errors=counters.errors,
            corrupt=counters.corrupt,
            bytes_in=counters.bytes_in,
            bytes_out=counters.bytes_out,
            dropped_writes=counters.too_long + writes.refused + writes.failed - counters.fenced,
            fenced_writes=counters.fenced,
            breaker=self.link.breaker.stats(),
            link=self.link.stats,
            writes=writes,
        )

    def _offer(self, key: bytes, value: bytes | memoryview, fence: int | None) -> Write | None:
        num_bytes = value.nbytes if isinstance(value, memoryview) else len(value)
        limit = self._config.max_bytes if self._config.oversize == "chunk" else self._config.max_value_bytes
        if num_bytes > limit or is_manifest(value):
            self._counters.too_long += 1
            return None
        return self._writes.offer(key, value, fence=fence)

    async def _execute(self, write: Write) -> bool:
        operation = self._delete if write.value is None else self._store
        try:
            return await self.link.call(
                lambda client: operation(client, write), self._config.write_bound_s(write.num_bytes), exempt=True
            )
        except LinkError:
            return False

    async def _delete(self, client: Client, write: Write) -> bool:
        await client.unlink(self.layout.value(write.key), *await self._parts_of(client, write.key))
        return True

    async def _store(self, client: Client, write: Write) -> bool:
        assert write.value is not None
        value: bytes | memoryview = write.value
        ttl_ms = max(1, round(self._config.ttl_s * 1000))
        stale_parts: list[bytes] = []
        if write.num_bytes > self._config.max_value_bytes:
            split = split_value(value, self._config.max_value_bytes)
            stale_parts = await self._parts_of(client, write.key)
            pipeline = client.pipeline(transaction=False)
            for number, part in enumerate(split.rest, start=1):
                # Parts first, and with a longer life than the manifest: what it names is there.
                name = self.layout.part(write.key, split.manifest.write_id, number)
                pipeline.set(name, _for_wire(part), px=ttl_ms + 60_000)
            await pipeline.execute()
            value = split.head
        taken = await self._set(client, write, value, ttl_ms)
        if taken:
            self._counters.bytes_out += write.num_bytes
            if stale_parts:
                await client.unlink(*stale_parts)
        return taken

    async def _set(self, client: Client, write: Write, value: bytes | memoryview, ttl_ms: int) -> bool:
        name = self.layout.value(write.key)
        if write.fence is None:
            await client.set(name, _for_wire(value), px=ttl_ms)
            return True
        fence = self.layout.fence(write.key)
        taken = bool(await client.eval(_FENCED_SET, 2, name, fence, _for_wire(value), ttl_ms, write.fence))
        self._counters.fenced += not taken
        return taken

    async def _parts_of(self, client: Client, key: bytes) -> list[bytes]:
        """Names of the parts of the split value that is there now, so that replacing it leaves none behind."""
        try:
            head: Any = await client.getrange(self.layout.value(key), 0, MANIFEST_BYTES - 1)
            manifest = parse_manifest(head, max_bytes=self._config.max_bytes)
        except (ManifestError, redis.exceptions.ResponseError):  # none, or somebody else's list or hash
            return []
        return [self.layout.part(key, manifest.write_id, number) for number in range(1, manifest.parts)]

    def _count(self, lookup: Lookup) -> None:
        counters = self._counters
        counters.hits += lookup.result is LookupResult.HIT
        counters.misses += lookup.result is LookupResult.MISS
        counters.errors += lookup.result is LookupResult.ERROR
        counters.corrupt += lookup.result is LookupResult.CORRUPT
        counters.bytes_in += 0 if lookup.value is None else lookup.value.nbytes


_MISS = Lookup(LookupResult.MISS)
_ERROR = Lookup(LookupResult.ERROR)
_CORRUPT = Lookup(LookupResult.CORRUPT)


async def _pipelined_get(client: Client, names: Sequence[bytes]) -> list[Any]:
    """One round trip (one per node of a cluster). Values, None, or the server's error for that name."""
    if len(names) == 1:  # a pipeline's buffer costs a copy
        try:
            return [await client.get(names[0])]
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return [error]
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.get(name)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return replies


def _for_wire(value: bytes | memoryview) -> bytes | memoryview:
    """The bytes object behind a view of all of it, which the library sends without another copy."""
    if isinstance(value, memoryview) and isinstance(value.obj, bytes) and len(value.obj) == value.nbytes:
        return value.obj
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Opening
# ---------------------------------------------------------------------------------------------------------------------
def open_link(
    config: RedisTierConfig, *, name: str = "redis", clock: Callable[[], float] = time.monotonic
) -> RedisLink[Client]:
    """A link to the configured server, with its own connections and circuit breaker. Connects on use."""
    breaker = CircuitBreaker(
        failure_threshold=config.breaker_failures,
        open_s=config.breaker_open_s,
        probe_timeout_s=2 * config.connect_timeout_s,
        start_open=True,
        clock=clock,
    )
    return RedisLink(
        lambda: open_client(config),
        probe=_probe,
        disconnect=_disconnect,
        errors=ERRORS,
        breaker=breaker,
        connections=config.connections,
        connect_timeout_s=config.connect_timeout_s,
        name=name,
        clock=clock,
    )


def open_client(config: RedisTierConfig) -> Client:
    """The library's client. It never tries again by itself: bounds and retries are ours."""
    target = config.target
    credentials: dict[str, Any] = {
        "username": config.username if config.username is not None else target.username,
        "password": config.password if config.password is not None else target.password,
    }
    common: dict[str, Any] = {
        # Our own bounds end calls; the library's only reap what was left behind.
        "socket_timeout": 60.0,
        "socket_connect_timeout": config.connect_timeout_s,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,  # no HELLO, no push messages
        "retry": Retry(NoBackoff(), 0),
    }
    if target.tls:
        common |= {
            "ssl": True,
            "ssl_ca_certs": config.tls_ca_file,
            "ssl_certfile": config.tls_cert_file,
            "ssl_keyfile": config.tls_key_file,
            "ssl_check_hostname": config.tls_check_hostname,
        }
    if target.topology is Topology.UNIX:
        return Redis(unix_socket_path=target.socket_path, db=target.db, **credentials, **common)
    if target.topology is Topology.SENTINEL:
        guards = Sentinel(
            target.hosts,
            sentinel_kwargs={
                **common,
                "socket_timeout": config.connect_timeout_s,
                "username": config.sentinel_username,
                "password": config.sentinel_password,
            },
            **credentials,
            **common,
        )
        return guards.master_for(target.service, db=target.db)
    if target.topology is Topology.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        return _Cluster(startup_nodes=nodes, require_full_coverage=False, **credentials, **common)
    host, port = target.hosts[0]
    return Redis(host=host, port=port, db=target.db, **credentials, **common)


class _Cluster(RedisCluster):
    """Closes all its nodes: the library leaves connections open where one node fails while it is being closed."""

    async def aclose(self) -> None:
        nodes = [*self.nodes_manager.startup_nodes.values(), *self.nodes_manager.nodes_cache.values()]
        try:
            await super().aclose()
        finally:
            await asyncio.gather(*(node.disconnect() for node in nodes), return_exceptions=True)


async def _probe(client: Client) -> object:
    if isinstance(client, RedisCluster):
        return await client.ping(target_nodes=RedisCluster.RANDOM)
    return await client.ping()


async def _disconnect(client: Client) -> None:
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for guard in client.connection_pool.sentinel_manager.sentinels:  # the library leaves these open
            await guard.aclose()
