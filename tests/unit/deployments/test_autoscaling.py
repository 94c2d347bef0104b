"""Autoscaling by work: the number never flaps, follows the load, and works inside Serve's own mechanism."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.autoscaling import (
    ARRIVED_WORK_PER_S,
    CPU_LOAD,
    KV_USE,
    PROMPT_TOKENS_PER_S,
    QUEUED_WORK,
    SEAT_USE,
    WAITING_TOKENS,
    WORK_PER_S,
    EnginePolicy,
    Load,
    Metrics,
    WorkPolicy,
    decide,
    work_stats,
)
from deployments.work_meter import WorkLoad

loads = st.builds(Load, st.floats(0, 100), st.floats(0, 100))
targets = st.integers(1, 64)
slacks = st.floats(0, 2)


@dataclass
class FakeContext:
    """The part of Serve's AutoscalingContext that a policy reads."""

    metrics: Metrics | None
    current_num_replicas: int = 1
    target_num_replicas: int = 1
    total_num_requests: float = 0.0

    @property
    def aggregated_metrics(self) -> Metrics | None:
        return self.metrics


def reports(*replicas: Mapping[str, float]) -> Metrics:
    """As Serve gives them: by metric, then by replica."""
    names = {name for replica in replicas for name in replica}
    return {name: {i: replica[name] for i, replica in enumerate(replicas) if name in replica} for name in names}


# -- decide ------------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(loads, targets, slacks)
def test_a_decision_holds_the_load_and_no_more_than_slack_asks_for(load: Load, target: int, slack: float) -> None:
    wanted = decide(load, target=target, is_starting=False, slack=slack)
    total = load.steady + load.backlog
    assert wanted >= total - 1e-6
    assert wanted <= max(target, math.ceil(total))


@settings(deadline=None)
@given(loads, targets, slacks)
def test_a_decision_stands_when_it_is_asked_again(load: Load, target: int, slack: float) -> None:
    wanted = decide(load, target=target, is_starting=False, slack=slack)
    assert decide(load, target=wanted, is_starting=False, slack=slack) == wanted


@settings(deadline=None)
@given(st.floats(0.1, 50), st.lists(st.floats(0, 1), min_size=2, max_size=30), targets, st.floats(0.05, 1))
def test_a_load_that_moves_less_than_the_slack_never_makes_it_rise_after_a_fall(
    low: float, wobble: list[float], target: int, slack: float
) -> None:
    """The load stays within [low, low * (1 + slack)]."""
    numbers = [target]
    for share in wobble:
        load = Load(low * (1 + slack * share), 0.0)
        numbers.append(decide(load, target=numbers[-1], is_starting=False, slack=slack))
    changes = [after - before for before, after in pairwise(numbers) if after != before]
    fallen = False
    for change in changes:
        assert not (fallen and change > 0), f"rose after it fell: {numbers}"
        fallen = fallen or change < 0


@settings(deadline=None)
@given(loads, loads, targets, slacks, st.booleans())
def test_more_load_never_means_fewer_replicas(a: Load, b: Load, target: int, slack: float, is_starting: bool) -> None:
    more = Load(a.steady + b.steady, a.backlog + b.backlog)
    few = decide(a, target=target, is_starting=is_starting, slack=slack)
    assert decide(more, target=target, is_starting=is_starting, slack=slack) >= few


@settings(deadline=None)
@given(st.floats(0, 100), targets)
def test_a_backlog_that_grows_while_replicas_start_asks_for_no_more(backlog: float, target: int) -> None:
    load = Load(steady=float(target), backlog=backlog)
    assert decide(load, target=target, is_starting=True, slack=0.25) == target
    assert decide(load, target=target, is_starting=False, slack=0.25) == math.ceil(target + backlog - 1e-9)


# -- stages of known work ----------------------------------------------------------------------------------------------
def test_steady_work_is_shared_at_the_target_use_and_a_backlog_is_cleared_in_time() -> None:
    policy = WorkPolicy(target_use=0.5, drain_s=10, assumed_work_per_s=1.0)
    load = policy.load(reports({QUEUED_WORK: 2_000, ARRIVED_WORK_PER_S: 100, WORK_PER_S: 100}))
    assert (load.steady, load.backlog) == (2.0, 2.0)


def test_an_unmeasured_replica_is_taken_at_what_the_others_can_do() -> None:
    policy = WorkPolicy(target_use=1.0, assumed_work_per_s=1e9)
    first = {QUEUED_WORK: 0.0, ARRIVED_WORK_PER_S: 100.0}
    assert policy.load(reports({**first, WORK_PER_S: 50.0}, first)).steady == 4.0
    assert policy.load(reports(first)).steady == pytest.approx(1e-7)  # nobody was measured


