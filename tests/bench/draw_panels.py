"""Dashboards drawn with matplotlib from what Prometheus answers: pictures for the docs without a Grafana server."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter
from PIL import Image

from grafana.promql import fill_variables
from tests.bench.prometheus_check import GRAFANA, VARIABLES, Prometheus

COLUMNS = 3
_UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "ops": "/s", "reqps": "/s"}


def draw_boards(server: Prometheus, folder: Path, *, start: float, end: float) -> list[Path]:
    """One PNG a dashboard, with its time series panels from `start` to `end` (Unix seconds)."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        panels = [p for p in board["panels"] if p["type"] == "timeseries"]
        if panels:
            figure = _draw(server, board["title"], panels, start, end)
            drawn.append(folder / f"{path.stem}.png")
            _save(figure, drawn[-1])
    return drawn


def _save(figure: Figure, path: Path) -> None:
    """Small enough for a repository: lines and text need few colours."""
    data = io.BytesIO()
    figure.savefig(data, dpi=70)
    Image.open(data).convert("RGB").quantize(64).save(path, optimize=True)


def _draw(server: Prometheus, title: str, panels: list[dict[str, Any]], start: float, end: float) -> Figure:
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 2.6 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(server, axis, panel, start, end)
    return figure


def _draw_panel(server: Prometheus, axis: Axes, panel: dict[str, Any], start: float, end: float) -> None:
    step_s = max(1.0, (end - start) / 200)
    count = 0
    for target in panel["targets"]:
        for series in server.query_range(fill_variables(target["expr"], VARIABLES), start, end, step_s):
            times = [float(t) - start for t, _ in series["values"]]
            axis.plot(times, [float(v) for _, v in series["values"]], label=_legend(target, series["metric"]))
            count += 1
    defaults = panel["fieldConfig"]["defaults"]
    axis.set_title(panel["title"], fontsize=9)
    axis.tick_params(labelsize=7)
    axis.set_ylim(bottom=0)
    if defaults["unit"] == "percentunit":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    else:
        axis.yaxis.set_major_formatter(EngFormatter(_UNITS.get(defaults["unit"], "")))
    if 0 < count <= 8:
        axis.legend(fontsize=6, loc="upper left")
    elif count == 0:
        axis.text(0.5, 0.5, "no data", ha="center", va="center", transform=axis.transAxes, color="gray")


def _legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    if target["legendFormat"] == "__auto":
        return ", ".join(f"{k}={v}" for k, v in labels.items()) or "value"
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: labels.get(m.group(1), ""), target["legendFormat"])
