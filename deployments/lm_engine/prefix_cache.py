"""Finds KV blocks of equal prefixes. A key covers everything the block's values depend on.

Equal placeholder tokens say nothing about the picture behind them, so each block's key names the items in it and where
they begin relative to the block; the chain covers everything before.

    block 1 [t t t P]      key = (None, tokens, [(X, 3)])        X begins at position 3 of the block
    block 2 [P P P P]      key = (key of 1, tokens, [(X, -1)])   X began one position before the block
"""

from __future__ import annotations

from cache_service.identity import BlockKey, EmbeddingIdentity, block_key
from deployments.lm_engine.block_pool import BlockPool
from deployments.lm_engine.request import Sequence


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute; changes no block.

        Valid until the next allocation; whoever uses the blocks pins them first.
        """
        blocks: list[int] = []
        for index in range((sequence.num_tokens - 1) // self._block_size):
            block = self._pool.find(self.key(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def commit(self, sequence: Sequence, num_blocks: int) -> None:
        """Make the sequence's first `num_blocks` blocks findable; all their positions are computed."""
        for index in range(sequence.num_committed_blocks, num_blocks):
            self._pool.set_key(sequence.block_ids[index], self.key(sequence, index))
        sequence.num_committed_blocks = num_blocks

    def key(self, sequence: Sequence, index: int) -> BlockKey:
        """Key of the sequence's full block `index`; keys before it are made and kept on the way."""
        keys = sequence.block_keys
        while len(keys) <= index:
            start = len(keys) * self._block_size
            stop = start + self._block_size
            keys.append(
                block_key(
                    keys[-1] if keys else None,
                    sequence.token_ids[start:stop],
                    _items_between(sequence, start, stop),
                    adapter=sequence.adapter,
                    cache_salt=_tenant_salt(sequence),
                )
            )
        return keys[index]


def _items_between(sequence: Sequence, start: int, stop: int) -> list[tuple[EmbeddingIdentity, int]]:
    if not sequence.items or start >= sequence.items[-1].end:
        return []
    return [(item.identity, item.offset - start) for item in sequence.items if item.offset < stop and item.end > start]


def _tenant_salt(sequence: Sequence) -> str:
    """Namespace and the caller's salt in one string; the length keeps ("a", "bc") and ("ab", "c") apart."""
    return f"{len(sequence.namespace)}:{sequence.namespace}{sequence.cache_salt}"
