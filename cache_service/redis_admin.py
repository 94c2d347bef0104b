"""What an operator does with the shared tier: list, verify and delete entries. Reads headers, not values, where it can.

Walks the key space with SCAN, so a server in use is never held up, and entries that come or go meanwhile may or may not
be seen. Selecting by namespace or model compares the labels in the values' headers (codec.py).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from cache_service.codec import FIXED_HEADER_BYTES, CorruptValueError, ValueHeader, label, read_header, verify_value
from cache_service.identity import SCHEMA_VERSION
from cache_service.redis_config import RedisTierConfig
from cache_service.redis_layout import MANIFEST_BYTES, KeyLayout, ManifestError, is_manifest, parse_manifest
from cache_service.redis_tier import RedisTier
from cache_service.tier import LookupResult

_BATCH_KEYS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry as found; `header` is None if it cannot be read, and then `problem` says why."""

    kind: str
    key: bytes
    value_bytes: int
    """Length of the value; 0 if unknown."""
    ttl_s: float
    """Seconds until it expires; infinite if it never does."""
    header: ValueHeader | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which entries are meant; None selects all. Unreadable entries match only where no label or age is asked for."""

    kind: str | None = None
    namespace: str | None = None
    model: str | None = None
    created_before_s: float | None = None
    """Unix time."""

    @property
    def is_everything(self) -> bool:
        return self.kind is None and self.namespace is None and self.model is None and self.created_before_s is None

    def matches(self, entry: Entry) -> bool:
        if self.kind is not None and entry.kind != self.kind:
            return False
        header = entry.header
        if header is None:
            return self.namespace is None and self.model is None and self.created_before_s is None
        return (
            (self.namespace is None or header.namespace_label == label(self.namespace))
            and (self.model is None or header.model_label == label(self.model))
            and (self.created_before_s is None or header.created_s < self.created_before_s)
        )


class RedisAdmin:
    """Args:
    config: Where the server is; its time-outs should be a tool's (seconds), not a request's.
    schema: Of the entries to look at.
    """

    def __init__(self, config: RedisTierConfig, *, schema: int = SCHEMA_VERSION) -> None:
        self._config = config
        self._schema = schema
        # Kinds have tiers of their own, over one link.
        self._first = RedisTier.connect(config, kind="any")
        self._tiers: dict[str, RedisTier] = {}
        self._name = re.compile(rf"{re.escape(config.key_prefix)}:{schema}:([A-Za-z0-9_-]+):\{{([0-9a-f]+)\}}".encode())

    async def start(self) -> bool:
        """False if the server cannot be reached or refuses us."""
        return await self._first.start()

    async def close(self) -> None:
        for tier in self._tiers.values():
            await tier.flush(self._config.write_timeout_s)
        await self._first.close()

    async def num_keys(self) -> int:
        """Keys on the server, ours and others'. Raises LinkError, as all methods do."""
        return int(await self._call(lambda client: client.dbsize()))

    async def entries(self, selection: Selection) -> AsyncIterator[list[Entry]]:
        """All matching entries, in batches as they are found; batches may be empty."""
        pattern = f"{self._config.key_prefix}:{self._schema}:{selection.kind or '*'}:{{*}}"
        async for names in self._scan(pattern):
            found = await self._describe(names)
            yield [entry for entry in found if selection.matches(entry)]

    async def verify(self, entry: Entry) -> str:
        """Read an entry whole; an empty text if it is good, else what is wrong. One that has gone meanwhile is good."""
        (lookup,) = await self._tier(entry.kind).peek_many([entry.key])
        if lookup.result is LookupResult.ERROR:
            return "could not be read"
        if lookup.result is LookupResult.CORRUPT:
            return "manifest is damaged"
        if lookup.value is None:
            still_there = await self._call(lambda client: client.exists(self._tier(entry.kind).layout.value(entry.key)))
            return "a part is missing" if still_there else ""
        try:
            verify_value(lookup.value, identity=entry.key)
        except CorruptValueError as error:
            return str(error)
        return ""

    async def delete(self, entries: Sequence[Entry]) -> int:
        """Delete entries with all their parts; how many the server confirmed."""
        deleted = 0
        for entry in entries:
            deleted += await self._tier(entry.kind).delete_now(entry.key)
        return deleted

    async def _scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        names: list[bytes] = []
        # The iterator lives in this generator and each step is one bounded call, since a scan as a whole has no bound.
        iterator = await self._call(lambda client: _scan_iterator(client, pattern))
        while True:
            name = await self._call(lambda client: anext(iterator, None))
            if name is not None:
                names.append(name)
            if names and (name is None or len(names) == _BATCH_KEYS):
                yield names
                names = []
            if name is None:
                return

    async def _describe(self, names: Sequence[bytes]) -> list[Entry]:
        parsed = [
            (match[1].decode(), bytes.fromhex(match[2].decode())) for name in names if (match := self._ours(name))
        ]

        async def read(client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for kind, key in parsed:
                name = self._layout(kind).value(key)
                pipeline.getrange(name, 0, MANIFEST_BYTES + FIXED_HEADER_BYTES - 1)
                pipeline.strlen(name)
                pipeline.pttl(name)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

        replies = await self._call(read)
        found = [
            self._entry(kind, key, *replies[3 * position : 3 * position + 3])
            for position, (kind, key) in enumerate(parsed)
        ]
        return [entry for entry in found if entry is not None]

    def _entry(self, kind: str, key: bytes, head: object, length: object, ttl_ms: object) -> Entry | None:
        if not isinstance(head, bytes) or not isinstance(length, int) or not isinstance(ttl_ms, int):
            return Entry(kind=kind, key=key, value_bytes=0, ttl_s=float("inf"), problem="not a string")
        if ttl_ms == -2:  # gone since the scan named it
            return None
        ttl_s = float("inf") if ttl_ms < 0 else ttl_ms / 1000
        header: ValueHeader | None = None
        problem = ""
        try:
            if is_manifest(head):
                length = parse_manifest(head, max_bytes=self._config.max_bytes).total_bytes
                head = head[MANIFEST_BYTES:]
            header = read_header(head)
        except (ManifestError, CorruptValueError) as error:
            problem = str(error)
        return Entry(kind=kind, key=key, value_bytes=length, ttl_s=ttl_s, header=header, problem=problem)

    def _ours(self, name: bytes) -> re.Match[bytes] | None:
        match = self._name.fullmatch(name)
        return match if match and len(match[2]) % 2 == 0 else None

    def _layout(self, kind: str) -> KeyLayout:
        return self._tier(kind).layout

    def _tier(self, kind: str) -> RedisTier:
        tier = self._tiers.get(kind)
        if tier is None:
            tier = RedisTier(self._config, kind=kind, link=self._first.link, schema=self._schema)
            self._tiers[kind] = tier
        return tier

    async def _call(self, operation: Any) -> Any:
        return await self._first.link.call(operation, self._config.read_timeout_s)


async def _scan_iterator(client: Any, pattern: str) -> AsyncIterator[bytes]:
    iterator: AsyncIterator[bytes] = client.scan_iter(match=pattern, count=1000)
    return iterator
