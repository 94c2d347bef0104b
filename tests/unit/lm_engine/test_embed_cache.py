from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deployments.lm_engine.embed_cache import EmbedCache
from tests.unit.lm_engine.host_side import identity_of

A, B, C = identity_of(1), identity_of(2), identity_of(3)


def ready(cache: EmbedCache, *numbers: int, slots: int = 4) -> None:
    for number in numbers:
        cache.reserve(identity_of(number), slots, "r")
        assert cache.mark_ready(identity_of(number))


def test_slots_are_reserved_before_the_result_comes() -> None:
    cache = EmbedCache(8)
    cache.reserve(A, 6, "r")
    cache.hold(A)
    assert cache.free_slots == 2
    assert not cache.can_reserve(3)
    assert cache.can_reserve(2)
    cache.check_integrity()


def test_a_released_entry_stays_and_hits_until_room_is_needed() -> None:
    cache = EmbedCache(8)
    ready(cache, 1)
    cache.hold(A)
    cache.release(A)
    assert cache.get(A) is not None
    assert cache.idle_slots == 4
    cache.reserve(B, 8, "r")
    assert cache.get(A) is None
    assert cache.drain_evicted() == (A,)
    assert cache.drain_evicted() == ()


def test_the_least_recently_used_idle_entry_goes_first() -> None:
    cache = EmbedCache(12)
    ready(cache, 1, 2, 3)
    cache.hold(A)
    cache.release(A)
    cache.touch(B)
    cache.reserve(identity_of(9), 4, "r")
    assert cache.drain_evicted() == (C,)


def test_encodes_ahead_go_after_idle_entries_and_the_newest_first() -> None:
    cache = EmbedCache(12)
    cache.reserve(A, 4, "r")
    cache.reserve(B, 4, "r")
    ready(cache, 3)
    cache.reserve(identity_of(8), 8, "r")
    assert cache.drain_evicted() == (C, B)


def test_what_is_held_is_never_evicted() -> None:
    cache = EmbedCache(8)
    ready(cache, 1, 2)
    cache.hold(A)
    assert not cache.can_reserve(8)
    with pytest.raises(ValueError, match="4 of 8 are held"):
        cache.reserve(C, 8, "r")
    with pytest.raises(ValueError, match="held"):
        cache.evict(A)


def test_an_entry_is_shared_until_the_last_holder_lets_go() -> None:
    cache = EmbedCache(4)
    ready(cache, 1)
    cache.hold(A)
    cache.hold(A)
    cache.release(A)
    assert cache.held_slots == 4
    cache.release(A)
    assert cache.held_slots == 0
    with pytest.raises(ValueError, match="nobody holds"):
        cache.release(A)


def test_ahead_only_takes_what_is_free_or_idle_and_not_protected() -> None:
    cache = EmbedCache(12)
    cache.reserve(A, 4, "r")
    ready(cache, 2)
    assert cache.can_reserve_ahead(8, protected_slots=0)
    assert not cache.can_reserve_ahead(8, protected_slots=4)
    assert not cache.can_reserve_ahead(9, protected_slots=0)
    assert cache.can_reserve(12)


def test_a_late_or_repeated_result_is_not_wanted() -> None:
    cache = EmbedCache(4)
    assert not cache.mark_ready(A)
    cache.reserve(A, 4, "r")
    cache.evict(A)
    assert not cache.mark_ready(A)
    ready(cache, 1)
    assert not cache.mark_ready(A)


def test_each_encode_has_a_ticket_of_its_own() -> None:
    cache = EmbedCache(4)
    first = cache.reserve(A, 4, "r").ticket
    cache.evict(A)
    assert cache.reserve(A, 4, "r").ticket != first


def test_questions_change_nothing() -> None:
    cache = EmbedCache(8)
    ready(cache, 1, 2)
    before = (cache.free_slots, cache.idle_slots, cache.held_slots)
    assert cache.can_reserve(8)
    assert cache.can_reserve_ahead(8, 0)
    assert cache.get(A) is not None
    assert (cache.free_slots, cache.idle_slots, cache.held_slots) == before
    assert not cache.has_evicted


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 12), st.lists(st.tuples(st.sampled_from("vhrmed"), st.integers(0, 5)), max_size=40))
def test_any_use_keeps_the_sums(num_slots: int, steps: list[tuple[str, int]]) -> None:
    cache, holds = EmbedCache(num_slots), list[int]()
    for action, number in steps:
        identity, entry = identity_of(number), cache.get(identity_of(number))
        if action == "v" and entry is None and cache.can_reserve(number + 1):
            cache.reserve(identity, number + 1, "r")
        elif action == "h" and entry is not None:
            cache.hold(identity)
            holds.append(number)
        elif action == "r" and number in holds:
            cache.release(identity)
            holds.remove(number)
        elif action == "m":
            cache.mark_ready(identity)
        elif action == "e" and entry is not None and not entry.num_holders:
            cache.evict(identity)
        elif action == "d" and entry is not None and not entry.num_holders and not entry.ready:
            cache.discard(identity)
        cache.check_integrity()
        assert cache.holders() == {identity_of(n): holds.count(n) for n in holds}
