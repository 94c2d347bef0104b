"""`python -m tests.bench http`: load on an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench import record
from tests.bench.load.arguments import add_load_arguments, runner_of, workload_of
from tests.bench.load.reference import Reference
from tests.bench.load.report import comparison, describe
from tests.bench.load.runner import Runner, ServerError
from tests.bench.load.workload import NAMED, Workload

HELP = "load on any OpenAI-compatible server"
ALL_WARM_UP_ROUNDS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    parser.add_argument(
        "--workload", choices=(*NAMED, "all"),
        help=f"a named one, which other options change; all: each in turn, {ALL_WARM_UP_ROUNDS} warm-up rounds or more",
    )  # fmt: skip
    parser.add_argument("--check-targets", action="store_true", help="exit with 1 if a named workload misses a target")
    parser.add_argument("--out", type=Path, help="results as JSON, rewritten after each workload")


def main(args: argparse.Namespace) -> int:
    """0; 1 if a request failed or a target was to be reached and was not; 2 if nothing could be measured."""
    every = args.workload == "all"
    if every:
        args.warm_up = max(args.warm_up, ALL_WARM_UP_ROUNDS)
    try:
        bases = NAMED.values() if every else [NAMED[args.workload] if args.workload else None]
        workloads = [workload_of(args, base) for base in bases]
        runner = runner_of(args)
    except (ValueError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    reference = Reference.load()
    result = _measure(runner, workloads, args)
    runs = result["runs"]
    if args.workload:
        print(f"\n{comparison(runs, reference)}")
    print(json.dumps(_short(result)))
    failed = any(run["errors"] for run in runs.values())
    missed = args.check_targets and any(reference.missed(name, run) for name, run in runs.items())
    return 1 if failed or missed else 0


def _measure(runner: Runner, workloads: list[Workload], args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        **record.header("http", "tests.bench"),
        "label": args.label,
        "url": runner.server.url,
        "model": runner.server.model,
        "runs": {},
    }
    for workload in workloads:
        result["runs"][workload.name] = run = runner.run(workload)
        print(f"\n{describe(run)}", flush=True)
        save(args.out, result)
    return result


def save(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def _short(result: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the figures that are compared most."""
    names = ("requests_per_s", "output_tokens_per_s", "errors")
    return {
        name: {key: run[key] for key in names}
        | {key: run[key] and run[key]["p50"] for key in ("ttft_s", "tpot_ms", "itl_ms")}
        for name, run in result["runs"].items()
    }
