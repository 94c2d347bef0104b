"""Whose metrics are shown when some replicas are silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.last_pages import LastPages

REPLICAS = "abcd"


def ages(shown: list) -> dict[str, float]:
    return {page.replica: page.age_s for page in shown}


def test_a_silent_replica_shows_its_last_page_and_its_age() -> None:
    pages: LastPages[int] = LastPages()
    pages.update({"a": 1, "b": 2}, 0, now_s=10)
    shown = pages.update({"a": 3}, 1, now_s=25)
    assert {(page.replica, page.page, page.age_s) for page in shown} == {("a", 3, 0), ("b", 2, 15)}
    assert ages(pages.update({"a": 4, "b": 5}, 0, now_s=30)) == {"a": 0, "b": 0}


def test_a_replica_that_is_no_longer_asked_has_ended() -> None:
    pages: LastPages[int] = LastPages()
    pages.update({"a": 1, "b": 2}, 0, now_s=10)
    assert ages(pages.update({"a": 1}, 0, now_s=11)) == {"a": 0}
    assert ages(pages.update({}, 1, now_s=12)) == {"a": 1}


def test_of_a_dead_and_a_silent_one_the_later_heard_is_kept() -> None:
    pages: LastPages[int] = LastPages()
    pages.update({"old": 1, "new": 1}, 0, now_s=0)
    pages.update({"new": 1}, 1, now_s=5)
    assert ages(pages.update({}, 1, now_s=6)) == {"new": 1}


@given(st.lists(st.tuples(st.sets(st.sampled_from(REPLICAS)), st.integers(0, 4)), max_size=20))
def test_answers_are_shown_as_they_are_and_no_more_silent_ones_than_there_are(
    rounds: list[tuple[set[str], int]],
) -> None:
    pages: LastPages[int] = LastPages()
    last: dict[str, int] = {}
    for now, (answering, num_silent) in enumerate(rounds):
        shown = pages.update(dict.fromkeys(answering, now), num_silent, now)
        last |= dict.fromkeys(answering, now)
        fresh = {page.replica for page in shown if page.age_s == 0}
        assert fresh == answering
        assert len(shown) <= len(answering) + num_silent
        assert all(page.page == last[page.replica] and page.age_s == now - page.page for page in shown)
