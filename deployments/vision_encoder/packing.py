"""Which items run together. Pure integers and floats: no torch, no model names, property-tested.

An item brings a load to a path of the encoder; a batch is a set of items that runs in one forward pass, either in the
smallest captured budget that holds it or eagerly at its own size. Items are never split.

    loads   [64, 1369, 144, 64]  --pack-->  Batch(items 0 2 3 -> budget 320)  Batch(item 1 -> budget 1536)

`plan_batches` minimises the summed cost from measured per-budget times. The general problem is bin packing and NP-hard.
Over items sorted by slots, every partition into runs is considered by dynamic programming, O(n * most items in a
batch); the best such partition is never worse than smallest-first greedy, whose batches are runs of the same order.
Then batches whose items fit into the slack of others are dissolved, which runs cannot express. `plan_smallest_first` is
the plain way and stays as the yardstick.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """What items ask of one path; adds up over a batch, except `longest_patches`, of which the largest counts."""

    slots: int = 0
    patches: int = 0
    segments: int = 0
    """Short attention runs (windows)."""
    frames: int = 0
    """Long attention runs: a picture has one, a video one per temporal grid step."""
    longest_patches: int = 0
    """Patches in the longest attention run."""
    pairs: int = 0
    """Pairs of patches that see each other in a layer over whole frames: the sum of squared run lengths. What such a
    layer takes grows with it, so one large picture costs more than small ones of the same slots."""

    def __add__(self, other: Load) -> Load:
        return Load(
            self.slots + other.slots,
            self.patches + other.patches,
            self.segments + other.segments,
            self.frames + other.frames,
            max(self.longest_patches, other.longest_patches),
            self.pairs + other.pairs,
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most a batch may bring. Every dimension is checked: equal slots do not mean equal frames or windows."""

    slots: int
    patches: int
    items: int
    segments: int
    frames: int

    def shortage(self, load: Load, items: int) -> str | None:
        """Name of the first dimension that does not fit, or None."""
        if load.slots > self.slots:
            return "slots"
        if load.patches > self.patches:
            return "patches"
        if items > self.items:
            return "items"
        if load.segments > self.segments:
            return "segments"
        if load.frames > self.frames:
            return "frames"
        return None


@dataclass(frozen=True, slots=True)
class Batch:
    indices: tuple[int, ...]
    """Positions in the list that was packed, in that list's order."""
    load: Load
    budget: int | None
    """Slots of the captured budget to replay; None runs eagerly at the batch's own size."""
    reason: str = ""
    """Why it runs eagerly: the dimension short in the largest budget, or `cheaper`."""


@dataclass(frozen=True, slots=True)
class Budget:
    capacity: Capacity
    cost_s: float
    """Measured time of one replay without what grows with pairs; it does not depend on how full the budget is."""
    pair_s: float = 0.0
    """Time of one pair (see `Load.pairs`): attention inside a replay stops at the borders that it finds."""

    def replay_s(self, load: Load) -> float:
        return self.cost_s + self.pair_s * load.pairs


class Planner(Protocol):
    def __call__(self, loads: Sequence[Load], rules: Rules) -> list[Batch]: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """What may run together and what it costs.

    Args:
        budgets: Captured budgets, ascending in slots; empty if all runs are eager.
        limit: Hard bounds of one pass. An item alone over it must have been rejected before.
        eager_cost_s: Time of an eager pass of a given load.
        admits: Further bound on a pass, such as its memory; must hold for every single item.
    """

    budgets: tuple[Budget, ...]
    limit: Capacity
    eager_cost_s: Callable[[Load], float]
    admits: Callable[[Load], bool] = lambda _load: True

    def allows(self, load: Load, items: int) -> bool:
        return items == 1 or (self.limit.shortage(load, items) is None and self.admits(load))

    def choose(self, load: Load, items: int) -> tuple[float, int | None, str]:
        """(cost, budget in slots or None for eager, why eager) of the cheapest way to run this load."""
        eager_s = self.eager_cost_s(load)
        first = bisect_left(self.budgets, load.slots, key=lambda budget: budget.capacity.slots)
        for budget in self.budgets[first:]:
            if budget.capacity.shortage(load, items) is None:
                replay_s = budget.replay_s(load)
                if replay_s <= eager_s:
                    return replay_s, budget.capacity.slots, ""
                return eager_s, None, "cheaper"
        reason = self.budgets[-1].capacity.shortage(load, items) if self.budgets else None
        return eager_s, None, reason or ""


