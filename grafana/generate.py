"""`python -m grafana.generate` writes every generated file; `--check` only says which ones are out of date.

Generated are dashboards/*.json and, between its two markers, the metrics table in README.md. The runbook dashboard is
made from README.md's runbook, so that an on-call engineer reads it next to the panels.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from deployments.metrics import table
from grafana.boards import capacity, engine, overview, pictures, tenants
from grafana.model import Dashboard, Link, Panel, Row

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
TABLE_BEGIN = "<!-- metrics table: begin (python -m grafana.generate) -->"
TABLE_END = "<!-- metrics table: end -->"
RUNBOOK_UID = "sightline-runbook"

BOARDS: tuple[Dashboard, ...] = (
    overview.DASHBOARD,
    pictures.DASHBOARD,
    engine.DASHBOARD,
    capacity.DASHBOARD,
    tenants.DASHBOARD,
)


def runbook(readme: str) -> dict[str, str]:
    """Title -> Markdown of each `###` entry under `## Runbook`.

    Raises:
        ValueError: There is no runbook.
    """
    _, found, after = readme.partition("\n## Runbook\n")
    if not found:
        raise ValueError("README.md has no section `## Runbook`")
    section = re.split(r"(?m)^## ", after)[0]
    entries = re.split(r"(?m)^### ", section)[1:]
    return {title.strip(): text.strip() for title, _, text in (entry.partition("\n") for entry in entries)}


def anchor(title: str) -> str:
    """A heading's anchor, as Git hosts make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def runbook_dashboard(entries: Mapping[str, str]) -> Dashboard:
    panels = tuple(
        Panel(title=title, description="", kind="text", markdown=text, width=12, height=9)
        for title, text in entries.items()
    )
    return Dashboard(
        uid=RUNBOOK_UID,
        title="Sightline / Runbook",
        description="What each alert means, where to look and what to do.",
        rows=(Row(title="Runbook", panels=panels),),
    )


def runbook_links(entries: Mapping[str, str]) -> dict[str, Link]:
    """To each entry's panel of the runbook dashboard; its row has id 1."""
    return {
        title: Link(title=title, url=f"/d/{RUNBOOK_UID}?viewPanel={number}")
        for number, title in enumerate(entries, start=2)
    }


def generated(readme: str) -> dict[Path, str]:
    """Path -> text of every generated file."""
    entries = runbook(readme)
    links = runbook_links(entries)
    files = {README: _with_table(readme)}
    for board in (*BOARDS, runbook_dashboard(entries)):
        name = board.uid.removeprefix("sightline-")
        files[FOLDER / "dashboards" / f"{name}.json"] = json.dumps(board.to_json(links), indent=2) + "\n"
    return files


def _with_table(readme: str) -> str:
    before, begin, rest = readme.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not (begin and end):
        raise ValueError("README.md lacks the markers of the metrics table")
    return f"{before}{begin}\n{table()}\n{end}{after}"


def stale() -> list[Path]:
    """Files that differ from what would be generated, and dashboards that nothing generates."""
    files = generated(README.read_text(encoding="utf-8"))
    differing = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return differing + [path for path in (FOLDER / "dashboards").iterdir() if path not in files]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grafana.generate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    args = parser.parse_args(argv)
    if args.check:
        outdated = stale()
        sys.stdout.writelines(f"out of date: {path.relative_to(FOLDER)}\n" for path in outdated)
        return 1 if outdated else 0
    for path, text in generated(README.read_text(encoding="utf-8")).items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
