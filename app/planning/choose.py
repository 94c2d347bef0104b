"""Which split to take: the fewest GPUs that meet the targets, then the highest rate within them.

all splits ──estimate──▶ promising ones, cheapest first ──replay──▶ the first that holds ──▶ recommended
                                                                    the best of the other placement, to compare
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from app.planning.errors import PlanError
from app.planning.estimate import Estimate, Latency, StageUse
from app.planning.replay import Played
from app.planning.splits import Split

_NEAR = 1.1
"""Shortfall of an estimate up to which a replay is worth while."""
_TIE = 0.02
"""Rates that are so close decide nothing: the simpler or the quicker split is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """95th percentiles that must hold at the trace's rate; None asks for nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    max_use: float = 0.9
    """Share of a split's capacity that the trace may take."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"{name} is {value}; it must be above 0")
        if not 0 < self.max_use <= 1:
            raise PlanError(f"max_use is {self.max_use}; it must be above 0 and at most 1")

    def shortfall(self, latency: Latency) -> float:
        """The worst of value / limit: at most 1 if all hold."""
        return max(self._ratios(latency).values(), default=0.0)

    def misses(self, latency: Latency, use: float) -> list[str]:
        """What does not hold, in words."""
        values = {
            "TTFT p95": (latency.ttft_p95_s, self.ttft_s, 1.0, "s"),
            "TPOT p95": (latency.tpot_p95_s, self.tpot_s, 1e3, "ms"),
        }
        found = [
            f"{name} {value * scale:.3g} {unit} (target {limit * scale:.3g})"
            for name, (value, limit, scale, unit) in values.items()
            if limit is not None and value > limit
        ]
        if use > self.max_use:
            found.append(f"{use:.0%} of its capacity in use (at most {self.max_use:.0%})")
        return found

    def _ratios(self, latency: Latency) -> dict[str, float]:
        limits = {"ttft": (latency.ttft_p95_s, self.ttft_s), "tpot": (latency.tpot_p95_s, self.tpot_s)}
        return {name: value / limit for name, (value, limit) in limits.items() if limit is not None}


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A split and what is known of it at the trace's rate."""

    split: Split
    estimate: Estimate
    use: StageUse
    rate_per_s: float
    estimated: Latency
    good_rate_per_s: float
    """Highest rate within the targets, by estimate."""
    played: Played | None = None

    @property
    def capacity_per_s(self) -> float:
        return self.estimate.capacity_per_s

    @property
    def latency(self) -> Latency:
        """Of the replay if there was one."""
        return self.estimated if self.played is None else self.played.latency()

    @property
    def total_use(self) -> float:
        """Of the capacity, whichever stage bounds it."""
        return self.rate_per_s / self.capacity_per_s

    def shortfall(self, targets: Targets) -> float:
        """At most 1 if it does; above, how far it is from that."""
        return max(targets.shortfall(self.latency), self.total_use / targets.max_use)


def make_candidate(estimate: Estimate, rate_per_s: float, targets: Targets) -> Candidate:
    return Candidate(
        split=estimate.split,
        estimate=estimate,
        use=estimate.use(rate_per_s),
        rate_per_s=rate_per_s,
        estimated=estimate.latency(rate_per_s),
        good_rate_per_s=estimate.good_rate_per_s(lambda latency: targets.shortfall(latency) <= 1, targets.max_use),
    )


@dataclass(slots=True, kw_only=True)
class Choice:
    candidates: list[Candidate]
    """All, fewest GPUs first."""
    recommended: Candidate | None
    """None if no split does."""
    nearest: Candidate
    """The recommended one, or the one that comes nearest."""
    rivals: list[tuple[Candidate, Candidate]] = field(default_factory=list)
    """(best colocated, best with encoders of their own) by number of GPUs, fewest first."""


def choose(
    candidates: Sequence[Candidate],
    targets: Targets,
    replay: Callable[[Candidate], Played] | None = None,
    max_replays: int = 0,
) -> Choice:
    """Estimate first, then replay the promising ones until one holds.

    Args:
        replay: Plays the trace through a candidate.
        max_replays: Most that are played; the estimate decides about the rest.
    """
    most = max(candidate.split.gpus for candidate in candidates)
    ordered = in_order(candidates)
    replays_left = max_replays if replay is not None else 0

    def play(candidate: Candidate) -> None:
        nonlocal replays_left
        if replay is not None and replays_left > 0 and candidate.played is None:
            candidate.played = replay(candidate)
            replays_left -= 1

    recommended = None
    for candidate in ordered:
        if candidate.shortfall(targets) > _NEAR:
            continue
        play(candidate)
        if candidate.shortfall(targets) <= 1:
            recommended = candidate
            break
    nearest = recommended or min(candidates, key=lambda candidate: candidate.shortfall(targets))
    rivals = []
    for gpus in sorted({nearest.split.gpus, most} - {1}):
        pair = _rivals([candidate for candidate in candidates if candidate.split.gpus == gpus], recommended)
        for candidate in pair:
            play(candidate)
        rivals.append(pair)
    if recommended is not None and recommended.split.gpus > 1:
        recommended = nearest = _better_rival(recommended, rivals, targets)
    return Choice(
        candidates=sorted(candidates, key=lambda candidate: (candidate.split.gpus, candidate.split)),
        recommended=recommended,
        nearest=nearest,
        rivals=rivals,
    )


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Fewest GPUs first; among equals the highest rate within the targets, where close rates count as equal and then a
    colocated split goes first, being simpler to run, then the one with the quicker first token."""
    by_gpus: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        by_gpus.setdefault(candidate.split.gpus, []).append(candidate)
    ordered = []
    for gpus in sorted(by_gpus):
        rest = by_gpus[gpus]
        while rest:
            best = best_of(rest)
            ordered.append(best)
            rest = [candidate for candidate in rest if candidate is not best]
    return ordered


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Of equally many GPUs; see `in_order`."""
    most = max(candidate.good_rate_per_s or candidate.capacity_per_s * 1e-6 for candidate in candidates)

    def close(candidate: Candidate) -> bool:
        return (candidate.good_rate_per_s or candidate.capacity_per_s * 1e-6) >= most * (1 - _TIE)

    return min(
        filter(close, candidates), key=lambda candidate: (not candidate.split.colocated, candidate.estimated.ttft_p95_s)
    )


def _rivals(candidates: Sequence[Candidate], preferred: Candidate | None) -> tuple[Candidate, Candidate]:
    together = [candidate for candidate in candidates if candidate.split.colocated]
    apart = [candidate for candidate in candidates if not candidate.split.colocated]
    first, second = best_of(together), best_of(apart)
    return (first, preferred if preferred is not None and preferred in apart else second)


def _better_rival(recommended: Candidate, rivals: Sequence[tuple[Candidate, Candidate]], targets: Targets) -> Candidate:
    """The estimate put `recommended` first. Where rates within the targets tie, the replays may say otherwise."""
    for pair in rivals:
        if recommended in pair:
            other = pair[0] if recommended is pair[1] else pair[1]
            tied = other.good_rate_per_s >= recommended.good_rate_per_s * (1 - _TIE)
            holds = other.played is not None and other.shortfall(targets) <= 1
            if tied and holds and other.latency.ttft_p95_s < recommended.latency.ttft_p95_s * (1 - 5 * _TIE):
                return other
    return recommended
