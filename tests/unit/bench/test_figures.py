"""Percentiles, rates and counts."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.load.answer import Outcome
from tests.bench.load.drive import Result
from tests.bench.load.figures import percentile, spread, summarise


def outcome(begun_s: float, *piece_s: float, tokens: int | None = None, error: str | None = None) -> Outcome:
    made = Outcome(begun_s=begun_s, ended_s=piece_s[-1] if piece_s else begun_s + 1, error=error, detail="why")
    made.piece_s = array("d", piece_s)
    made.first_s, made.last_s = (piece_s[0], piece_s[-1]) if piece_s else (None, 0.0)
    made.completion_tokens = len(piece_s) if tokens is None else tokens
    made.prompt_tokens = 10
    return made


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError):
        percentile([], 50)
    assert spread([]) is None


def test_spread_scales() -> None:
    assert spread([0.001, 0.003], 1e3) == {"mean": 2.0, "p50": 2.0, "p95": 2.9, "p99": 2.98, "max": 3.0}


def test_a_run() -> None:
    outcomes = [
        outcome(10.0, 10.5, 10.7, 10.9),
        outcome(10.0, 11.0, 11.1, 11.2),
        outcome(11.0, error="HTTP 429"),
        outcome(12.0, error="HTTP 429"),
        outcome(12.0, error="timeout"),
    ]
    figures = summarise(Result(outcomes, array("d", [0.001])), out_tokens=3)
    assert figures["requests"] == 5
    assert figures["errors"] == {"HTTP 429": 2, "timeout": 1}
    assert figures["error_examples"] == {"HTTP 429": "why", "timeout": "why"}
    assert figures["wall_s"] == 3.0
    assert figures["requests_per_s"] == pytest.approx(2 / 3, abs=1e-4)
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["ttft_s"]["mean"] == 0.75
    assert figures["tpot_ms"]["p50"] == pytest.approx(150)
    assert figures["itl_ms"]["max"] == pytest.approx(200)
    assert figures["itl_p99_to_p50"] == pytest.approx(200 / 150, abs=1e-3)
    assert figures["tokens_per_piece"] == 1.0
    assert figures["client"]["loop_lag_ms"]["max"] == 1.0


def test_answers_of_another_length_are_counted() -> None:
    figures = summarise(Result([outcome(0, 1, 2, tokens=2), outcome(0, 1, 2, tokens=8)], array("d")), out_tokens=8)
    assert figures["answers_of_other_length"] == 1
    assert figures["tokens_per_piece"] == 2.5


def test_a_run_that_failed_altogether_has_figures_too() -> None:
    figures = summarise(Result([outcome(0, error="timeout")], array("d")), out_tokens=8)
    assert (figures["requests_per_s"], figures["ttft_s"], figures["itl_p99_to_p50"]) == (0.0, None, None)
    assert summarise(Result([], array("d")), out_tokens=8)["requests"] == 0
