"""KV blocks by number: who uses them, which are free, which can be found again. Knows no tokens and no tensors.

Every block is in exactly one place:

    ref_count > 0                     used by that many sequences
    ref_count = 0, with a key         free and cached: found by key until it is handed out again
    ref_count = 0, without a key      free

Free blocks form a doubly linked list through two arrays, so that taking one out of the middle (a cache hit) is O(1).
The least recently used end is handed out first; blocks without a key go there, since nobody can want them back.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache_service.identity import BlockKey


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        # Circular list; index num_blocks is the sentinel: its next is the least recently used block.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    @property
    def num_keys(self) -> int:
        """Blocks that can be found by key, used or free."""
        return len(self._block_of)

    def find(self, key: BlockKey) -> int | None:
        """Block holding `key`; changes nothing. The answer is valid until the next `allocate`."""
        return self._block_of.get(key)

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody uses, so that pinning them shrinks `num_free`."""
        return sum(self._ref_counts[block] == 0 for block in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one reference; their old keys are forgotten."""
        if count > self._num_free:
            raise ValueError(f"asked for {count} blocks, {self._num_free} are free")
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def pin(self, block_ids: Iterable[int]) -> None:
        """One more reference to each block, free or used."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                self._unlink(block)
            self._ref_counts[block] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less; blocks without any become free, earlier ones of `block_ids` to be reused first."""
        for block in block_ids:
            if self._ref_counts[block] < 1:
                raise ValueError(f"block {block} is already free")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                head = self.num_blocks
                self._link(block, self._prev[head] if self._keys[block] is not None else head)

    def set_key(self, block: int, key: BlockKey) -> None:
        """Make a used block findable. If another block has the key already, that one stays the one found."""
        if self._keys[block] is None and key not in self._block_of:
            self._keys[block] = key
            self._block_of[key] = block

    def forget_keys(self) -> int:
        """Forget all keys; returns how many there were. Blocks in use stay in use."""
        count = len(self._block_of)
        self._block_of.clear()
        self._keys = [None] * self.num_blocks
        return count

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one place."""
        free, block, previous = set(), self._next[self.num_blocks], self.num_blocks
        while block != self.num_blocks:
            assert block not in free, f"block {block} is twice in the free list"
            assert self._ref_counts[block] == 0, f"free block {block} has {self._ref_counts[block]} references"
            assert self._prev[block] == previous, f"block {block} is linked one way only"
            free.add(block)
            previous, block = block, self._next[block]
        assert len(free) == self._num_free, f"{len(free)} blocks in the free list, {self._num_free} counted"
        unused = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert unused == free, f"blocks {unused ^ free} are neither used nor free"
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keyed == self._block_of, "keys of blocks and blocks of keys disagree"

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._block_of[key]
            self.num_evictions += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._num_free += 1
