"""The program from its arguments to its files and exit status."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.bench.__main__ import main
from tests.bench.load.reference import Reference
from tests.bench.load.workload import NAMED
from tests.unit.bench.fake_server import MODEL, FakeServer

SMALL = ["--no-progress", "--images", "1", "--sizes", "32x32", "--out-tokens", "5"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def width(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.width


def test_http(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "http.json"
    command = ["http", "--url", f"{server.url}/v1", *SMALL, "--requests", "6", "--concurrency", "2", "--label", "fake"]
    assert main([*command, "--out", str(out)]) == 0
    result = read(out)
    assert (result["bench"], result["label"], result["model"], result["url"]) == ("http", "fake", MODEL, server.url)
    assert {"date", "machine", "command"} <= set(result)
    run = result["runs"]["custom"]
    assert (run["requests"], run["errors"], run["workload"]["sizes"]) == (6, {}, "32x32")
    stages = run["first_token"]
    assert set(stages["stage_ms"]) == {"receive", "prefill"}
    # The server begins later than the client and is done with the first token sooner.
    assert 0 < stages["sum_of_stages_ms"] == pytest.approx(stages["server_ttft_ms"], abs=1e-3)
    assert stages["sum_to_client"] < 1
    shown = capsys.readouterr().out
    assert "TTFT by stage" in shown
    assert json.loads(shown.splitlines()[-1])["custom"]["errors"] == {}


def test_errors_are_shown_and_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number: "refuse" if number == 1 else "answer") as server:
        assert main(["http", "--url", server.url, *SMALL, "--requests", "3", "--out", str(tmp_path / "r.json")]) == 1
    run = read(tmp_path / "r.json")["runs"]["custom"]
    assert run["errors"] == {"HTTP 429 rate_limited": 1}
    assert "failed" in run["first_token"]
    assert "ERRORS 1 x HTTP 429 rate_limited: try later" in capsys.readouterr().out


def test_a_server_without_our_metrics_is_measured_too(tmp_path: Path) -> None:
    with FakeServer(with_metrics=False) as server:
        assert main(["http", "--url", server.url, *SMALL, "--requests", "2", "--out", str(tmp_path / "r.json")]) == 0
    assert read(tmp_path / "r.json")["runs"]["custom"]["first_token"] is None


def test_cold_warm_up_asks_other_things_and_warm_the_same(server: FakeServer) -> None:
    command = ["http", "--url", server.url, *SMALL, "--requests", "4", "--concurrency", "2", "--warm-up", "2"]
    assert main(command) == 0
    assert len(server.bodies) == len(set(server.bodies)) == 12
    server.bodies.clear()
    assert main([*command, "--cache", "warm"]) == 0
    assert set(Counter(server.bodies).values()) == {3}


def test_all_workloads_beside_the_peers(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.json"
    command = ["http", "--url", server.url, "--workload", "all", "--no-progress", "--out", str(out)]
    assert main([*command, "--sizes", "28x28", "--requests", "4", "--concurrency", "4"]) == 0
    runs = read(out)["runs"]
    assert list(runs) == list(NAMED)
    assert {run["warm_up_rounds"] for run in runs.values()} == {2}
    assert [run["workload"]["images"] for run in runs.values()] == [1, 1, 4, 1, 1, 8]
    shown = capsys.readouterr().out
    assert "vLLM 0.26.0, one H200, Qwen2.5-VL-7B shape, dummy weights, bf16" in shown
    assert main(["plot", str(out), "--out", str(tmp_path / "all.png")]) == 0
    assert width(tmp_path / "all.png") > 500


def test_missed_targets_can_fail_the_run(tmp_path: Path) -> None:
    with FakeServer(pause_s=0.2) as server:  # the target is 0.08 s
        command = ["http", "--url", server.url, "--workload", "A1", "--sizes", "28x28", "--requests", "2"]
        assert main([*command, "--no-progress"]) == 0
        assert main([*command, "--no-progress", "--check-targets"]) == 1


def test_targets_are_bounds_in_the_right_direction() -> None:
    reference = Reference.load()
    good = {"requests_per_s": 14.0, "ttft_s": {"p50": 0.08}, "tpot_ms": {"p50": 4.8}}
    assert not reference.missed("A", good)
    assert not reference.missed("A1", good)
    assert reference.missed("A", good | {"requests_per_s": 13.9})
    assert reference.missed("A1", good | {"ttft_s": {"p50": 0.081}})
    assert len(reference.missed("A1", good | {"ttft_s": None, "tpot_ms": None})) == 2
    assert not reference.missed("custom", good)
    assert not reference.missed("custom", good | {"first_token": {"adds_up": True, "sum_to_client": 0.96}})
    assert reference.missed("custom", good | {"first_token": {"adds_up": False, "sum_to_client": 0.9}}) == [
        "stages explain 0.9 of TTFT, wanted within 5%"
    ]
    assert reference.peer["A"]["requests_per_s"] == 11.2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--images", "-1"], "images"),
        (["--text-tokens", "5"], "--tokenizer"),
        (["--cache", "warm"], "--warm-up"),
        (["--processes", "0"], "--processes"),
        (["--rate", "0"], "rate_per_s"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(
    server: FakeServer, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http", "--url", server.url, "--no-progress", *extra]) == 2
    assert message in capsys.readouterr().err
    assert not server.bodies


def test_unreadable_sizes_and_unknown_arguments_end_in_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["http", "--sizes", "big"], ["http", "--wrong"], ["unknown"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "is not WIDTHxHEIGHT" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        gone = server.url
    assert main(["http", "--url", gone]) == 2
    assert "/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(("over", "values"), [("concurrency", [1, 3]), ("images", [0, 2]), ("rate", [20, 40])])
def test_sweeps(server: FakeServer, tmp_path: Path, over: str, values: list[int]) -> None:
    out = tmp_path / "sweep.json"
    command = ["sweep", "--url", server.url, *SMALL, "--out", str(out), "--seconds", "0.5", "--warm-up", "0"]
    assert main([*command, "--over", over, ",".join(map(str, values))]) == 0
    result = read(out)
    assert (result["bench"], result["over"]) == ("sweep", over)
    assert [point["value"] for point in result["points"]] == values
    assert all(point["requests"] > 0 and not point["errors"] for point in result["points"])
    assert width(tmp_path / "sweep.png") > 500
    pictures = [json.loads(body)["messages"][0]["content"][:-1] for body in server.bodies]
    urls = [part["image_url"]["url"] for content in pictures for part in content]
    assert len(set(urls)) == len(urls), "a later point asked about a picture of an earlier one"
    if over == "images":
        assert {len(content) for content in pictures} == {0, 2}
    # Drawn again, twice in one picture.
    assert main(["plot", str(out), str(out), "--out", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").stat().st_size > 1000


def test_a_sweep_over_something_else_is_refused(server: FakeServer, tmp_path: Path) -> None:
    for over in (["colour", "1,2"], ["concurrency", "0,1"], ["images", "1", "2"]):
        assert main(["sweep", "--url", server.url, "--out", str(tmp_path / "s.json"), "--over", *over]) == 2


def test_results_of_different_kinds_share_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"bench": "sweep", "over": "images"}))
    (tmp_path / "b.json").write_text(json.dumps({"bench": "tokens"}))
    assert main(["plot", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert main(["plot", str(tmp_path / "b.json")]) == 2
    assert "no plot for results of 'tokens'" in capsys.readouterr().err


@pytest.mark.slow
def test_programs_with_arguments_of_their_own_are_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--out", "x", "--device", "abacus"]) == 2
    assert "bench_engine" in capfd.readouterr().err
