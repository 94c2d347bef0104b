"""What content a caller's `uuid` stands for. A hint inside its namespace, never an identity.

A payload always wins over what its uuid meant before: the table is bound anew and the conflict counted. An uuid without
a payload is only as good as this table; unknown ones are the caller's to send again. Identifiers inside a file (EXIF
ImageID and the like) are not looked at: anyone can write them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cache_service.identity import DIGEST_BYTES, ContentDigest
from cache_service.lru import ByteLRU, LRUStats

_ENTRY_OVERHEAD_BYTES = 600


class Binding(Enum):
    NEW = "new"
    SAME = "same"
    REBOUND = "rebound"
    """The uuid stood for other content before."""
    REFUSED = "refused"
    """The table has no room for it."""


@dataclass(slots=True)
class UuidTableStats:
    new: int = 0
    same: int = 0
    rebound: int = 0
    refused: int = 0


class UuidTable:
    """(namespace, uuid) -> content digest, least recently used forgotten first."""

    def __init__(self, capacity_bytes: int = 16 * 1024 * 1024) -> None:
        self._lru: ByteLRU[tuple[str, str], ContentDigest] = ByteLRU(capacity_bytes)
        self.stats = UuidTableStats()

    def bind(self, namespace: str, uuid: str, digest: ContentDigest) -> Binding:
        """Note that `uuid` came with content `digest`."""
        key = (namespace, uuid)
        known = self._lru.peek(key)
        if known == digest:
            self._lru.get(key)  # keep it from being forgotten
            self.stats.same += 1
            return Binding.SAME
        num_bytes = 4 * (len(namespace) + len(uuid)) + DIGEST_BYTES + _ENTRY_OVERHEAD_BYTES
        if not self._lru.put(key, digest, num_bytes):
            self._lru.pop(key)  # what it said is no longer true
            self.stats.refused += 1
            return Binding.REFUSED
        if known is None:
            self.stats.new += 1
            return Binding.NEW
        self.stats.rebound += 1
        return Binding.REBOUND

    def lookup(self, namespace: str, uuid: str) -> ContentDigest | None:
        return self._lru.get((namespace, uuid))

    def lru_stats(self) -> LRUStats:
        return self._lru.stats()
