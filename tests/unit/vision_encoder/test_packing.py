"""Plans of batches: nothing lost, no limit broken, never dearer than greedy, often optimal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.vision_encoder.packing import (
    Batch,
    Budget,
    Capacity,
    Load,
    Planner,
    Rules,
    plan_batches,
    plan_smallest_first,
)

LIMIT = Capacity(slots=300, patches=1_200, items=6, segments=1_000, frames=20)


def load(slots: int, frames: int = 1) -> Load:
    return Load(slots, slots * 4, slots // 4 + 1, frames, slots * 4 // frames, (slots * 4) ** 2 // frames)


def budget(slots: int, cost_s: float, items: int = 6, frames: int = 12, pair_s: float = 0.0) -> Budget:
    return Budget(Capacity(slots, slots * 4, items, slots // 2 + 8, frames), cost_s, pair_s)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    slots = draw(st.lists(st.sampled_from([16, 32, 64, 96, 128, 256, 300]), unique=True, max_size=5).map(sorted))
    costs = sorted(draw(st.floats(0.1, 10.0)) for _ in slots)
    fixed, each = draw(st.floats(0.1, 5.0)), draw(st.floats(0.0, 0.1))
    most_bytes = draw(st.integers(300, 1_500))
    pair_s = draw(st.sampled_from([0.0, 1e-7, 1e-5]))
    return Rules(
        budgets=tuple(budget(s, c, draw(st.integers(1, 6)), pair_s=pair_s) for s, c in zip(slots, costs, strict=True)),
        limit=LIMIT,
        eager_cost_s=lambda load: fixed + each * load.slots + pair_s * load.pairs,
        admits=lambda load: load.patches <= most_bytes,
    )


def cost(batches: Sequence[Batch], loads: Sequence[Load], rules: Rules) -> float:
    return sum(rules.choose(sum((loads[i] for i in b.indices), Load()), len(b.indices))[0] for b in batches)


some_loads = st.lists(st.builds(load, st.integers(1, 300), st.integers(1, 4)), max_size=10)
planners = pytest.mark.parametrize("planner", [plan_batches, plan_smallest_first])


@planners
@given(loads=some_loads, rules=rules())
def test_every_item_runs_once_within_all_limits(planner: Planner, loads: list[Load], rules: Rules) -> None:
    batches = planner(loads, rules)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(loads)))
    for batch in batches:
        assert list(batch.indices) == sorted(batch.indices)
        assert batch.load == sum((loads[i] for i in batch.indices), Load())
        if len(batch.indices) > 1:
            assert rules.limit.shortage(batch.load, len(batch.indices)) is None
            assert rules.admits(batch.load)
        if batch.budget is None:
            assert bool(batch.reason) == bool(rules.budgets)
        else:
            (used,) = [b for b in rules.budgets if b.capacity.slots == batch.budget]
            assert used.capacity.shortage(batch.load, len(batch.indices)) is None


@given(loads=some_loads, rules=rules())
def test_planned_is_never_dearer_than_greedy(loads: list[Load], rules: Rules) -> None:
    planned = cost(plan_batches(loads, rules), loads, rules)
    assert planned <= cost(plan_smallest_first(loads, rules), loads, rules) + 1e-9


@given(loads=some_loads, rules=rules())
def test_planning_is_deterministic(loads: list[Load], rules: Rules) -> None:
    assert plan_batches(loads, rules) == plan_batches(loads, rules)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for at in range(len(smaller)):
            yield [*smaller[:at], [first, *smaller[at]], *smaller[at + 1 :]]
        yield [[first], *smaller]


@given(loads=st.lists(st.builds(load, st.integers(1, 300)), min_size=1, max_size=5), rules=rules())
def test_planned_lies_between_the_optimum_and_one_pass_an_item(loads: list[Load], rules: Rules) -> None:
    def price(groups: list[list[int]]) -> float:
        total = 0.0
        for group in groups:
            together = sum((loads[i] for i in group), Load())
            if not rules.allows(together, len(group)):
                return float("inf")
            total += rules.choose(together, len(group))[0]
        return total

    best = min(price(groups) for groups in partitions(list(range(len(loads)))))
    alone = price([[i] for i in range(len(loads))])
    assert best - 1e-9 <= cost(plan_batches(loads, rules), loads, rules) <= alone + 1e-9


def fixed_rules(*budgets: Budget, eager_s: float = 100.0) -> Rules:
    return Rules(budgets=budgets, limit=LIMIT, eager_cost_s=lambda load: eager_s)


def test_small_items_fill_the_slack_of_a_large_one() -> None:
    """No partition into sorted runs does this: 30 and 96 share the budget of 128, 60 and 64 the other."""
    loads = [load(60), load(96), load(30), load(64)]
    batches = plan_batches(loads, fixed_rules(budget(64, 1.0), budget(128, 1.5)))
    assert sum(b.budget or 0 for b in batches) <= 256
    assert all(b.budget is not None for b in batches)


def test_two_cheap_replays_beat_one_dear_one() -> None:
    batches = plan_batches([load(64), load(64)], fixed_rules(budget(64, 1.0), budget(128, 5.0)))
    assert [b.budget for b in batches] == [64, 64]


def test_small_items_are_run_together_though_one_large_item_of_their_size_would_cost_more() -> None:
    """Eight of 32 slots in one eager pass have an eighth of the pairs of one item of 256."""
    rules = Rules(
        budgets=(budget(32, 1.0, pair_s=1e-5), budget(256, 7.0, items=8, pair_s=1e-5)),
        limit=Capacity(300, 1_200, 8, 1_000, 20),
        eager_cost_s=lambda load: 100.0,
    )
    assert rules.choose(load(256), 1)[0] > 8 * rules.choose(load(32), 1)[0]
    assert [b.budget for b in plan_batches([load(32)] * 8, rules)] == [256]


def test_an_item_over_the_ladder_runs_eagerly_and_says_why() -> None:
    rules = Rules(budgets=(budget(64, 1.0),), limit=LIMIT, eager_cost_s=lambda load: float(load.slots))
    batches = plan_batches([load(200), load(16)], rules)
    assert {(b.indices, b.budget, b.reason) for b in batches} == {((0,), None, "slots"), ((1,), 64, "")}


def test_equal_slots_with_too_many_frames_do_not_fit() -> None:
    (batch,) = plan_batches([load(60, frames=15)], fixed_rules(budget(64, 1.0, frames=12)))
    assert (batch.budget, batch.reason) == (None, "frames")


def test_an_eager_pass_that_is_cheaper_than_the_padded_budget_is_taken() -> None:
    (batch,) = plan_batches([load(130)], fixed_rules(budget(256, 2.0), eager_s=1.0))
    assert (batch.budget, batch.reason) == (None, "cheaper")


@pytest.mark.parametrize(
    ("asked", "short"),
    [
        (Load(9, 16, 4, 2), "slots"),
        (Load(8, 17, 4, 2), "patches"),
        (Load(8, 16, 5, 2), "segments"),
        (Load(8, 16, 4, 3), "frames"),
        (Load(8, 16, 4, 2), None),
    ],
)
def test_every_dimension_is_checked(asked: Load, short: str | None) -> None:
    capacity = Capacity(slots=8, patches=16, items=2, segments=4, frames=2)
    assert capacity.shortage(asked, 2) == short
    assert capacity.shortage(asked, 3) == (short if short in ("slots", "patches") else "items")
