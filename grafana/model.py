"""Grafana's dashboard JSON (schema of Grafana 10), as far as it is needed. Knows nothing about Sightline's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39
GRID_COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "heatmap", "table", "text"]
Color = Literal["green", "yellow", "orange", "red", "blue"]
Thresholds = tuple[tuple[float, Color], ...]
"""(from this value on, this color), ascending; below the first one green."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL query of a panel."""

    expr: str
    legend: str = ""
    """Name of a series; `{{label}}` is replaced by Grafana."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `description` says what it shows and what a reader should do about it."""

    title: str
    description: str
    queries: tuple[Query, ...] = ()
    kind: Kind = "timeseries"
    unit: str = "short"
    """Grafana's unit id: `s`, `reqps`, `percentunit`, `bytes`, `Bps`, `ops`, ..."""
    width: int = 8
    """Of 24 columns."""
    height: int = 8
    """In Grafana's grid rows of 30 pixels."""
    thresholds: Thresholds = ()
    stacked: bool = False
    max_value: float | None = None
    runbook: str | None = None
    """Title of the runbook entry to open from here."""
    needs: str | None = None
    """What else must be scraped for this panel to have data."""
    markdown: str = ""
    """Of a text panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A template variable filled from label values."""

    name: str
    query: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    tags: tuple[str, ...] = ("sightline",)

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    def to_json(self, runbook_links: dict[str, Link]) -> dict[str, Any]:
        """Grafana's form.

        Args:
            runbook_links: By title of the runbook entry.
        """
        return {
            "annotations": {"list": []},
            "description": self.description,
            "editable": False,
            "fiscalYearStartMonth": 0,
            "graphTooltip": 1,
            "id": None,
            "links": [
                {
                    "asDropdown": False,
                    "icon": "external link",
                    "includeVars": True,
                    "keepTime": True,
                    "tags": list(self.tags),
                    "title": "Sightline",
                    "type": "dashboards",
                }
            ],
            "panels": _laid_out(self.rows, runbook_links),
            "refresh": "30s",
            "schemaVersion": SCHEMA_VERSION,
            "tags": list(self.tags),
            "templating": {"list": [_datasource_variable(), *(_query_variable(v) for v in self.variables)]},
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
            "version": 1,
        }


def _laid_out(rows: Sequence[Row], runbook_links: dict[str, Link]) -> list[dict[str, Any]]:
    """Panels left to right, a new line where one does not fit; ids count up in reading order."""
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        position = {"h": 1, "w": GRID_COLUMNS, "x": 0, "y": y}
        placed.append(
            {
                "collapsed": False,
                "gridPos": position,
                "id": len(placed) + 1,
                "panels": [],
                "title": row.title,
                "type": "row",
            }
        )
        x, y, line_height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > GRID_COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            link = runbook_links[panel.runbook] if panel.runbook else None
            placed.append({"id": len(placed) + 1, "gridPos": position, **_panel(panel, link)})
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return placed


def _panel(panel: Panel, link: Link | None) -> dict[str, Any]:
    common: dict[str, Any] = {"title": panel.title, "description": panel.description, "type": panel.kind}
    if panel.needs:
        common["description"] += f"\n\nNeeds {panel.needs}."
    if link is not None:
        common["links"] = [{"title": f"Runbook: {link.title}", "url": link.url, "targetBlank": True}]
    if panel.kind == "text":
        return {**common, "options": {"mode": "markdown", "content": panel.markdown}, "transparent": True}
    return {
        **common,
        "datasource": DATASOURCE,
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _target(panel: Panel, index: int, query: Query) -> dict[str, Any]:
    instant = panel.kind == "table"
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": instant,
        "legendFormat": query.legend or "__auto",
        "range": not instant,
        "refId": chr(ord("A") + index),
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.thresholds]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {},
    }
    if panel.max_value is not None:
        defaults["max"] = panel.max_value
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stacked else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
        }
    return defaults


_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "background",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "unit": "s"},
    },
    "table": {"cellHeight": "sm", "footer": {"show": False}, "showHeader": True},
}


def _datasource_variable() -> dict[str, Any]:
    return {
        "current": {},
        "hide": 0,
        "includeAll": False,
        "label": "Data source",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "type": "datasource",
    }


def _query_variable(variable: Variable) -> dict[str, Any]:
    return {
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": DATASOURCE,
        "definition": variable.query,
        "hide": 0,
        "includeAll": True,
        "label": variable.label,
        "multi": True,
        "name": variable.name,
        "options": [],
        "query": {"qryType": 1, "query": variable.query, "refId": f"variable-{variable.name}"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }
