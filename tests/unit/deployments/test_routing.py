"""Where requests go: always to the same replica, never to an overloaded one, and little moves when replicas change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.identity import ItemIdentity
from deployments.messages import GenerateRequest, MediaItem, SamplingParams
from deployments.routing import PREFIX_TOKENS, HashRing, Placer, item_key, other_session, prompt_key, session_id

names = st.sets(st.text("abcdef0123456789", min_size=1, max_size=6), min_size=1, max_size=12)
keys = st.text(max_size=12)
KEYS = [f"key-{i}" for i in range(1000)]


def idle(_: str) -> float:
    return 0.0


def place(router: Placer, session: str, load: Callable[[str], float] = idle) -> str | None:
    """The best replica, which takes the call."""
    ranked = router.rank(session, load)
    if not ranked:
        return None
    router.keep(session, ranked[0])
    return ranked[0]


def placer(replicas: set[str] | list[str], **options: float) -> Placer:
    made = Placer(**options)  # type: ignore[arg-type]
    made.set_replicas(replicas)
    return made


# -- the ring ----------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(names, keys)
def test_a_walk_meets_every_replica_once(replicas: set[str], key: str) -> None:
    assert sorted(HashRing(replicas).walk(key)) == sorted(replicas)


@settings(deadline=None)
@given(names, st.text("xyz", min_size=1, max_size=4), keys)
def test_a_new_replica_takes_keys_and_moves_none_between_the_others(replicas: set[str], new: str, key: str) -> None:
    before, after = list(HashRing(replicas).walk(key)), list(HashRing({*replicas, new}).walk(key))
    assert [name for name in after if name != new] == before


def test_keys_are_shared_about_evenly_and_a_fifth_replica_takes_a_fifth() -> None:
    four, five = HashRing("abcd"), HashRing("abcde")
    owners = Counter(next(four.walk(key)) for key in KEYS)
    assert max(owners.values()) < 1.5 * len(KEYS) / 4
    moved = sum(next(four.walk(key)) != next(five.walk(key)) for key in KEYS)
    assert 0.1 * len(KEYS) < moved < 0.3 * len(KEYS)


# -- bounded load ------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(names, keys, st.data(), st.floats(1.01, 4), st.integers(1, 16))
def test_no_replica_gets_more_than_the_bound(
    replicas: set[str], key: str, data: st.DataObject, bound: float, min_bound: int
) -> None:
    loads: Mapping[str, int] = {name: data.draw(st.integers(0, 100)) for name in sorted(replicas)}
    chosen = place(placer(replicas, bound=bound, min_bound=min_bound), session_id(key or "k"), loads.__getitem__)
    assert chosen is not None
    mean = (sum(loads.values()) + 1) / len(loads)
    assert loads[chosen] + 1 <= max(min_bound, bound * mean + 1)


@settings(deadline=None)
@given(names, keys.filter(bool))
def test_below_the_bound_a_key_goes_to_its_owner_from_every_caller(replicas: set[str], key: str) -> None:
    key = key.replace("/", "-")
    first, second = placer(replicas), placer(sorted(replicas, reverse=True))
    owner = next(HashRing(replicas).walk(key))
    assert place(first, session_id(key)) == place(second, session_id(key)) == owner


def test_a_hot_key_spreads_no_wider_than_it_must() -> None:
    loads: Counter[str] = Counter()
    router = placer(list("abcd"), bound=1.25, min_bound=4)
    for _ in range(4):
        loads[place(router, session_id("hot"), lambda name: loads[name]) or ""] += 1
    assert len(loads) == 1
    for _ in range(396):
        loads[place(router, session_id("hot"), lambda name: loads[name]) or ""] += 1
    assert max(loads.values()) <= 1.25 * 100 + 1


@settings(deadline=None)
@given(names, keys, st.data())
def test_when_the_best_replica_cannot_take_a_call_every_other_one_may(
    replicas: set[str], key: str, data: st.DataObject
) -> None:
    loads: Mapping[str, int] = {name: data.draw(st.integers(0, 100)) for name in sorted(replicas)}
    session = session_id(key.replace("/", "-"), "r")
    router = placer(replicas)
    ranked = router.rank(session, loads.__getitem__)
    assert sorted(ranked) == sorted(replicas)
    router.keep(session, ranked[-1])  # that one took it
    assert router.rank(session_id("", "r"), loads.__getitem__) == [ranked[-1]]


# -- one request, one replica ------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(names, st.lists(st.tuples(keys, st.integers(0, 20)), max_size=60), st.data())
def test_all_calls_of_a_request_reach_the_replica_of_its_first(
    replicas: set[str], calls: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Whatever the load does meanwhile, and though later calls bring no key."""
    router, given_to = placer(replicas), {}
    for key, number in calls:
        load = data.draw(st.integers(0, 50))
        request_id = f"r{number}"
        key = "" if request_id in given_to else key.replace("/", "-")
        chosen = place(router, session_id(key, request_id), lambda name, load=load: load * len(name))
        assert given_to.setdefault(request_id, chosen) == chosen


