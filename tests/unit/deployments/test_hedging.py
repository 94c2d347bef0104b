"""When a call is made twice, which answer counts, and that neither a slow deployment nor chance makes it a storm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import MediaError, ReplicaLostError
from deployments.hedging import OVERHEAD_PATCHES, Answer, HedgeBudget, Hedger, HedgingConfig, Patience
from tests.unit.deployments.engine_replicas import until

seconds = st.floats(1e-4, 1e3)
patches = st.integers(1, 100_000)
CONFIG = HedgingConfig(quantile=0.9, factor=2.0, min_s=0.01, initial_s=5.0, min_samples=4)


# -- patience ----------------------------------------------------------------------------------------------------------
def taught(samples: list[tuple[int, float]], config: HedgingConfig = CONFIG, window: int = 64) -> Patience:
    patience = Patience(config, window=window)
    for num_patches, taken_s in samples:
        patience.observe(num_patches, taken_s)
    return patience


def test_until_enough_has_been_seen_patience_is_the_initial_one() -> None:
    assert taught([(100, 0.1)] * 3).seconds(100) == 5.0
    assert taught([(100, 0.1)] * 4).seconds(100) == pytest.approx(0.2)


def test_patience_is_the_factor_times_the_quantile_of_equal_items() -> None:
    samples = [(1000, (i + 1) / 100) for i in range(10)]
    assert taught(samples).seconds(1000) == pytest.approx(2 * 0.10)
    assert taught(samples, HedgingConfig(quantile=0.5, factor=1.0, min_s=0, min_samples=4)).seconds(
        1000
    ) == pytest.approx(0.06)


def test_patience_scales_with_the_patches_of_an_item() -> None:
    patience = taught([(OVERHEAD_PATCHES, 1.0)] * 8)
    assert patience.seconds(OVERHEAD_PATCHES) == pytest.approx(2.0)
    assert patience.seconds(3 * OVERHEAD_PATCHES) == pytest.approx(4.0)


@given(st.lists(st.tuples(patches, seconds), max_size=150), patches, patches)
def test_patience_is_never_below_the_floor_nor_less_for_more_patches(
    samples: list[tuple[int, float]], one: int, other: int
) -> None:
    patience = taught(samples)
    small, large = sorted((one, other))
    assert CONFIG.min_s <= patience.seconds(small) <= patience.seconds(large)


@given(st.lists(st.tuples(patches, seconds), min_size=64, max_size=64), st.lists(st.tuples(patches, seconds)), patches)
def test_only_the_window_counts(
    recent: list[tuple[int, float]], older: list[tuple[int, float]], num_patches: int
) -> None:
    assert taught(older + recent).seconds(num_patches) == taught(recent).seconds(num_patches)


# -- the budget --------------------------------------------------------------------------------------------------------
@given(st.lists(st.booleans()), st.floats(0, 1), st.integers(1, 8))
def test_second_calls_are_never_more_than_the_share_and_the_burst(wanted: list[bool], share: float, burst: int) -> None:
    budget, taken = HedgeBudget(share, burst), 0
    for number, wants in enumerate(wanted, 1):
        budget.note_call()
        taken += wants and budget.take()
        assert taken <= share * number + burst + 1e-6


def test_a_share_of_a_twentieth_allows_one_in_twenty() -> None:
    budget = HedgeBudget(0.05, 1)
    taken = 0
    for _ in range(2000):
        budget.note_call()
        taken += budget.take()
    assert taken == 1 + 1999 // 20


WRONG = {
    "quantile": (0, 1.1),
    "factor": (0.5,),
    "min_s": (-1,),
    "initial_s": (-1,),
    "min_samples": (0,),
    "max_share": (-0.1, 1.5),
    "burst": (0,),
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option in WRONG for value in WRONG[option]])
def test_wrong_options_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"hedging\.{option} is {value}"):
        HedgingConfig(**{option: value})


# -- calls -------------------------------------------------------------------------------------------------------------
class Replica:
    """Answers with its name once told to; knows what was cancelled."""

    def __init__(self, name: str) -> None:
        self.name, self.calls, self.cancelled = name, 0, 0
        self._answer: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._ready = False

    async def call(self) -> Answer[str]:
        self.calls += 1
        if not self._ready:
            self._answer = asyncio.get_running_loop().create_future()
            try:
                await self._answer
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self._error is not None:
            raise self._error
        return Answer(self.name)

    def answer(self, error: Exception | None = None) -> None:
        self._ready, self._error = True, error
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)


class Rig:
    """A hedger without patience, and two replicas."""

    def __init__(self, **options: Any) -> None:
        config = HedgingConfig(**{"min_s": 0, "initial_s": 0, "max_share": 0, "burst": 1, **options})
        self.hedger = Hedger(config, is_final=lambda error: isinstance(error, MediaError))
        self.first, self.second = Replica("first"), Replica("second")

    def run(self) -> asyncio.Task[str]:
        return asyncio.create_task(self.hedger.run(100, self.first.call, self.second.call))


async def test_a_quick_answer_makes_no_second_call() -> None:
    rig = Rig(initial_s=30)
    rig.first.answer()
    assert await rig.run() == "first"
    assert (rig.second.calls, rig.hedger.outcomes) == (0, {})


async def test_the_second_replica_answers_for_one_that_hangs_whose_call_is_cancelled() -> None:
    rig = Rig()
    rig.second.answer()
    assert await rig.run() == "second"
    await until(lambda: rig.first.cancelled == 1)
    assert rig.hedger.outcomes == {"won": 1}


async def test_the_first_one_may_still_win() -> None:
    rig = Rig()
    asked = rig.run()
    await until(lambda: rig.second.calls)
    rig.first.answer()
    assert await asked == "first"
    await until(lambda: rig.second.cancelled == 1)
    assert rig.hedger.outcomes == {"lost": 1}


async def test_a_failed_second_call_leaves_the_first_one_to_answer() -> None:
    rig = Rig()
    rig.second.answer(ReplicaLostError("gone"))
    asked = rig.run()
    await until(lambda: rig.hedger.outcomes["failed"])
    rig.first.answer()
    assert await asked == "first"


async def test_a_failed_first_call_leaves_the_second_one_to_answer() -> None:
    rig = Rig()
    asked = rig.run()
    await until(lambda: rig.second.calls)
    rig.first.answer(ReplicaLostError("gone"))
    await asyncio.sleep(0.01)
    assert not asked.done()
    rig.second.answer()
    assert await asked == "second"
    assert rig.hedger.outcomes == {"won": 1}


async def test_an_error_that_stands_is_not_waited_upon() -> None:
    rig = Rig()
    rig.second.answer(MediaError("no picture"))
    with pytest.raises(MediaError):
        await rig.run()
    await until(lambda: rig.first.cancelled == 1)


async def test_when_both_fail_the_error_is_raised() -> None:
    rig = Rig()
    rig.first.answer(ReplicaLostError("gone"))
    with pytest.raises(ReplicaLostError):
        await rig.run()
    rig = Rig()
    asked = rig.run()
    await until(lambda: rig.second.calls)
    rig.second.answer(ReplicaLostError("second"))
    await until(lambda: rig.hedger.outcomes["failed"])
    rig.first.answer(ReplicaLostError("first"))
    with pytest.raises(ReplicaLostError, match="first"):
        await asked


async def test_who_gives_up_cancels_both() -> None:
    rig = Rig()
    asked = rig.run()
    await until(lambda: rig.second.calls)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: rig.first.cancelled == rig.second.cancelled == 1)
    assert rig.hedger.outcomes == {"cancelled": 1}


async def test_beyond_the_budget_a_call_is_waited_for() -> None:
    rig = Rig()
    other = Replica("hangs")
    hung = asyncio.create_task(rig.hedger.run(100, other.call, other.call))
    await until(lambda: other.calls == 2)
    asked = rig.run()
    await until(lambda: rig.hedger.outcomes["over_budget"])
    rig.first.answer()
    assert await asked == "first"
    assert rig.second.calls == 0
    assert rig.hedger.outcomes == {"over_budget": 1}
    hung.cancel()


async def test_a_call_that_was_denied_is_made_twice_once_the_budget_allows_it() -> None:
    rig = Rig(max_share=0.5, min_s=0.002, initial_s=0.002)
    hangs = Replica("hangs")
    hung = asyncio.create_task(rig.hedger.run(100, hangs.call, hangs.call))
    await until(lambda: hangs.calls == 2)
    rig.second.answer()
    asked = rig.run()
    await until(lambda: rig.hedger.outcomes["over_budget"])
    quick = Replica("quick")
    quick.answer()
    for _ in range(2):
        await rig.hedger.run(100, quick.call, quick.call)
    assert await asked == "second"
    hung.cancel()


async def test_switched_off_nothing_is_called_twice() -> None:
    rig = Rig(enabled=False)
    asked = rig.run()
    await asyncio.sleep(0.02)
    rig.first.answer()
    assert await asked == "first"
    assert (rig.second.calls, rig.hedger.outcomes) == (0, {})


def test_a_replica_that_hangs_does_not_teach_patience() -> None:
    """Each of these calls waits for the patience to end: were that time learnt, patience would grow without bound."""
    now = 0.0

    def taking(replica_s: float) -> Callable[[], Coroutine[Any, Any, Answer[str]]]:
        async def call() -> Answer[str]:
            nonlocal now
            if replica_s:
                now += replica_s
                return Answer("")
            await asyncio.Event().wait()
            raise AssertionError

        return call

    async def go() -> None:
        config = HedgingConfig(min_s=0.001, initial_s=0.001, min_samples=1, burst=64, factor=2.0)
        hedger = Hedger(config, clock=lambda: now)
        for _ in range(40):
            await hedger.run(1, taking(0), taking(0.0005))
        assert hedger.outcomes == {"won": 40}
        assert hedger._patience.seconds(1) == pytest.approx(0.001)

    asyncio.run(asyncio.wait_for(go(), 20))


def test_cache_hits_do_not_teach_patience() -> None:
    async def hit() -> Answer[str]:
        return Answer("", is_typical=False)

    async def go() -> None:
        hedger = Hedger(CONFIG)
        for _ in range(10):
            await hedger.run(1, hit, hit)
        assert hedger._patience.seconds(1) == CONFIG.initial_s

    asyncio.run(go())
