"""Which embeddings are resident or on their way, who holds them, and what goes when room is needed.

Bookkeeping only: tensors live in the embedding store, which learns of evictions from the step plan. An entry is

    pending, held        being encoded for a running sequence              stays
    pending, not held    being encoded ahead for a waiting one             goes last, the newest first
    ready, held          rows of it are still to be used                   stays
    ready, not held      idle: used already, or not yet                    goes first, the least recently used first

Slots are reserved when an encode starts, so a result always has a place. Several holders share one entry.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cache_service.identity import EmbeddingIdentity


@dataclass(slots=True, eq=False)
class EmbedEntry:
    identity: EmbeddingIdentity
    num_slots: int
    requester: str
    """Sequence the encode was started for."""
    ticket: int
    """Number of the encode, to tell a late answer from that of a later encode of the same item."""
    ready: bool = False
    num_holders: int = 0


class EmbedCache:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._entries: dict[EmbeddingIdentity, EmbedEntry] = {}
        self._idle: OrderedDict[EmbeddingIdentity, EmbedEntry] = OrderedDict()
        self._ahead: OrderedDict[EmbeddingIdentity, EmbedEntry] = OrderedDict()
        self._evicted: list[EmbeddingIdentity] = []
        self._used_slots = 0
        self._held_slots = 0
        self._ahead_slots = 0
        self._num_tickets = 0
        self.num_evictions = 0

    @property
    def free_slots(self) -> int:
        """Slots without an entry."""
        return self.num_slots - self._used_slots

    @property
    def held_slots(self) -> int:
        return self._held_slots

    @property
    def ahead_slots(self) -> int:
        """Slots of encodes in flight that no running sequence holds."""
        return self._ahead_slots

    @property
    def idle_slots(self) -> int:
        return self._used_slots - self._held_slots - self._ahead_slots

    @property
    def num_pending(self) -> int:
        return sum(not entry.ready for entry in self._entries.values())

    def get(self, identity: EmbeddingIdentity) -> EmbedEntry | None:
        """The entry, resident or on its way; changes nothing."""
        return self._entries.get(identity)

    def can_reserve(self, num_slots: int) -> bool:
        """Whether slots can be had for a running sequence, by evicting all that nobody holds."""
        return num_slots <= self.num_slots - self._held_slots

    def can_reserve_ahead(self, num_slots: int, protected_slots: int) -> bool:
        """Whether slots can be had for a waiting sequence: only idle entries make room, less the protected ones."""
        return num_slots <= self.free_slots + self.idle_slots - protected_slots

    def reserve(self, identity: EmbeddingIdentity, num_slots: int, requester: str) -> EmbedEntry:
        """New pending entry that nobody holds yet; evicts what must go. `can_reserve` must hold."""
        if identity in self._entries or not self.can_reserve(num_slots):
            raise ValueError(f"cannot reserve {num_slots} slots: {self._held_slots} of {self.num_slots} are held")
        while num_slots > self.free_slots:
            pool, last = (self._idle, False) if self._idle else (self._ahead, True)
            self.evict(next(reversed(pool) if last else iter(pool)))
        self._num_tickets += 1
        entry = EmbedEntry(identity, num_slots, requester, self._num_tickets)
        self._entries[identity] = self._ahead[identity] = entry
        self._used_slots += num_slots
        self._ahead_slots += num_slots
        return entry

    def hold(self, identity: EmbeddingIdentity) -> EmbedEntry:
        """One more holder of an entry; it stays until each holder has released it."""
        entry = self._entries[identity]
        if entry.num_holders == 0:
            if entry.ready:
                del self._idle[identity]
            else:
                del self._ahead[identity]
                self._ahead_slots -= entry.num_slots
            self._held_slots += entry.num_slots
        entry.num_holders += 1
        return entry

    def release(self, identity: EmbeddingIdentity) -> None:
        """One holder less; without any the entry becomes the most recently used idle one."""
        entry = self._entries[identity]
        if entry.num_holders < 1:
            raise ValueError("released an embedding that nobody holds")
        entry.num_holders -= 1
        if entry.num_holders == 0:
            self._held_slots -= entry.num_slots
            if entry.ready:
                self._idle[identity] = entry
            else:
                self._ahead[identity] = entry
                self._ahead_slots += entry.num_slots

    def touch(self, identity: EmbeddingIdentity) -> None:
        """Make an idle entry the last of the idle ones to go."""
        if identity in self._idle:
            self._idle.move_to_end(identity)

    def evict(self, identity: EmbeddingIdentity) -> None:
        """Forget an entry that nobody holds; the plan tells the store to drop its tensor or to cancel its encode."""
        entry = self._entries[identity]
        if entry.num_holders:
            raise ValueError("evicted an embedding that is held")
        self._remove(entry)
        self._evicted.append(identity)
        self.num_evictions += 1

    def mark_ready(self, identity: EmbeddingIdentity) -> bool:
        """The embedding has arrived; False if nobody reserved it (any more), so that it must be dropped."""
        entry = self._entries.get(identity)
        if entry is None or entry.ready:
            return False
        entry.ready = True
        if entry.num_holders == 0:
            del self._ahead[identity]
            self._ahead_slots -= entry.num_slots
            self._idle[identity] = entry
        return True

    def discard(self, identity: EmbeddingIdentity) -> None:
        """Forget an entry that has no tensor (its encode failed), once its holders have released it."""
        self._remove(self._entries[identity])

    @property
    def has_evicted(self) -> bool:
        """Whether `drain_evicted` has anything to tell."""
        return bool(self._evicted)

    def drain_evicted(self) -> tuple[EmbeddingIdentity, ...]:
        """Entries evicted since the last call, in order."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def holders(self) -> dict[EmbeddingIdentity, int]:
        """Number of holders of each held entry."""
        return {identity: entry.num_holders for identity, entry in self._entries.items() if entry.num_holders}

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sums and lists agree with the entries."""
        entries = self._entries.values()
        assert self._used_slots == sum(e.num_slots for e in entries), "used slots do not add up"
        assert self._held_slots == sum(e.num_slots for e in entries if e.num_holders), "held slots do not add up"
        assert 0 <= self._used_slots <= self.num_slots, f"{self._used_slots} of {self.num_slots} slots used"
        unheld = {i: e for i, e in self._entries.items() if not e.num_holders}
        assert dict(self._idle) == {i: e for i, e in unheld.items() if e.ready}, "idle list disagrees with entries"
        assert dict(self._ahead) == {i: e for i, e in unheld.items() if not e.ready}, "ahead list disagrees"
        assert self._ahead_slots == sum(e.num_slots for e in self._ahead.values()), "ahead slots do not add up"

    def _remove(self, entry: EmbedEntry) -> None:
        if entry.num_holders:
            raise ValueError("removed an embedding that is held")
        del self._entries[entry.identity]
        self._used_slots -= entry.num_slots
        if entry.ready:
            del self._idle[entry.identity]
        else:
            del self._ahead[entry.identity]
            self._ahead_slots -= entry.num_slots
