from __future__ import annotations

from deployments.lm_engine.request import Sequence
from deployments.lm_engine.siblings import Siblings
from tests.unit.lm_engine.host_side import text


def three() -> tuple[Siblings, list[Sequence]]:
    siblings, choices = Siblings(), [text("r" if i == 0 else f"r#{i}", 4, index=i) for i in range(3)]
    assert [siblings.join(choice) for choice in choices] == [False, True, True]
    return siblings, choices


def test_followers_are_released_by_their_leader_alone() -> None:
    siblings, (leader, second, third) = three()
    assert siblings.any_waiting
    assert siblings.release(second) == []
    assert second in siblings
    assert siblings.release(leader) == [second, third]
    assert second not in siblings
    assert not siblings.any_waiting


def test_an_ended_leader_is_succeeded_by_the_first_follower() -> None:
    siblings, (leader, second, third) = three()
    assert siblings.leave(leader) is second
    assert third in siblings
    assert siblings.release(second) == [third]


def test_an_ended_follower_needs_no_successor() -> None:
    siblings, (leader, second, third) = three()
    assert siblings.leave(second) is None
    assert siblings.release(leader) == [third]


def test_nothing_is_left_of_a_request_whose_choices_ended() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        siblings, choices = three()
        for index in order:
            siblings.leave(choices[index])
        assert len(siblings) == 0


def test_requests_do_not_wait_for_each_other() -> None:
    siblings = Siblings()
    assert not siblings.join(text("a", 4))
    assert not siblings.join(text("b", 4))
