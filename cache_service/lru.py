"""A byte-bounded LRU map: the one eviction policy of every in-process cache. Knows nothing about what it holds.

Entries are of three kinds, and only the middle kind is ever given up:

    pinned (in use, never evicted)  |  evictable, least recently used first  |  refused (does not fit)

Not thread-safe: one event loop or one lock owns it. `get`, `put`, `pin` and `unpin` are O(1); a `put` also pays for the
entries that it evicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class LRUStats:
    """A snapshot; the counters only grow, `entries`, `bytes` and the pinned ones go both ways."""

    entries: int
    bytes: int
    pinned_entries: int
    pinned_bytes: int
    hits: int
    misses: int
    evictions: int
    refusals: int
    """`put`s that did not fit: larger than the capacity, or than what is not pinned."""


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    num_bytes: int
    pins: int = 0


class ByteLRU(Generic[K, V]):
    """Map that holds at most `capacity_bytes`, as told by its callers, and forgets the least recently used first.

    Args:
        capacity_bytes: Upper bound of the sum of all entries' `num_bytes`, at every moment. 0 holds nothing.
        on_evict: Called with (key, value) after an entry was given up for want of room; not for `pop`, `clear` and
            replacement, where the caller knows. It must not change the map.
    """

    def __init__(self, capacity_bytes: int, *, on_evict: Callable[[K, V], None] | None = None) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be 0 or more: {capacity_bytes = }")
        self.capacity_bytes = capacity_bytes
        self._on_evict = on_evict
        self._entries: dict[K, _Entry[V]] = {}
        self._evictable: OrderedDict[K, None] = OrderedDict()  # least recently used first; no pinned keys
        self._bytes = 0
        self._pinned_bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._refusals = 0

    # -- look-up ------------------------------------------------------------------------------------------------------
    def get(self, key: K) -> V | None:
        """The value, now the most recently used one; None if unknown. Counts a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._touch(key, entry)
        return entry.value

    def peek(self, key: K) -> V | None:
        """The value without touching the order or the counters."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """All keys, in no useful order. The map must not change while iterating."""
        return iter(self._entries)

    # -- change -------------------------------------------------------------------------------------------------------
    def can_put(self, key: K, num_bytes: int) -> bool:
        """Whether `put` would store the entry. Never mutates."""
        old = self._entries.get(key)
        if old is not None and old.pins:
            return False
        return 0 <= num_bytes <= self.capacity_bytes - self._pinned_bytes

    def put(self, key: K, value: V, num_bytes: int) -> bool:
        """Store as the most recently used entry, evicting others as needed.

        Returns False and changes nothing if the entry can't fit beside the pinned ones, or would replace a pinned one.

        Args:
            num_bytes: What the entry costs, key and book-keeping included if the caller cares; 0 or more.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be 0 or more: {num_bytes = }")
        if not self.can_put(key, num_bytes):
            self._refusals += 1
            return False
        if key in self._entries:
            self._remove(key)
        while self._bytes + num_bytes > self.capacity_bytes:
            self._evict_one()
        self._entries[key] = _Entry(value, num_bytes)
        self._evictable[key] = None
        self._bytes += num_bytes
        return True

    def pop(self, key: K) -> V | None:
        """Forget an entry and return its value; None if unknown. A pinned entry raises ValueError."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.pins:
            raise ValueError(f"a pinned entry cannot be removed: {entry.pins = }")
        return self._remove(key).value

    def clear(self) -> None:
        """Forget everything that is not pinned."""
        for key in list(self._evictable):
            self._remove(key)

    # -- pins ---------------------------------------------------------------------------------------------------------
    def pin(self, key: K) -> V | None:
        """The value, kept from eviction until a matching `unpin`; None (and nothing to unpin) if unknown.

        Pins nest. Counts a hit or a miss, as `get` does.
        """
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        if entry.pins == 0:
            del self._evictable[key]
            self._pinned_bytes += entry.num_bytes
        entry.pins += 1
        return entry.value

    def unpin(self, key: K) -> None:
        """Undo one `pin`. The last one makes the entry evictable again, as the most recently used one."""
        entry = self._entries.get(key)
        if entry is None or entry.pins == 0:
            raise ValueError("unpin without a matching pin")
        entry.pins -= 1
        if entry.pins == 0:
            self._evictable[key] = None
            self._pinned_bytes -= entry.num_bytes

    @contextmanager
    def pinned(self, key: K) -> Iterator[V | None]:
        """`with lru.pinned(key) as value:` holds the entry for the block; `value` is None if the key is unknown."""
        value = self.pin(key)
        known = key in self._entries
        try:
            yield value
        finally:
            if known:
                self.unpin(key)

    # -- state --------------------------------------------------------------------------------------------------------
    @property
    def num_bytes(self) -> int:
        return self._bytes

    def stats(self) -> LRUStats:
        return LRUStats(
            entries=len(self._entries),
            bytes=self._bytes,
            pinned_entries=len(self._entries) - len(self._evictable),
            pinned_bytes=self._pinned_bytes,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refusals=self._refusals,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the books don't balance."""
        pinned = {key for key, entry in self._entries.items() if entry.pins}
        assert pinned.isdisjoint(self._evictable), "a pinned entry is evictable"
        assert pinned | set(self._evictable) == set(self._entries), "an entry is neither pinned nor evictable"
        assert all(entry.pins >= 0 and entry.num_bytes >= 0 for entry in self._entries.values())
        assert self._bytes == sum(entry.num_bytes for entry in self._entries.values()), "bytes drifted"
        assert self._pinned_bytes == sum(self._entries[key].num_bytes for key in pinned), "pinned bytes drifted"
        assert self._bytes <= self.capacity_bytes, "over capacity"

    def _touch(self, key: K, entry: _Entry[V]) -> None:
        if entry.pins == 0:
            self._evictable.move_to_end(key)

    def _remove(self, key: K) -> _Entry[V]:
        entry = self._entries.pop(key)
        del self._evictable[key]
        self._bytes -= entry.num_bytes
        return entry

    def _evict_one(self) -> None:
        key = next(iter(self._evictable))
        value = self._remove(key).value
        self._evictions += 1
        if self._on_evict is not None:
            self._on_evict(key, value)
