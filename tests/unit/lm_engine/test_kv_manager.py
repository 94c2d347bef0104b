from __future__ import annotations

import pytest

from deployments.lm_engine.kv_manager import KVManager
from deployments.lm_engine.request import Sequence
from tests.unit.lm_engine.host_side import text


def computed(kv: KVManager, seq: Sequence) -> Sequence:
    kv.allocate(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    kv.commit(seq)
    return seq


def test_blocks_are_added_only_when_positions_lack_a_place() -> None:
    kv = KVManager(4, 4)
    seq = text("a", 6)
    kv.allocate(seq, 6)
    assert len(seq.block_ids) == 2
    kv.allocate(seq, 8)
    assert len(seq.block_ids) == 2
    assert kv.missing_blocks(seq, 9) == 1
    kv.free(seq)
    assert (seq.block_ids, seq.num_computed_tokens, kv.pool.num_used) == ([], 0, 0)


def test_can_allocate_changes_nothing_and_counts_idle_cached_blocks() -> None:
    kv = KVManager(4, 4)
    kv.free(computed(kv, text("a", 9)))
    second = text("b", 9)
    prefix = kv.find_prefix(second)
    assert len(prefix) == 2
    # Three blocks needed: two are pinned out of the four free ones, one is new.
    assert kv.can_allocate(second, 9, prefix=prefix, spare=1)
    assert not kv.can_allocate(second, 9, prefix=prefix, spare=2)
    assert (kv.pool.num_used, second.block_ids) == (0, [])
    # With the prefix in use already it costs nothing.
    third = text("c", 9)
    kv.adopt_prefix(third, prefix)
    assert kv.can_allocate(second, 9, prefix=prefix, spare=1)


def test_a_prefix_is_pinned_against_the_allocation_that_follows() -> None:
    kv = KVManager(3, 4)
    kv.free(computed(kv, text("a", 9)))
    second = text("b", 9)
    kv.adopt_prefix(second, kv.find_prefix(second))
    kv.allocate(second, 9)
    assert len(set(second.block_ids)) == 3
    assert second.num_computed_tokens == 8
    kv.free(second)
    kv.pool.check_integrity()


def test_the_tail_is_given_up_before_the_prefix() -> None:
    kv = KVManager(3, 4)
    kv.free(computed(kv, text("a", 12)))
    kv.pool.allocate(1)
    assert len(kv.find_prefix(text("b", 13))) == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVManager(8, 4, enable_prefix_caching=False)
    computed(kv, text("a", 9))
    assert kv.find_prefix(text("b", 9)) == []
    assert not kv.caches_prefixes


def test_after_a_reset_a_running_sequence_caches_nothing_more() -> None:
    """Else a block of before could be found behind a prefix of after."""
    kv = KVManager(8, 4)
    old = text("a", 12)
    kv.allocate(old, 12)
    old.num_computed_tokens = 4
    kv.commit(old)
    assert kv.reset_prefix_cache([old]) == 1
    old.num_computed_tokens = 12
    kv.commit(old)
    computed(kv, text("b", 4))
    assert len(kv.find_prefix(text("c", 13))) == 1


def test_allocating_more_than_there_is_fails_loudly() -> None:
    kv = KVManager(1, 4)
    with pytest.raises(ValueError, match="asked for 2"):
        kv.allocate(text("a", 8), 8)
