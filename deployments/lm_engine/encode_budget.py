"""Decides which encodes start in a step and which sequences hold which embeddings.

Three budgets: slots and input patches of the encodes that one step starts, and the slots of the embedding cache. Two
rules make it free of deadlock and starvation:

    in order        a sequence holds its remaining items from the first on, without gaps, so whoever holds an item can
                    always use what it holds and let go
    no overtaking   once a sequence is denied slots for the item it needs next, no later sequence may hold anything new
                    in this step: slots drain until the denied one, served earlier in every step, fits

An item further ahead than the next one is a bonus: being denied it closes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from cache_service.identity import EmbeddingIdentity
from deployments.lm_engine.embed_cache import EmbedCache
from deployments.lm_engine.plan import EmbedSlice, EncodeStart
from deployments.lm_engine.request import Sequence, SequenceItem
from deployments.lm_engine.stats import DenialCounter


class EncodeBudget:
    """Args:
    cache: The embedding slots.
    max_slots_per_step, max_patches_per_step: Of the encodes of one step; each at least one worst-case item.
    """

    def __init__(
        self, cache: EmbedCache, *, max_slots_per_step: int, max_patches_per_step: int, denials: DenialCounter
    ) -> None:
        self._cache = cache
        self._max_slots = max_slots_per_step
        self._max_patches = max_patches_per_step
        self._denials = denials
        self._starts: list[EncodeStart] = []
        self._slots_left = max_slots_per_step
        self._patches_left = max_patches_per_step
        self._slots_closed = False
        self._encodes_closed = False
        self.num_hits = 0
        self.num_starts = 0

    # -- one step ------------------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        self._starts = []
        self._slots_left, self._patches_left = self._max_slots, self._max_patches
        self._slots_closed = self._encodes_closed = False

    def take_starts(self) -> tuple[EncodeStart, ...]:
        """The encodes this step starts, except those evicted again in the same step."""
        starts = []
        for start in self._starts:
            entry = self._cache.get(start.identity)
            if entry is not None and entry.ticket == start.ticket:
                starts.append(start)
        return tuple(starts)

    @property
    def admits_items(self) -> bool:
        """False once a sequence was denied slots in this step: later ones must not hold anything new."""
        return not self._slots_closed

    # -- running sequences ---------------------------------------------------------------------------------------------
    def begin(self, sequence: Sequence, num_computed_tokens: int) -> bool:
        """Hold what a sequence about to run needs; False, with nothing held, if its next item is denied.

        Args:
            num_computed_tokens: Positions the prefix cache covers; items that end before them are not needed.
        """
        items = sequence.items
        while sequence.first_item < len(items) and items[sequence.first_item].end <= num_computed_tokens:
            sequence.first_item += 1
        sequence.held_end = sequence.first_item
        self.hold_items(sequence)
        if sequence.held_end > sequence.first_item or sequence.first_item == len(items):
            return True
        sequence.first_item = sequence.held_end = 0
        return False

    def hold_items(self, sequence: Sequence) -> None:
        """Hold the sequence's remaining items in prompt order, as far as the budgets go; start missing encodes."""
        items = sequence.items
        while sequence.held_end < len(items) and self._hold(sequence, items[sequence.held_end]):
            sequence.held_end += 1

    def ready_end(self, sequence: Sequence) -> int:
        """First position that cannot be computed yet for want of an embedding; all known tokens if none is missing."""
        for item in sequence.items[sequence.first_item : sequence.held_end]:
            entry = self._cache.get(item.identity)
            if entry is None or not entry.ready:
                return item.offset
        if sequence.held_end < len(sequence.items):
            return sequence.items[sequence.held_end].offset
        return sequence.num_tokens

    def release_computed(self, sequence: Sequence) -> None:
        """Let go of the items whose last slot is computed."""
        items = sequence.items
        while sequence.first_item < len(items) and items[sequence.first_item].end <= sequence.num_computed_tokens:
            self._cache.release(items[sequence.first_item].identity)
            sequence.first_item += 1

    def release_from(self, sequence: Sequence, identity: EmbeddingIdentity) -> None:
        """Let go of an item and those after it; the sequence asks for them again in the next step."""
        index = next(i for i in range(sequence.first_item, sequence.held_end) if sequence.items[i].identity == identity)
        for item in sequence.items[index : sequence.held_end]:
            self._cache.release(item.identity)
        sequence.held_end = index

    def holds(self, sequence: Sequence, identity: EmbeddingIdentity) -> bool:
        held = sequence.items[sequence.first_item : sequence.held_end]
        return any(item.identity == identity for item in held)

    def release_all(self, sequence: Sequence) -> None:
        """Let go of all items; the sequence will need them again from the first on, if it goes on at all."""
        for item in sequence.items[sequence.first_item : sequence.held_end]:
            self._cache.release(item.identity)
        sequence.first_item = sequence.held_end = 0

    def cancel_pending(self, sequence: Sequence, living: Container[str]) -> None:
        """Give up encodes of an ended sequence's items that nobody holds and whose requester is not `living`."""
        for item in sequence.items:
            entry = self._cache.get(item.identity)
            if entry is not None and not entry.ready and not entry.num_holders and entry.requester not in living:
                self._cache.evict(item.identity)

    # -- waiting sequences ---------------------------------------------------------------------------------------------
    def start_ahead(self, waiting: Iterable[tuple[Sequence, int]]) -> None:
        """Start encodes for sequences that do not run yet, first come first served, while slots are free.

        What an earlier one finds resident is protected from making room for a later one.

        Args:
            waiting: (sequence, tokens of it that the prefix cache is expected to hold), next to run first.
        """
        protected: dict[EmbeddingIdentity, int] = {}
        protected_slots = 0
        for sequence, num_cached_tokens in waiting:
            for item in sequence.items:
                if item.end <= num_cached_tokens or item.identity in protected:
                    continue
                entry = self._cache.get(item.identity)
                if entry is None:
                    if self._slots_closed or self._encodes_closed or not self._fits_step(item):
                        return
                    if not self._cache.can_reserve_ahead(item.num_slots, protected_slots):
                        return
                    self._start(sequence, item)
                elif entry.ready and not entry.num_holders:
                    self._cache.touch(item.identity)
                    protected[item.identity] = item.num_slots
                    protected_slots += item.num_slots

    # -- a chunk -------------------------------------------------------------------------------------------------------
    @staticmethod
    def slices(sequence: Sequence, start: int, stop: int) -> tuple[EmbedSlice, ...]:
        """Rows of the sequence's embeddings that stand at positions [start, stop); `start` is what is computed."""
        slices = []
        for item in sequence.items[sequence.first_item :]:
            if item.offset >= stop:
                break
            first, last = max(start, item.offset), min(stop, item.end)
            slices.append(EmbedSlice(item.identity, first - start, first - item.offset, last - first))
        return tuple(slices)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _hold(self, sequence: Sequence, item: SequenceItem) -> bool:
        needed_next = sequence.held_end == sequence.first_item
        if self._slots_closed:
            return False
        if self._cache.get(item.identity) is not None:
            self._cache.hold(item.identity)
            self.num_hits += 1
            return True
        if self._encodes_closed:
            return False
        if not self._fits_step(item):
            self._denials.deferred("encoder_slots" if item.num_slots > self._slots_left else "encoder_patches")
            self._encodes_closed = needed_next
            return False
        if not self._cache.can_reserve(item.num_slots):
            self._denials.deferred("embedding_slots")
            self._slots_closed = needed_next
            return False
        self._start(sequence, item)
        self._cache.hold(item.identity)
        return True

    def _fits_step(self, item: SequenceItem) -> bool:
        return item.num_slots <= self._slots_left and item.num_patches <= self._patches_left

    def _start(self, sequence: Sequence, item: SequenceItem) -> None:
        entry = self._cache.reserve(item.identity, item.num_slots, sequence.sequence_id)
        self._slots_left -= item.num_slots
        self._patches_left -= item.num_patches
        self._starts.append(EncodeStart(item.identity, item.media, sequence.sequence_id, entry.ticket))
        self.num_starts += 1
