import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.circuit_breaker import BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, *, start_open: bool = False) -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, open_s=10, probe_timeout_s=2, start_open=start_open, clock=clock)


def test_only_failures_in_a_row_open_it() -> None:
    breaker = make(Clock())
    for _ in range(10):
        breaker.call_failed()
        breaker.call_failed()
        assert breaker.allows_calls()
        breaker.call_succeeded()
    for _ in range(3):
        breaker.call_failed()
    assert not breaker.allows_calls()
    assert breaker.state is BreakerState.OPEN
    assert breaker.stats().times_opened == 1


def test_one_probe_after_the_rest_closes_or_prolongs() -> None:
    clock = Clock()
    breaker = make(clock)
    for _ in range(3):
        breaker.call_failed()
    clock.now += 9.9
    assert not breaker.try_probe()
    clock.now += 0.1
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.try_probe()
    assert not breaker.try_probe()
    breaker.probe_failed()
    assert breaker.state is BreakerState.OPEN
    clock.now += 9.9
    assert not breaker.try_probe()
    clock.now += 0.1
    assert breaker.try_probe()
    assert not breaker.allows_calls()
    breaker.probe_succeeded()
    assert breaker.allows_calls()
    assert breaker.stats().failures_in_row == 0


def test_a_probe_that_never_reports_is_replaced() -> None:
    clock = Clock()
    breaker = make(clock, start_open=True)
    assert breaker.try_probe()
    clock.now += 1.9
    assert not breaker.try_probe()
    clock.now += 0.1
    assert breaker.try_probe()


def test_late_results_of_calls_neither_close_nor_prolong() -> None:
    clock = Clock()
    breaker = make(clock)
    for _ in range(3):
        breaker.call_failed()
    clock.now += 5
    breaker.call_succeeded()
    assert not breaker.allows_calls()
    breaker.call_failed()
    clock.now += 5
    assert breaker.try_probe()
    assert breaker.stats().times_opened == 1


def test_starting_open_a_probe_is_due_at_once() -> None:
    breaker = make(Clock(), start_open=True)
    assert not breaker.allows_calls()
    assert breaker.try_probe()
    breaker.probe_succeeded()
    assert breaker.state is BreakerState.CLOSED


@given(st.lists(st.sampled_from(["ok", "fail", "probe", "probe_ok", "probe_fail", "wait"]), max_size=60))
def test_it_always_recovers(events: list[str]) -> None:
    clock = Clock()
    breaker = make(clock)
    probing = False
    for event in events:
        if event == "ok":
            breaker.call_succeeded()
        elif event == "fail":
            breaker.call_failed()
        elif event == "probe":
            probing = breaker.try_probe() or probing
        elif event == "wait":
            clock.now += 3
        elif probing:
            (breaker.probe_succeeded if event == "probe_ok" else breaker.probe_failed)()
            probing = False
        assert breaker.allows_calls() == (breaker.state is BreakerState.CLOSED)
    clock.now += 10
    if not breaker.allows_calls():
        assert breaker.try_probe()
        breaker.probe_succeeded()
    assert breaker.allows_calls()


@pytest.mark.parametrize("options", [{"failure_threshold": 0}, {"open_s": 0}, {"probe_timeout_s": -1}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError):
        CircuitBreaker(**options)
