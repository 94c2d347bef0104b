from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.lm_engine.simulator import Report, Simulation, TimeModel, main
from deployments.lm_engine.trace import SyntheticTrace, TracePicture, TraceRequest, write_trace
from tests.unit.lm_engine.host_side import config

TIMES = TimeModel(step_base_s=1.0, step_token_s=0.0, step_context_token_s=0.0, encode_base_s=2.5, encode_patch_s=0.0)


def simulate(*requests: TraceRequest, num_replicas: int = 1, **limits: int) -> Report:
    return Simulation(config(**limits), TIMES, num_replicas=num_replicas).run(requests)


def request(arrival_s: float, *, text: int = 5, output: int = 3, slots: int = 0, picture: int = 0) -> TraceRequest:
    pictures = (TracePicture(picture, slots),) if slots else ()
    return TraceRequest(arrival_s=arrival_s, text_tokens=text, output_tokens=output, pictures=pictures)


def test_text_takes_a_step_a_token() -> None:
    report = simulate(request(10.0))
    assert (report.num_finished, report.steps, report.duration_s) == (1, 3, 3.0)
    assert (report.first_token_s, report.queue_s, report.per_token_s) == ([1.0], [0.0], [1.0])


def test_a_request_waits_for_the_step_under_way_and_for_a_seat() -> None:
    report = simulate(request(0.0), request(0.5), max_num_seqs=1)
    assert report.queue_s == [0.0, 2.5]


def test_a_picture_costs_its_encode_once() -> None:
    report = simulate(request(0.0, slots=8, output=1), request(20.0, slots=8, output=1, text=6))
    assert report.first_token_s == [3.5, 1.0]
    assert (report.encode_starts, report.prefix_hit_tokens) == (1, 8)


def test_what_never_fits_is_refused() -> None:
    report = simulate(request(0.0, text=300), request(1.0))
    assert (report.num_rejected, report.num_finished) == (1, 1)
    assert report.denials["context.rejected"] == 1


def test_replicas_share_the_load() -> None:
    trace = [request(0.0, output=20) for _ in range(8)]
    one, four = (simulate(*trace, num_replicas=count, max_num_seqs=2) for count in (1, 4))
    # The first of all steps alone, since the step begins before the others are there.
    assert (one.duration_s, four.duration_s) == (81.0, 21.0)


@pytest.mark.parametrize("route", ["round_robin", "least_loaded", "affinity"])
def test_every_route_serves_all(route: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-requests", "60", "--replicas", "3", "--route", route, "--no-progress", "--num-tenants", "2"]
    assert main(options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["simulation"]
    assert result["finished"] == 60
    assert result["stalled_steps"] == 0
    assert 0 < result["prefix_hit_rate"] < 1


def test_under_pressure_all_still_end() -> None:
    trace = SyntheticTrace(num_requests=150, requests_per_s=1000.0, max_slots=200, min_slots=20, mean_output_tokens=30)
    report = Simulation(
        config(
            num_blocks=80,
            max_model_len=1000,
            encoder_cache_slots=256,
            max_encoder_slots_per_step=256,
            max_encoder_patches_per_step=1024,
            max_queue_s=60.0,
        ),
        TIMES,
    ).run(trace)
    assert report.num_finished + report.num_expired + report.num_rejected == 150
    assert report.num_expired > 0
    assert report.stalled_steps == 0


def test_a_recorded_trace_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(SyntheticTrace(num_requests=30), tmp_path / "trace.jsonl")
    assert main(["--trace", str(tmp_path / "trace.jsonl"), "--no-progress"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["simulation"]["requests"] == 30
