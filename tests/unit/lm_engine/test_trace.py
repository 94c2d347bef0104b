from __future__ import annotations

from pathlib import Path

import pytest

from deployments.lm_engine.trace import RecordedTrace, SyntheticTrace, write_trace


def test_equal_seeds_make_equal_traces() -> None:
    options = {"num_requests": 50, "num_tenants": 3}
    assert list(SyntheticTrace(**options)) == list(SyntheticTrace(**options))
    assert list(SyntheticTrace(**options)) != list(SyntheticTrace(**options, seed=1))


def test_a_synthetic_trace_is_as_asked() -> None:
    trace = list(SyntheticTrace(num_requests=2000, requests_per_s=50.0, num_pictures=100, max_pictures=3))
    assert trace[-1].arrival_s == pytest.approx(40.0, rel=0.15)
    pictures = [picture for request in trace for picture in request.pictures]
    assert {len(request.pictures) for request in trace} == {0, 1, 2, 3}
    assert all(64 <= picture.num_slots <= 2048 for picture in pictures)
    counts = [sum(picture.picture_id == number for picture in pictures) for number in (0, 50)]
    assert counts[0] > 10 * counts[1], "popularity falls with rank"
    assert len({(picture.picture_id, picture.num_slots) for picture in pictures}) <= 100, "a picture has one size"


def test_a_written_trace_reads_back_in_order_of_arrival(tmp_path: Path) -> None:
    trace = list(SyntheticTrace(num_requests=20))
    write_trace(reversed(trace), tmp_path / "trace.jsonl")
    assert list(RecordedTrace(tmp_path / "trace.jsonl")) == trace


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"arrival_s": 1}', '{"arrival_s": 1, "text_tokens": 0, "output_tokens": 1}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "text_tokens": 1, "output_tokens": 1}\n\n' + line)
    with pytest.raises(ValueError, match="line 3 of the trace is no request"):
        RecordedTrace(path)
