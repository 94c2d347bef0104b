"""`python -m tests.bench sweep`: the same load at several points of one quantity, in one result with its plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench import record
from tests.bench.load.arguments import add_load_arguments, runner_of, workload_of
from tests.bench.load.http import save
from tests.bench.load.plots import MissingPlotLibraryError, draw
from tests.bench.load.report import table
from tests.bench.load.runner import Runner, ServerError
from tests.bench.load.workload import Workload, parse_counts

HELP = "load over a range of concurrency, pictures or rate"
POINTS = {
    "concurrency": "1,2,4,8,16,32,64,128,256",
    "images": "0,1,2,4,8",
    "rate": "1,2,4,8,16",
}
LEAST = {"concurrency": 1, "images": 0, "rate": 1}
REQUESTS_PER_CLIENT = 6
LEAST_REQUESTS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    parser.set_defaults(seconds=20.0, warm_up=1)
    parser.add_argument(
        "--over", nargs="+", required=True, metavar=("WHAT", "VALUES"),
        help=f"one of {', '.join(POINTS)}, and its values, such as 1,2,4 (defaults: {POINTS})",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="results as JSON; the plot is beside it, as PNG")


def main(args: argparse.Namespace) -> int:
    """0; 1 if a request failed; 2 if nothing could be measured."""
    try:
        what, values = parse_over(args.over)
        workloads = [point(workload_of(args), what, value, index, args) for index, value in enumerate(values)]
        runner = runner_of(args)
    except (ValueError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = measure(runner, what, values, workloads, args)
    print(f"\n{_rows(what, result['points'])}")
    try:
        draw([result], args.out.with_suffix(".png"))
    except MissingPlotLibraryError as error:
        print(f"no plot: {error}", file=sys.stderr)
    print(json.dumps({"over": what, "points": [[p["value"], p["requests_per_s"]] for p in result["points"]]}))
    return 1 if any(point["errors"] for point in result["points"]) else 0


def parse_over(given: Sequence[str]) -> tuple[str, list[int]]:
    """What is varied, and the values.

    Raises:
        ValueError: It is unknown, or its values cannot be read.
    """
    what = given[0]
    if what not in POINTS or len(given) > 2:
        raise ValueError(f"--over {' '.join(given)}: give one of {', '.join(POINTS)}, and values such as 1,2,4")
    return what, parse_counts(given[1] if len(given) == 2 else POINTS[what], LEAST[what])


def point(base: Workload, what: str, value: int, index: int, args: argparse.Namespace) -> Workload:
    """The workload of one point. Each asks about pictures of its own, or it would find the ones before it cached."""
    varied: dict[str, Any] = {"rate": {"rate_per_s": value, "concurrency": args.concurrency or 0}}.get(
        what, {what: value}
    )
    moved = replace(base, name=f"{what} {value}", seed=base.seed + 1000 * index, **varied)
    if args.requests is not None:
        return moved
    most = moved.concurrency * REQUESTS_PER_CLIENT
    if moved.rate_per_s is not None:
        most = int(moved.rate_per_s * min(args.seconds, 60.0)) + 1
    return replace(moved, requests=max(LEAST_REQUESTS, most))


def measure(
    runner: Runner, what: str, values: Sequence[int], workloads: Sequence[Workload], args: argparse.Namespace
) -> dict[str, Any]:
    """Every point, saved as soon as it is measured."""
    result: dict[str, Any] = {
        **record.header("sweep", "tests.bench"),
        "label": args.label,
        "url": runner.server.url,
        "model": runner.server.model,
        "over": what,
        "seconds_per_point": args.seconds if args.seconds != float("inf") else None,
        "points": [],
    }
    for value, workload in zip(values, workloads, strict=True):
        result["points"].append({"value": value, **runner.run(workload)})
        save(args.out, result)
    return result


def _rows(what: str, points: Sequence[dict[str, Any]]) -> str:
    rows = [[what, "requests/s", "tokens/s", "TTFT p50, s", "p99", "ITL p50, ms", "p99", "errors"]]
    for entry in points:
        ttft, itl = entry["ttft_s"], entry["itl_ms"]
        rows.append(
            [
                str(entry["value"]), f"{entry['requests_per_s']:.2f}", f"{entry['output_tokens_per_s']:.0f}",
                *([f"{ttft['p50']:.3f}", f"{ttft['p99']:.3f}"] if ttft else ["", ""]),
                *([f"{itl['p50']:.2f}", f"{itl['p99']:.2f}"] if itl else ["", ""]),
                str(sum(entry["errors"].values())),
            ]
        )  # fmt: skip
    return table(rows)
