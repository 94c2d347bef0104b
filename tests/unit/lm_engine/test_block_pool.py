from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cache_service.identity import BlockKey
from deployments.lm_engine.block_pool import BlockPool


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def test_blocks_without_a_key_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(1), pool.allocate(1)
    pool.set_key(cached[0], key(1))
    pool.release(cached)
    pool.release(plain)
    assert pool.allocate(1) == plain
    assert pool.find(key(1)) == cached[0]


def test_the_least_recently_released_cached_block_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.set_key(block, key(number))
    pool.release([blocks[1], blocks[0], blocks[2]])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find(key(1)) is None
    assert pool.find(key(0)) == blocks[0]
    assert pool.num_evictions == 1


def test_a_pinned_block_leaves_the_free_list_and_survives_until_its_last_release() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.set_key(block[0], key(1))
    pool.release(block)
    assert pool.num_idle(block) == 1
    pool.pin(block)
    pool.pin(block)
    assert (pool.num_free, pool.num_idle(block)) == (1, 0)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    pool.check_integrity()


def test_equal_contents_keep_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.set_key(first, key(1))
    pool.set_key(second, key(1))
    assert pool.find(key(1)) == first
    pool.release([second])
    assert pool.find(key(1)) == first
    pool.check_integrity()


def test_a_block_keeps_its_key_while_in_use_and_forgets_it_on_reset() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.set_key(block, key(1))
    assert pool.forget_keys() == 1
    assert pool.find(key(1)) is None
    pool.release([block])
    pool.check_integrity()


def test_misuse_is_refused() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="asked for 2 blocks, 1 are free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="already free"):
        pool.release([0])


def test_integrity_sees_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._num_free = 2
    with pytest.raises(AssertionError, match="1 blocks in the free list, 2 counted"):
        pool.check_integrity()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("afpkr"), st.integers(0, 9)), max_size=40))
def test_any_use_keeps_every_block_in_one_place(num_blocks: int, steps: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(num_blocks), list[int]()
    for action, number in steps:
        if action == "a" and pool.num_free:
            held += pool.allocate(1 + number % pool.num_free)
        elif action == "f" and held:
            pool.release([held.pop(number % len(held))])
        elif action == "p":
            block = pool.find(key(number))
            if block is not None:
                pool.pin([block])
                held.append(block)
        elif action == "k" and held:
            pool.set_key(held[number % len(held)], key(number))
        elif action == "r":
            pool.forget_keys()
        pool.check_integrity()
        assert pool.num_used == len(set(held))
        assert all(pool.ref_count(block) == held.count(block) for block in range(num_blocks))
