"""`python -m tests.fuzz --help`: mutated input by the thousand, for a long run by hand."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tests.fuzz.over_http import run_over_http
from tests.fuzz.run import Result, run
from tests.fuzz.targets import TARGETS

EXIT_FAULTS, EXIT_GROWTH = 1, 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Feed mutated input to parsers and decoders in this process, or mutated requests to a server. "
        "Exit status: 0 all well, 1 faults, 2 memory grew.",
    )
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, "requests", []], help="default: all in this process")
    parser.add_argument("--count", type=int, default=10_000, help="inputs per target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random generator (default: %(default)s)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server for `requests` (default: %(default)s)")
    parser.add_argument("--model", default="sightline-demo", help="its model's name (default: %(default)s)")
    parser.add_argument("--server-pid", type=int, help="its main process, whose tree's memory is watched")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=60.0,
        help="longest answer; above the server's own request_timeout_s (default: %(default)s)",
    )
    parser.add_argument("--max-growth-mib", type=float, default=64.0, help="after warming up (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    args = parser.parse_args(argv)
    results = []
    for name in args.targets or TARGETS:
        progress = _bar(name, args.count)
        if name == "requests":
            one = asyncio.run(
                run_over_http(
                    args.url,
                    args.model,
                    seed=args.seed,
                    count=args.count,
                    deadline_s=args.deadline_s,
                    server_pid=args.server_pid,
                    progress=progress,
                )
            )
        else:
            one = run(name, args.seed, args.count, TARGETS[name](random.Random(args.seed)), progress)
        results.append(one)
        _show(one)
    if args.out:
        _write(args.out, results)
    if any(result.num_faults for result in results):
        return EXIT_FAULTS
    return EXIT_GROWTH if any(result.growth_mib > args.max_growth_mib for result in results) else 0


def _bar(name: str, count: int) -> Callable[[int], None]:
    shown = 0.0

    def show(done: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (time.monotonic() - shown > 0.2 or done == count):
            shown = time.monotonic()
            filled = 40 * done // count
            print(f"\r{name:10} [{'#' * filled:40}] {done}/{count}", end="", file=sys.stderr)

    return show


def _show(result: Result) -> None:
    print(
        f"\r{result.target}: {result.count} inputs in {result.seconds:.1f} s, {result.num_faults} faults, slowest "
        f"{result.slowest_s:.3f} s, memory {result.warm_rss_mib:.0f} -> {result.end_rss_mib:.0f} MiB"
    )
    for outcome, count in result.outcomes.most_common():
        print(f"  {count:7} {outcome}")
    for fault in result.faults:
        print(f"  FAULT {fault}")


def _write(path: Path, results: list[Result]) -> None:
    document = {
        "command": " ".join(["python -m tests.fuzz", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "results": [{**_values(result), "growth_mib": round(result.growth_mib, 1)} for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _values(result: Result) -> dict[str, object]:
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {**values, "outcomes": dict(result.outcomes.most_common())}


if __name__ == "__main__":
    sys.exit(main())
