"""`python -m tests.bench plot`: results as pictures, drawn again whenever wanted. Several results share the axes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.load.reference import Reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELP = "draw results again, several in one picture if they are of one kind"
AXES = {"concurrency": "requests at once", "images": "pictures of a request", "rate": "requests sent per second"}


class MissingPlotLibraryError(Exception):
    """matplotlib is not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of `sweep` or of `http`")
    parser.add_argument("--out", type=Path, help="PNG (default: beside the first result)")


def main(args: argparse.Namespace) -> int:
    """0, or 2 if the results cannot be drawn."""
    out = args.out or args.results[0].with_suffix(".png")
    try:
        draw([json.loads(path.read_text()) for path in args.results], out)
    except (OSError, ValueError, MissingPlotLibraryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Raises ValueError for results of different or unknown kinds."""
    kinds = {(result.get("bench"), result.get("over")) for result in results}
    if len(kinds) != 1:
        raise ValueError(f"the results are of different kinds: {sorted(map(str, kinds))}")
    ((bench, over),) = kinds
    if bench == "sweep":
        figure = _sweep(results, str(over))
    elif bench == "http":
        figure = _workloads(results)
    else:
        raise ValueError(f"no plot for results of {bench!r}; there are sweep and http")
    figure.savefig(out, dpi=120)


def _figure(panels: int) -> tuple[Figure, Sequence[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPlotLibraryError("plots need matplotlib: pip install 'sightline[bench]'") from None
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    return figure, [figure.add_subplot(1, panels, index + 1) for index in range(panels)]


def _sweep(results: Sequence[dict[str, Any]], over: str) -> Figure:
    figure, (speed, first, between) = _figure(3)
    for number, result in enumerate(results):
        colour, label = f"C{number}", result["label"] or (result["model"] if len(results) > 1 else "")
        points = result["points"]
        _line(speed, points, "requests_per_s", None, colour, "-", label)
        for percent, style in (("p50", "-"), ("p99", "--")):
            _line(first, points, "ttft_s", percent, colour, style, f"{label} {percent}".strip())
            _line(between, points, "itl_ms", percent, colour, style, f"{label} {percent}".strip())
    ticks = sorted({point["value"] for result in results for point in result["points"]})
    for axes, title, unit in (
        (speed, "Throughput", "requests per second"),
        (first, "Time to first token", "seconds"),
        (between, "Inter-token latency", "milliseconds"),
    ):
        if over == "concurrency":
            axes.set_xscale("log", base=2)
        axes.set(title=title, ylabel=unit, xlabel=AXES.get(over, over), ylim=(0, None))
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


def _line(
    axes: Axes, points: Sequence[dict[str, Any]], name: str, percent: str | None, colour: str, style: str, label: str
) -> None:
    """Points without an answer are left out."""
    drawn = [(point["value"], point[name]) for point in points if point[name] is not None]
    heights = [value if percent is None else value[percent] for _, value in drawn]
    axes.plot([x for x, _ in drawn], heights, style, marker="o", color=colour, label=label or None)


def _workloads(results: Sequence[dict[str, Any]]) -> Figure:
    """Throughput beside the peer's, and where the time to the first token goes."""
    figure, (speed, stages) = _figure(2)
    names = list(dict.fromkeys(name for result in results for name in result["runs"]))
    peer = Reference.load().peer
    series = [(result["label"] or result["model"], result["runs"]) for result in results]
    if any(name in peer for name in names):
        series.append(("peer", peer))
    width = 0.8 / len(series)
    for number, (label, runs) in enumerate(series):
        offset = (number - (len(series) - 1) / 2) * width
        bars = speed.bar(
            [index + offset for index, name in enumerate(names) if name in runs],
            [runs[name]["requests_per_s"] for name in names if name in runs],
            width,
            label=label,
        )
        speed.bar_label(bars, fmt="%.3g", fontsize=7)
    speed.set_xticks(range(len(names)), names)
    speed.set(title="Throughput", ylabel="requests per second")
    speed.legend()
    _stage_bars(stages, results[0]["runs"])
    return figure


def _stage_bars(axes: Axes, runs: dict[str, Any]) -> None:
    found = {name: run["first_token"] for name, run in runs.items() if isinstance(run["first_token"], dict)}
    below = [0.0] * len(found)
    for stage in dict.fromkeys(stage for entry in found.values() for stage in entry["stage_ms"]):
        heights = [entry["stage_ms"].get(stage, 0.0) for entry in found.values()]
        axes.bar(list(found), heights, 0.6, bottom=below, label=stage)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if found:
        seen = [entry["client_ttft_ms"] for entry in found.values()]
        axes.plot(list(found), seen, "k_", markersize=24, label="client's clock")
        axes.legend(fontsize=7)
    axes.set(title="Time to first token by stage, mean", ylabel="milliseconds")