def test_the_cpu_counts_where_it_is_the_tighter_bound() -> None:
    policy = WorkPolicy(target_use=1.0, target_cpu=0.5)
    report = {QUEUED_WORK: 0.0, ARRIVED_WORK_PER_S: 100.0, WORK_PER_S: 100.0, CPU_LOAD: 1.0}
    assert policy.load(reports(report)).steady == 2.0
    assert policy.load(reports({**report, CPU_LOAD: 0.1})).steady == 1.0


def test_the_same_number_of_requests_with_larger_pictures_asks_for_more() -> None:
    policy = WorkPolicy()
    small = {QUEUED_WORK: 1e4, ARRIVED_WORK_PER_S: 1e4, WORK_PER_S: 1e5}
    large = {QUEUED_WORK: 1e6, ARRIVED_WORK_PER_S: 1e6, WORK_PER_S: 1e5}
    assert policy(FakeContext(reports(small)))[0] == 1
    assert policy(FakeContext(reports(large)))[0] > 10


# -- the LM engine -----------------------------------------------------------------------------------------------------
def test_the_engine_counts_what_is_held_and_what_waits() -> None:
    policy = EnginePolicy(target_use=0.5, drain_s=10)
    report = {WAITING_TOKENS: 30_000.0, KV_USE: 0.9, SEAT_USE: 0.3, PROMPT_TOKENS_PER_S: 1_000.0}
    load = policy.load(reports(report, {WAITING_TOKENS: 0.0, KV_USE: 0.1, SEAT_USE: 0.6}))
    assert (load.steady, load.backlog) == (3.0, 3.0)


def test_an_engine_that_is_full_grows_before_anything_waits() -> None:
    full = {WAITING_TOKENS: 0.0, KV_USE: 1.0, SEAT_USE: 0.1}
    assert EnginePolicy()(FakeContext(reports(full)))[0] == 2


# -- both --------------------------------------------------------------------------------------------------------------
IDLE_WORK = {QUEUED_WORK: 0.0, ARRIVED_WORK_PER_S: 0.0}
IDLE_ENGINE = {WAITING_TOKENS: 0.0, KV_USE: 0.0, SEAT_USE: 0.0}
POLICIES = pytest.mark.parametrize(
    ("policy", "idle"), [(WorkPolicy(), IDLE_WORK), (EnginePolicy(), IDLE_ENGINE)], ids=["work", "engine"]
)


@POLICIES
def test_idle_replicas_go_down_to_the_bounds_that_serve_keeps(
    policy: WorkPolicy | EnginePolicy, idle: dict[str, float]
) -> None:
    context = FakeContext(reports(idle, idle, idle), current_num_replicas=3, target_num_replicas=3)
    assert policy(context)[0] == 0
    context.total_num_requests = 1.0
    assert policy(context)[0] == 1


@POLICIES
def test_what_is_not_known_changes_nothing(policy: WorkPolicy | EnginePolicy, idle: dict[str, float]) -> None:
    assert policy(FakeContext(None, current_num_replicas=2, target_num_replicas=3))[0] == 3
    assert policy(FakeContext({}, current_num_replicas=2, target_num_replicas=3))[0] == 3
    assert policy(FakeContext(reports(idle), current_num_replicas=0, target_num_replicas=0))[0] == 0
    silent = FakeContext(reports(idle), current_num_replicas=2, target_num_replicas=2)
    assert policy(silent)[0] == 2  # one of the two says nothing


@pytest.mark.parametrize("policy", [WorkPolicy, EnginePolicy])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "10"])
def test_a_wrong_option_is_named(policy: type[WorkPolicy] | type[EnginePolicy], value: object) -> None:
    with pytest.raises(ValueError, match="drain_s"):
        policy(drain_s=value)  # type: ignore[arg-type]


def test_a_reading_without_a_capacity_reports_none() -> None:
    assert WORK_PER_S not in work_stats(WorkLoad(5.0, 1.0, 0.0))
    assert work_stats(WorkLoad(5.0, 1.0, 2.0)) == {QUEUED_WORK: 5.0, ARRIVED_WORK_PER_S: 1.0, WORK_PER_S: 2.0}


@pytest.mark.parametrize("name", ["WorkPolicy", "EnginePolicy"])
def test_serve_can_carry_the_policy_to_a_controller_without_the_project(name: str, tmp_path: Path) -> None:
    from ray.serve.config import AutoscalingPolicy

    policy = AutoscalingPolicy(policy_function=f"deployments.autoscaling:{name}", policy_kwargs={"drain_s": 3})
    path = tmp_path / "policy.pickle"
    path.write_bytes(policy.get_serialized_policy_def() or b"")
    script = f"""
import pickle, sys, types
sys.modules["deployments"] = None  # importing the project fails, as where it is not installed
policy = pickle.load(open({str(path)!r}, "rb"))(drain_s=3)
context = types.SimpleNamespace(
    current_num_replicas=1, target_num_replicas=1, total_num_requests=1.0, aggregated_metrics=None)
assert policy(context)[0] == 1
context.aggregated_metrics = {{policy.reported: {{0: 1e12}}}}
assert policy(context)[0] > 1
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
