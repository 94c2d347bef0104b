"""Waiting for what is under way, on a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.drain import InFlight, drain


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


class Replicas:
    """Give one answer after the other, the last one for ever; each takes a while."""

    def __init__(self, clock: Clock, answers: Sequence[InFlight], answer_s: float = 0.0) -> None:
        self._clock, self._answers, self._answer_s = clock, list(answers), answer_s
        self.asked = 0

    async def ask(self) -> InFlight:
        self._clock.now_s += self._answer_s
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def run(replicas: Replicas, clock: Clock, timeout_s: float = 60.0, hurry_at_s: float = float("inf")) -> InFlight:
    return await drain(
        replicas.ask,
        timeout_s=timeout_s,
        report=lambda seconds, in_flight: None,
        is_hurried=lambda: clock.now_s - 100.0 >= hurry_at_s,
        clock=clock,
        sleep=clock.sleep,
    )


async def test_it_ends_with_the_last_request() -> None:
    clock = Clock()
    replicas = Replicas(clock, [InFlight(3), InFlight(3), InFlight(1), InFlight(0)])
    assert (await run(replicas, clock)).is_over
    assert replicas.asked == 4


@pytest.mark.parametrize("left", [InFlight(2), InFlight(0, silent_replicas=1)])
async def test_what_is_left_at_the_limit_is_told_and_a_silent_replica_counts(left: InFlight) -> None:
    clock = Clock()
    assert await run(Replicas(clock, [InFlight(5), left]), clock, timeout_s=7.0) == left
    assert clock.now_s == pytest.approx(107.0, abs=0.011)


async def test_no_time_at_all_means_one_question() -> None:
    clock = Clock()
    replicas = Replicas(clock, [InFlight(5)])
    assert await run(replicas, clock, timeout_s=0.0) == InFlight(5)
    assert (replicas.asked, clock.now_s) == (1, 100.0)


async def test_a_hurry_ends_the_wait() -> None:
    clock = Clock()
    assert await run(Replicas(clock, [InFlight(5)]), clock, hurry_at_s=3.0) == InFlight(5)
    assert clock.now_s < 104.0


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    timeout_s=st.floats(0, 20),
    answer_s=st.floats(0, 3),
)
async def test_it_never_ends_early_and_never_late(counts: list[int], timeout_s: float, answer_s: float) -> None:
    clock = Clock()
    left = await run(Replicas(clock, [InFlight(n) for n in counts], answer_s), clock, timeout_s)
    assert left.is_over or clock.now_s - 100.0 >= timeout_s - 1e-9
    assert clock.now_s - 100.0 <= timeout_s + answer_s + 0.011


def test_sums_and_words() -> None:
    assert sum((InFlight(1), InFlight(2, 1)), InFlight()) == InFlight(3, 1)
    assert str(InFlight(3)) == "3 requests under way"
    assert str(InFlight(3, 1)) == "3 requests under way, 1 replicas do not answer"
