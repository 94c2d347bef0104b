"""`python -m app.plan` from end to end: the shipped model, a small trace, what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

from app.config import AppConfig
from app.plan import EXIT_MET, EXIT_NOT_MET, EXIT_WRONG, main
from deployments.lm_engine.trace import SyntheticTrace, TracePicture, TraceRequest, write_trace
from tests.unit.app.plan_rig import shipped_rates

ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "serve_configs" / "demo_model")
QUIET = ("--no-progress",)


@pytest.fixture(scope="session")
def seven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with nothing but the 7B model's configuration."""
    folder = tmp_path_factory.mktemp("seven")
    (folder / "config.json").write_text(json.dumps(dict(shipped_rates().config)))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments, *QUIET])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code in (EXIT_MET, EXIT_NOT_MET)
    return json.loads(out)


def test_the_shipped_model_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = SyntheticTrace(num_requests=80, requests_per_s=20.0, max_slots=200, mean_output_tokens=30)
    write_trace(trace, tmp_path / "t.jsonl")
    code, out, err = run(capsys, "--model", DEMO, "--gpus", "2", "--trace", str(tmp_path / "t.jsonl"), "--ttft-s", "5")
    assert (code, err) == (EXIT_MET, "")
    assert "80 requests at 18.6/s" in out
    assert "NOT MEASURED for this model: scaled by arithmetic" in out
    assert "Recommended: 1 colocated LM replica (replay)" in out
    assert [line.split()[:3] for line in out.splitlines() if line.endswith("<==")] == [["1", "colocated", "1"]]
    assert "On 2 GPUs within the targets: " in out


def test_a_reader_of_json_finds_every_split(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--model", seven, "--gpus", "4", "--rate", "40", "--images", "8", "--requests", "300",
                    "--tpot-ms", "20", "--ttft-s", "0.5")  # fmt: skip
    splits = found["splits"]
    assert [(s["encoders"], s["engines"]) for s in splits] == [
        (encoders, gpus - encoders) for gpus in (1, 2, 3, 4) for encoders in range(gpus)
    ]
    for split in splits:
        assert split["gpu_s_per_1000"] == pytest.approx(1000 * split["gpus"] / 40)
        assert 0 < split["good_rate_per_s"] <= 0.9 * split["capacity_per_s"] * (1 + 1e-9)
        assert split["preprocessor_cpus"] >= 2
    (chosen,) = [s for s in splits if {"encoders": s["encoders"], "engines": s["engines"]} == found["recommended"]]
    assert chosen["misses"] == []
    assert chosen["replayed"]["requests"] == 300
    assert chosen["replayed"]["refused"] == 0
    assert all(split["misses"] for split in splits if split["gpus"] < chosen["gpus"])
    assert {pair["gpus"] for pair in found["comparisons"]} == {chosen["gpus"], 4}


def test_text_alone_is_colocated(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--model", seven, "--gpus", "4", "--rate", "300", "--images", "0", "--requests", "200",
                    "--replays", "0")  # fmt: skip
    assert found["recommended"]["encoders"] == 0
    assert all(pair["better"] == "colocated" for pair in found["comparisons"])
    assert all(split["encoder_use"] == 0 and split["replayed"] is None for split in found["splits"])


@pytest.mark.parametrize("images", ["0", "2"])
@pytest.mark.parametrize("gpus", ["1", "6"])
def test_the_fragment_is_one_that_serve_and_the_application_take(
    seven: str, gpus: str, images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, "--model", seven, "--gpus", gpus, "--rate", "10", "--images", images, "--requests", "100",
                    "--replays", "0", "--yaml", "--max-prefill-tokens-while-decoding", "512")  # fmt: skip
    check_fragment(found)


