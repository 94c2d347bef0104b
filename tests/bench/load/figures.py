"""Figures of a load run, from the outcomes of its requests. Seconds and milliseconds stand in the names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.load.answer import Outcome
from tests.bench.load.drive import Result

PERCENTS = (50, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, interpolated linearly between the two nearest ranks.

    Raises:
        ValueError: There are no values.
    """
    if not ordered:
        raise ValueError("no values have no percentile")
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Iterable[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    named = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS}
    figures = {"mean": sum(ordered) / len(ordered), **named, "max": ordered[-1]}
    return {name: round(value * scale, 5) for name, value in figures.items()}


def summarise(result: Result, out_tokens: int) -> dict[str, Any]:
    """Everything the client knows of a run.

    Args:
        out_tokens: That each request asked for; answers with another number are counted.
    """
    outcomes = result.outcomes
    good = [outcome for outcome in outcomes if outcome.error is None]
    wall_s = wall_time_s(outcomes)
    gaps = spread((gap for outcome in good for gap in outcome.gaps_s()), 1e3)
    tokens = sum(outcome.completion_tokens for outcome in good)
    pieces = sum(len(outcome.piece_s) for outcome in good)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    examples = {outcome.error: outcome.detail for outcome in reversed(outcomes) if outcome.error is not None}
    return {
        "requests": len(outcomes),
        "errors": dict(errors.most_common()),
        "error_examples": examples,
        "answers_of_other_length": sum(outcome.completion_tokens != out_tokens for outcome in good),
        "wall_s": round(wall_s, 4),
        "requests_per_s": round(len(good) / wall_s, 4) if wall_s else 0.0,
        "output_tokens_per_s": round(tokens / wall_s, 2) if wall_s else 0.0,
        "prompt_tokens": spread(outcome.prompt_tokens for outcome in good if outcome.prompt_tokens is not None),
        "tokens_per_piece": round(tokens / pieces, 3) if pieces else None,
        "ttft_s": spread(outcome.ttft_s for outcome in good),
        "tpot_ms": spread((outcome.tpot_s for outcome in good if outcome.tpot_s is not None), 1e3),
        "itl_ms": gaps,
        "itl_p99_to_p50": round(gaps["p99"] / gaps["p50"], 3) if gaps and gaps["p50"] else None,
        "e2e_s": spread(outcome.e2e_s for outcome in good),
        "client": {
            "loop_lag_ms": spread(result.lag_s, 1e3),
            "late_ms": spread((outcome.late_s for outcome in outcomes), 1e3),
        },
    }


def wall_time_s(outcomes: Sequence[Outcome]) -> float:
    """From the first request's beginning to the last answer's end."""
    if not outcomes:
        return 0.0
    return max(outcome.ended_s for outcome in outcomes) - min(outcome.begun_s for outcome in outcomes)
