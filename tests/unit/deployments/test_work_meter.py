"""Work in, work out, and what the replica could do."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.work_meter import CapacityEstimate, WorkMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_arrivals_queue_and_capacity_of_a_busy_replica() -> None:
    clock = Clock()
    meter = WorkMeter(clock=clock)
    with meter.doing(300), meter.doing(100):
        clock.now_s += 2.0
        load = meter.read()
        assert (load.queued, load.arrived_per_s, load.capacity_per_s) == (400, 200.0, 0.0)
    load = meter.read()
    assert (load.queued, load.arrived_per_s) == (0, 0.0)
    clock.now_s += 2.0
    with meter.doing(100):
        clock.now_s += 2.0
    assert meter.read().capacity_per_s == 200.0


def test_time_without_work_does_not_lower_the_capacity() -> None:
    clock = Clock()
    meter = WorkMeter(clock=clock)
    for _ in range(3):
        with meter.doing(50):
            clock.now_s += 1.0
        clock.now_s += 60.0
    assert meter.read().capacity_per_s == 50.0


def test_one_item_on_two_slots_is_half_the_replica() -> None:
    clock = Clock()
    meter = WorkMeter(slots=2, clock=clock)
    for _ in range(4):
        with meter.doing(50):
            clock.now_s += 1.0
    assert meter.read().capacity_per_s == 100.0


def test_the_best_recent_window_counts_and_is_forgotten_in_time() -> None:
    estimate = CapacityEstimate(window_s=1.0, num_windows=2)
    estimate.add(100, 1.0)
    estimate.add(10, 1.0)
    assert estimate.per_s == 100.0
    estimate.add(20, 1.0)
    assert estimate.per_s == 20.0


def test_work_that_failed_was_not_done() -> None:
    clock = Clock()
    meter = WorkMeter(clock=clock)

    def fail() -> None:
        with meter.doing(50):
            clock.now_s += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert meter.read().queued == 0
    assert meter.read().capacity_per_s == 0.0


def test_it_is_stalled_only_while_items_wait_and_none_ends() -> None:
    clock = Clock()
    meter = WorkMeter(clock=clock)
    clock.now_s += 500.0
    assert meter.stalled_s == 0.0
    with meter.doing(1):
        assert meter.stalled_s == 0.0
        clock.now_s += 5.0
        with meter.doing(1):
            clock.now_s += 5.0
            assert meter.stalled_s == 10.0
        assert meter.stalled_s == 0.0
        clock.now_s += 1.0
        assert meter.stalled_s == 1.0
    assert meter.stalled_s == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0.001, 2)), min_size=1, max_size=40), st.integers(1, 8))
def test_nothing_is_left_and_nothing_arrives_twice(jobs: list[tuple[float, float]], slots: int) -> None:
    clock = Clock()
    meter = WorkMeter(slots=slots, clock=clock)
    began_s = clock.now_s
    with ExitStack() as stack:
        for work, seconds in jobs:
            stack.enter_context(meter.doing(work))
            clock.now_s += seconds
        load = meter.read()
        assert load.queued == pytest.approx(sum(work for work, _ in jobs))
        assert load.arrived_per_s * (clock.now_s - began_s) == pytest.approx(sum(work for work, _ in jobs))
    clock.now_s += 1.0
    assert meter.read().queued == 0
    assert meter.read().arrived_per_s == 0.0