def test_encoders_of_their_own_are_in_the_fragment(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    # In colocated replicas every pass of the encoder would hold up the decodes.
    found = as_json(capsys, "--model", seven, "--gpus", "6", "--rate", "20", "--size", "1024x1024", "--requests", "300",
                    "--tpot-ms", "9", "--yaml", "--replays", "2")  # fmt: skip
    assert found["recommended"]["encoders"] >= 1
    assert found["comparisons"][-1]["better"] == "separate"
    fragment = check_fragment(found)
    names = [deployment["name"] for deployment in fragment["deployments"]]
    assert names == ["Preprocessor", "VisionEncoder", "LMEngine"]


def check_fragment(found: dict[str, Any]) -> dict[str, Any]:
    """The application of a fragment, after Serve's and our own checks."""
    document = yaml.safe_load(found["serve"])
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    config = AppConfig.parse(application["args"])
    chosen = found["recommended"]
    assert config.encoder_placement == ("colocated" if chosen["encoders"] == 0 else "deployment")
    for deployment in application["deployments"]:
        assert set(deployment) <= set(DeploymentSchema.model_fields)
        least = deployment.get("num_replicas")
        if least is None:
            scaling = AutoscalingConfig(**deployment["autoscaling_config"])  # imports the policy and builds it
            least = scaling.min_replicas
            assert scaling.max_replicas > least
        if deployment["name"] == "LMEngine":
            assert least == chosen["engines"]
        if deployment["name"] == "VisionEncoder":
            assert least == chosen["encoders"]
    return application


def test_targets_that_nothing_meets(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", seven, "--gpus", "2", "--rate", "5", "--tpot-ms", "1", "--requests", "50")
    assert code == EXIT_NOT_MET
    assert "No split of up to 2 GPUs meets the targets. Nearest is " in out
    assert "TPOT p95 " in out
    assert "(target 1)" in out
    assert "neither meets them at any rate" in out


def test_more_than_the_gpus_carry(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", seven, "--gpus", "2", "--rate", "5000", "--requests", "50", "--replays", "0")
    assert code == EXIT_NOT_MET
    assert "of its capacity in use (at most 90%)" in out


def bad(line: str, tmp_path: Path) -> Sequence[str]:
    (tmp_path / "bad.jsonl").write_text('{"arrival_s": 0, "text_tokens": 1, "output_tokens": 1}\n' + line)
    return ("--trace", str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of the trace is no request"),
        ("", "a trace needs two requests at least; it has 1"),
        ('{"arrival_s": 0, "text_tokens": 1, "output_tokens": 1}', "all requests come at once"),
        ('{"arrival_s": NaN, "text_tokens": 1, "output_tokens": 1}', "arrival_s is nan"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": 1, "pictures": [[1, 0]]}', "picture 1 has 0 slots"),
        ('{"arrival_s": 1, "text_tokens": 40000, "output_tokens": 7}', "request 1 has 40000 prompt and 7 output"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_named(
    line: str, message: str, seven: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--model", seven, "--gpus", "1", *bad(line, tmp_path))
    assert (code, out) == (EXIT_WRONG, "")
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "0"), "--gpus is 0; it must be 1 to 64"),
        (("--gpus", "1"), "give --trace, or --rate"),
        (("--gpus", "1", "--rate", "0"), "rate is 0.0; it must be above 0"),
        (("--gpus", "1", "--rate", "1", "--size", "3by3"), "--size is '3by3'"),
        (("--gpus", "1", "--rate", "1", "--size", "9000x3"), "--size 9000x3: the picture is 9000x3 pixels"),
        (("--gpus", "1", "--rate", "1", "--reuse", "1"), "reuse is 1.0"),
        (("--gpus", "1", "--rate", "1", "--ttft-s", "0"), "ttft_s is 0.0"),
        (("--gpus", "1", "--rate", "1", "--gpu-memory-gib", "10"), "does not fit a GPU of 10 GiB"),
        (("--gpus", "1", "--rate", "1", "--max-model-len", "999999"), "--max-model-len is 999999; the model's own is"),
        (("--gpus", "1", "--rate", "1", "--rates", "/nowhere.json"), "rates /nowhere.json: "),
        (("--gpus", "1", "--rate", "1", "--trace", "/nowhere.jsonl"), "--trace /nowhere.jsonl: "),
        (("--gpus", "1", "--rate", "1", "--model", "/nowhere/at/all"), "'/nowhere/at/all' is neither a folder nor"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_question_is_answered_with_what_is_wrong(
    options: tuple[str, ...],
    message: str,
    seven: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run(capsys, "--model", seven, *options)
    assert (code, out) == (EXIT_WRONG, "")
    assert message in err


@pytest.mark.parametrize("arguments", [("--help",), ("rates", "--help")])
def test_help_says_what_there_is(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "Exit codes" in out or "--engine" in out


def test_a_rates_file_from_results_is_the_shipped_one(
    seven: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ROOT / "tests" / "bench" / "results"
    files = {
        "engine": "engine_h200", "encoder": "encoder_h200", "stages": "stages_2026-11-30",
        "scheduler": "scheduler_2026-11-30", "transfer": "transfer",
    }  # fmt: skip
    options = [part for name, file in files.items() for part in (f"--{name}", str(results / f"{file}.json"))]
    made = tmp_path / "rates.json"
    shipped = shipped_rates()
    command = ["rates", "--model", seven, "--name", shipped.model, "--gpu-memory-gib", str(shipped.gpu_memory_gib)]
    assert main([*command, *options, "--out", str(made)]) == EXIT_MET
    assert json.loads(made.read_text()) == json.loads(
        (ROOT / "serve_configs" / "rates" / "h200_qwen2.5-vl-7b.json").read_text()
    )
    capsys.readouterr()
    options[1] = str(tmp_path / "none.json")
    assert main([*command, *options, "--out", str(made)]) == EXIT_WRONG
    assert "--engine " in capsys.readouterr().err


def test_equal_questions_have_equal_answers(seven: str, capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--model", seven, "--gpus", "2", "--rate", "20", "--requests", "60", "--reuse", "0.3")
    assert as_json(capsys, *question) == as_json(capsys, *question)


def test_a_traces_rate_can_be_changed(seven: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = [
        TraceRequest(arrival_s=float(i), text_tokens=9, output_tokens=9, pictures=(TracePicture(i, 99),))
        for i in range(20)
    ]
    write_trace(requests, tmp_path / "t.jsonl")
    question = ("--model", seven, "--gpus", "1", "--trace", str(tmp_path / "t.jsonl"), "--replays", "0")
    assert as_json(capsys, *question)["rate_per_s"] == pytest.approx(1.0)
    faster = as_json(capsys, *question, "--rate", "7", "--megapixels", "12")
    assert faster["rate_per_s"] == pytest.approx(7.0)
    assert faster["splits"][0]["engine_use"] > 0
    assert faster["splits"][0]["preprocessor_cpus"] >= as_json(capsys, *question)["splits"][0]["preprocessor_cpus"]


def test_it_runs_without_torch_and_ray(seven: str) -> None:
    """On a laptop that has neither a cluster nor a GPU; importing them would take longer than planning does."""
    program = (
        "import sys\n"
        "from app.plan import main\n"
        f"code = main(['--model', {seven!r}, '--gpus', '2', '--rate', '5', '--requests', '30', '--no-progress'])\n"
        "found = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Recommended: " in done.stdout
