"""Remembers for a short while that a piece of media is bad, so that a retry storm does not decode it again and again.

Short, because the cause may go away (a decoder is upgraded, a URL answers again); by namespace, because a tenant must
not learn from an answer's speed what another one has sent. Only verdicts on the content belong here, never faults of
ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_service.lru import ByteLRU, LRUStats

_ENTRY_OVERHEAD_BYTES = 700


@dataclass(frozen=True, slots=True)
class NegativeResult:
    code: str
    """Stable word of the error, such as `image_too_large`."""
    message: str
    """What the caller was told; names no request field, since the next request has it elsewhere."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    result: NegativeResult
    expires_s: float


class NegativeCache:
    """Args:
    capacity_bytes: Bound of all entries, book-keeping included.
    ttl_s: Seconds that a verdict is remembered; 0 remembers nothing.
    clock: Monotonic seconds.
    """

    def __init__(
        self,
        capacity_bytes: int = 4 * 1024 * 1024,
        *,
        ttl_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ttl_s < 0:
            raise ValueError(f"ttl_s must be 0 or more: {ttl_s = }")
        self._lru: ByteLRU[tuple[str, bytes], _Remembered] = ByteLRU(capacity_bytes)
        self._ttl_s = ttl_s
        self._clock = clock

    def get(self, namespace: str, key: bytes) -> NegativeResult | None:
        """The verdict on `key` (digest of the encoded bytes, or of the URL), if there is a fresh one."""
        full_key = (namespace, key)
        remembered = self._lru.peek(full_key)
        if remembered is not None and remembered.expires_s <= self._clock():
            self._lru.pop(full_key)
        remembered = self._lru.get(full_key)
        return None if remembered is None else remembered.result

    def put(self, namespace: str, key: bytes, result: NegativeResult) -> bool:
        if not self._ttl_s:
            return False
        num_bytes = len(namespace) + len(key) + len(result.code) + 4 * len(result.message) + _ENTRY_OVERHEAD_BYTES
        return self._lru.put((namespace, key), _Remembered(result, self._clock() + self._ttl_s), num_bytes)

    def forget(self, namespace: str, key: bytes) -> None:
        self._lru.pop((namespace, key))

    def stats(self) -> LRUStats:
        return self._lru.stats()
