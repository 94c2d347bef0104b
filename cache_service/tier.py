"""The one protocol that every cache tier implements; knows nothing about what the values mean.

A tier is a byte store: key -> bytes-like value. It may forget anything at any time, and a caller must be able to go on
without it, so `get_many` and `put` report trouble as a result and never raise for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class LookupResult(Enum):
    HIT = "hit"
    MISS = "miss"
    ERROR = "error"
    """The tier could not answer (down, slow, breaker open): a miss for the caller."""
    CORRUPT = "corrupt"
    """The value failed verification and was deleted: a miss for the caller."""


@dataclass(frozen=True, slots=True)
class Lookup:
    result: LookupResult
    value: memoryview | None = None
    """Set for HIT only; read-only."""


class CacheTier(Protocol):
    name: str
    """Label in metrics: `memory`, `redis`."""

    async def get_many(self, keys: Sequence[bytes]) -> list[Lookup]:
        """One Lookup per key, in order. Bounded by the tier's own deadline. Never raises for the tier's troubles."""

    async def put(self, key: bytes, value: bytes | memoryview) -> bool:
        """Store if it fits; False if the tier declined (too large, full queue, down)."""

    async def delete(self, key: bytes) -> None:
        """Forget a key; unknown keys are ignored."""

    async def close(self) -> None:
        """Flush write-behind work within a bound and release connections."""