def test_a_request_whose_replica_is_gone_gets_another_one_and_keeps_that() -> None:
    router = placer(list("abc"))
    first = place(router, session_id("k", "r"))
    router.set_replicas(set("abc") - {first or ""})
    second = place(router, session_id("", "r"))
    assert second not in (first, None)
    router.set_replicas("abc")
    assert place(router, session_id("", "r")) == second


def test_it_remembers_no_more_requests_than_it_may() -> None:
    router = placer(["a", "b"], max_sessions=2)
    for i in range(10):
        place(router, session_id("k", f"r{i}"))
    assert len(router._sessions) == 2


def test_without_replicas_there_is_no_place() -> None:
    assert place(Placer(), session_id("k")) is None


@pytest.mark.parametrize(("option", "value"), [("bound", 1), ("min_bound", 0), ("points", 0), ("max_sessions", 0)])
def test_a_wrong_option_is_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        placer([], **{option: value})


# -- keys --------------------------------------------------------------------------------------------------------------
def picture(name: bytes, offset: int) -> MediaItem:
    return MediaItem(
        modality="image", identity=ItemIdentity(name * 32), grid=(1, 2, 2), offset=offset, num_slots=1, num_patches=4
    )


def request(tokens: list[int], *items: MediaItem, namespace: str = "", salt: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=1),
        items=items,
        namespace=namespace,
        cache_salt=salt,
    )


def test_questions_about_one_picture_go_together() -> None:
    one = request([1, 2, 9, 3], picture(b"a", 2))
    assert prompt_key(one) == prompt_key(request([1, 2, 9, 7, 8], picture(b"a", 2)))
    assert prompt_key(one) != prompt_key(request([1, 2, 9, 3], picture(b"b", 2)))
    assert prompt_key(one) != prompt_key(request([1, 5, 9, 3], picture(b"a", 2)))


def test_a_prompt_of_nothing_but_a_picture_has_a_key() -> None:
    assert prompt_key(request([9], picture(b"a", 0))) != prompt_key(request([9], picture(b"b", 0)))


def test_turns_of_one_long_conversation_go_together_and_others_do_not() -> None:
    start = list(range(PREFIX_TOKENS))
    assert prompt_key(request([*start, 1])) == prompt_key(request([*start, 1, 2, 3]))
    assert prompt_key(request([*start, 1])) == prompt_key(request([*start, 9], picture(b"a", PREFIX_TOKENS)))
    assert prompt_key(request([5, *start])) != prompt_key(request(start))


def test_tenants_and_salts_share_no_key() -> None:
    found = {prompt_key(request([1], namespace=n, salt=s)) for n, s in (("", ""), ("a", ""), ("", "a"), ("a", "a"))}
    assert len(found) == 4


def test_the_same_item_has_the_same_key_in_every_prompt() -> None:
    assert item_key(picture(b"a", 0)) == item_key(picture(b"a", 7)) != item_key(picture(b"b", 0))


# -- elsewhere ---------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(names, st.data())
def test_a_repeated_call_goes_to_any_replica_but_the_one_that_has_it(replicas: set[str], data: st.DataObject) -> None:
    router = placer(replicas)
    ranked = router.rank(session_id("key", "r.1"), idle)
    taker = data.draw(st.sampled_from(ranked))
    router.keep(session_id("key", "r.1"), taker)
    others = [name for name in ranked if name != taker]
    assert router.rank(other_session("key", "r.1"), idle) == (others or [taker])


@settings(deadline=None)
@given(names.filter(lambda replicas: len(replicas) > 1))
def test_a_call_that_none_has_taken_is_repeated_past_the_replica_it_was_offered_to(replicas: set[str]) -> None:
    """A replica that hangs never says that it took a call."""
    router = placer(replicas)
    loads = dict.fromkeys(replicas, 0)
    owner, *_ = router.rank(session_id("key", "r.0"), loads.__getitem__)
    loads[owner] = 50
    first, *others = router.rank(session_id("key", "r.1"), loads.__getitem__)
    loads[owner] = 0  # meanwhile the owner would be first again
    assert sorted(router.rank(other_session("key", "r.1"), loads.__getitem__)) == sorted(others)
    assert first not in router.rank(other_session("key", "r.1"), loads.__getitem__)


def test_a_repeated_call_leaves_no_trace() -> None:
    router = placer("ab")
    first, second = router.rank(session_id("key", "r.1"), idle)
    router.keep(other_session("key", "r.1"), second)
    assert router.rank(session_id("key", "r.1"), idle) == [first, second]


def test_what_is_remembered_of_calls_is_bounded() -> None:
    router = placer("ab", max_sessions=8)
    for i in range(100):
        router.rank(session_id("key", f"r.{i}"), idle)
    assert len(router._offered) == 8
