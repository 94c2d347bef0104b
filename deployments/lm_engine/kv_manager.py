"""Gives sequences the KV blocks they need and takes them back. Knows no tensors; `can_x` changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Blocks

from deployments.lm_engine.block_pool import BlockPool
from deployments.lm_engine.prefix_cache import PrefixCache
from deployments.lm_engine.request import Sequence


class KVManager:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._prefix_cache = PrefixCache(self.pool, block_size) if enable_prefix_caching else None

    @property
    def caches_prefixes(self) -> bool:
        return self._prefix_cache is not None

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's longest prefix, at least one token short of all it knows."""
        return [] if self._prefix_cache is None else self._prefix_cache.find(sequence)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to add so that the sequence's first `num_tokens` positions have a place."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_ids))

    def can_allocate(self, sequence: Sequence, num_tokens: int, *, prefix: Blocks[int] = (), spare: int = 0) -> bool:
        """Whether positions [0, num_tokens) can have a place, with `spare` blocks left over.

        Args:
            prefix: Answer of `find_prefix`, for a sequence that has no blocks yet. Pinning a free cached block takes
                it from the free ones too.
        """
        needed = self.missing_blocks(sequence, num_tokens) - len(prefix) + self.pool.num_idle(prefix)
        return needed + spare <= self.pool.num_free

    def adopt_prefix(self, sequence: Sequence, prefix: Blocks[int]) -> None:
        """Pin cached blocks as the sequence's first ones; their positions count as computed."""
        self.pool.pin(prefix)
        sequence.block_ids.extend(prefix)
        sequence.num_computed_tokens = len(prefix) * self.block_size
        sequence.num_committed_blocks = len(prefix)
        sequence.cacheable = True

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the blocks that positions [0, num_tokens) still lack; `can_allocate` must hold."""
        missing = self.missing_blocks(sequence, num_tokens)
        if missing:
            sequence.block_ids.extend(self.pool.allocate(missing))

    def commit(self, sequence: Sequence) -> None:
        """Make the blocks that are full of computed positions findable for others."""
        if self._prefix_cache is not None and sequence.cacheable:
            self._prefix_cache.commit(sequence, sequence.num_computed_tokens // self.block_size)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks back. The last ones are reused first, since a prefix is worth more than its tail."""
        self.pool.release(reversed(sequence.block_ids))
        sequence.block_ids.clear()
        sequence.num_computed_tokens = 0
        sequence.num_committed_blocks = 0

    def reset_prefix_cache(self, running: Iterable[Sequence]) -> int:
        """Forget every cached prefix; returns how many blocks were forgotten.

        Running sequences go on but cache nothing more: a later block of theirs must not be found behind a prefix
        that was computed after the reset.
        """
        for sequence in running:
            sequence.cacheable = False
        return self.pool.forget_keys()