def plan_batches(loads: Sequence[Load], rules: Rules) -> list[Batch]:
    """Batches of least summed cost (see the module's text). Every index appears in exactly one batch."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i].slots, i))
    return [_batch(group, loads, rules) for group in _fill_slack(_best_runs(order, loads, rules), loads, rules)]


def plan_smallest_first(loads: Sequence[Load], rules: Rules) -> list[Batch]:
    """Greedy: smallest items first, a batch is closed when the next item would overflow the largest budget."""
    largest = rules.budgets[-1].capacity if rules.budgets else rules.limit
    groups: list[list[int]] = []
    total = Load()
    for i in sorted(range(len(loads)), key=lambda i: (loads[i].slots, i)):
        grown = total + loads[i]
        count = len(groups[-1]) + 1 if groups else 1
        if groups and largest.shortage(grown, count) is None and rules.allows(grown, count):
            groups[-1].append(i)
            total = grown
        else:
            groups.append([i])
            total = loads[i]
    return [_batch(group, loads, rules) for group in groups]


def _best_runs(order: Sequence[int], loads: Sequence[Load], rules: Rules) -> list[list[int]]:
    """Cheapest partition of `order` into runs; ties go to fewer batches."""
    count = len(order)
    best: list[tuple[float, int]] = [(0.0, 0)]
    start_of: list[int] = [0]
    for end in range(1, count + 1):
        total = Load()
        choice: tuple[float, int] | None = None
        start_choice = end - 1
        for start in range(end - 1, -1, -1):
            total = total + loads[order[start]]
            if not rules.allows(total, end - start):
                break
            cost = rules.choose(total, end - start)[0]
            candidate = (best[start][0] + cost, best[start][1] + 1)
            if choice is None or candidate < choice:
                choice, start_choice = candidate, start
        assert choice is not None  # one item alone is always allowed
        best.append(choice)
        start_of.append(start_choice)
    runs: list[list[int]] = []
    end = count
    while end > 0:
        runs.append(list(order[start_of[end] : end]))
        end = start_of[end]
    return runs


def _fill_slack(groups: list[list[int]], loads: Sequence[Load], rules: Rules) -> list[list[int]]:
    """Dissolve batches whose items all fit elsewhere for less than the batch itself costs, smallest batches first."""
    groups = sorted(groups, key=lambda group: sum(loads[i].slots for i in group))
    position = 0
    while position < len(groups):
        spread = _spread(groups, position, loads, rules)
        if spread is None:
            position += 1
        else:
            groups = spread
    return groups


def _spread(groups: list[list[int]], victim: int, loads: Sequence[Load], rules: Rules) -> list[list[int]] | None:
    """The groups without `victim`, its items placed in the others where that is cheapest; None if it does not pay."""
    rest = [list(group) for at, group in enumerate(groups) if at != victim]
    totals = [_total(group, loads) for group in rest]
    saved = rules.choose(_total(groups[victim], loads), len(groups[victim]))[0]
    for i in sorted(groups[victim], key=lambda i: -loads[i].slots):
        options = []
        for at, group in enumerate(rest):
            grown = totals[at] + loads[i]
            if rules.allows(grown, len(group) + 1):
                before = rules.choose(totals[at], len(group))[0]
                after = rules.choose(grown, len(group) + 1)[0]
                options.append((after - before, -totals[at].slots, at))
        if not options:
            return None
        extra, _, at = min(options)
        saved -= extra
        if saved <= 0:
            return None
        rest[at].append(i)
        totals[at] = totals[at] + loads[i]
    return rest


def _total(group: Sequence[int], loads: Sequence[Load]) -> Load:
    total = Load()
    for i in group:
        total = total + loads[i]
    return total


def _batch(group: Sequence[int], loads: Sequence[Load], rules: Rules) -> Batch:
    load = _total(group, loads)
    _, budget, reason = rules.choose(load, len(group))
    return Batch(tuple(sorted(group)), load, budget, reason)
