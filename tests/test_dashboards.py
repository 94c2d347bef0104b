"""Dashboards, rules and configuration name only what the code exports, and the generated files are up to date."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from deployments.metrics import BY_NAME, FAMILIES, PREFIX
from grafana import generate
from grafana.promql import PromQLError, References, Selector, fill_variables, legend_labels, references, tokens
from tests.bench import synthetic_replicas

GRAFANA = Path(generate.__file__).parent
RULES = sorted((GRAFANA / "prometheus" / "rules").glob("*.yml"))
BOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))

ON_EVERY_SERIES = {"deployment", "replica", "job", "instance"}
UNUSED: frozenset[str] = frozenset()
"""Families that are on no dashboard on purpose."""

PROMETHEUS_OWN = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "severity"}}
RAY_FAMILIES = {
    "ray_serve_autoscaling_target_replicas": {"deployment", "application"},
    "ray_serve_autoscaling_desired_replicas": {"deployment", "application"},
    "ray_serve_deployment_replica_healthy": {"deployment", "application", "replica"},
    "ray_serve_deployment_queued_queries": {"deployment", "application", "handle", "actor_id"},
    "ray_object_store_memory": {"Location", "instance"},
    "ray_resources": {"Name", "State", "instance"},
}
VARIABLES = {
    "deployment": ".*",
    "replica": ".*",
    "tenant": ".*",
    "__rate_interval": "1m",
    "__range": "1h",
}


@dataclass(frozen=True, slots=True)
class Use:
    where: str
    expr: str
    legend: str = ""

    @property
    def references(self) -> References:
        return references(fill_variables(self.expr, VARIABLES))


def load_board(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def panel_uses() -> list[Use]:
    return [
        Use(f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"])
        for path in BOARDS
        for panel in load_board(path)["panels"]
        for target in panel.get("targets", ())
    ]


def rule_uses() -> list[Use]:
    return [Use(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


RECORDED = {rule["record"]: set(references(rule["expr"]).labels) for rule in rules() if "record" in rule}
ALERTS = [rule for rule in rules() if "alert" in rule]
PANELS = panel_uses()
USES = [*PANELS, *rule_uses()]


def labels_of(selector: Selector) -> set[str]:
    """Labels that series of this name can have. Raises AssertionError for a name that nothing exports."""
    name = selector.name
    for known in (PROMETHEUS_OWN, RECORDED, RAY_FAMILIES):
        if name in known:
            return set(known[name])
    assert name.startswith(PREFIX), f"nothing exports {name}"
    bare = name.removeprefix(PREFIX)
    family = BY_NAME.get(bare)
    if family is not None and family.kind != "histogram":
        return {*family.labels, *ON_EVERY_SERIES}
    bare, _, part = bare.rpartition("_")
    family = BY_NAME.get(bare)
    if family is not None and family.kind == "histogram" and part in ("bucket", "sum", "count"):
        return {*family.labels, *ON_EVERY_SERIES, *({"le"} if part == "bucket" else ())}
    raise AssertionError(f"no family is named {name}")


def check(use: Use) -> None:
    found = use.references
    assert found.selectors, f"{use.where}: no metric in {use.expr}"
    possible: set[str] = set(found.made_labels)
    for selector in found.selectors:
        labels = labels_of(selector)
        possible |= labels
        unknown = {matcher.label for matcher in selector.matchers} - labels
        assert not unknown, f"{use.where}: {selector.name} has no label {unknown}"
    assert found.labels <= possible, f"{use.where}: nothing has the labels {found.labels - possible}"
    shown = set(legend_labels(use.legend))
    assert shown <= found.labels, f"{use.where}: the legend shows {shown - found.labels}, which the query drops"


@pytest.mark.parametrize("use", USES, ids=lambda use: use.where)
def test_queries_name_only_what_is_exported(use: Use) -> None:
    check(use)


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sightline_nothing_total", "no family"),
        ("rate(sightline_request_seconds[5m])", "no family"),
        ("sightline_requests_total_bucket", "no family"),
        ("node_cpu_seconds_total", "nothing exports"),
        ('sightline_requests_total{code="200"}', "no label"),
        ("sum by (tier) (sightline_requests_total)", "nothing has the labels"),
        ("vector(0)", "no metric"),
    ],
)
def test_a_wrong_query_is_found(expr: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check(Use("made up", expr))


def test_a_legend_with_a_dropped_label_is_found() -> None:
    with pytest.raises(AssertionError, match="legend"):
        check(Use("made up", "sum by (status) (sightline_requests_total)", "{{endpoint}}"))


@pytest.mark.parametrize("use", USES, ids=lambda use: use.where)
def test_matchers_can_match(use: Use) -> None:
    """A literal value in a matcher is one that the code sets: `outcome="reject"` would be empty for ever."""
    for selector in use.references.selectors:
        family = BY_NAME.get(selector.name.removeprefix(PREFIX))
        for matcher in selector.matchers if family is not None else ():
            values = synthetic_replicas.values_of(family, matcher.label)  # type: ignore[arg-type]
            if values is None:
                continue
            pattern = matcher.value if "~" in matcher.operator else re.escape(matcher.value)
            assert any(re.fullmatch(pattern, value) for value in values), f"{use.where}: {matcher} matches no value"


def test_every_family_is_on_a_dashboard() -> None:
    shown = {selector.name for use in PANELS for selector in use.references.selectors}
    shown |= {selector.name for rule in rule_uses() for selector in rule.references.selectors if rule.where in shown}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name.removeprefix(PREFIX)) for name in shown}
    missing = {family.name for family in FAMILIES} - bare - UNUSED
    assert not missing, f"add a panel to grafana/boards, or the name to UNUSED here: {sorted(missing)}"
    assert not UNUSED & bare, "listed as unused, but used"


def test_generated_files_are_up_to_date() -> None:
    assert generate.stale() == [], "run `python -m grafana.generate`"


def test_generator_notices_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "grafana"
    shutil.copytree(GRAFANA / "dashboards", copy / "dashboards")
    shutil.copy(generate.README, copy / "README.md")
    monkeypatch.setattr(generate, "FOLDER", copy)
    monkeypatch.setattr(generate, "README", copy / "README.md")
    assert generate.main(["--check"]) == 0
    (copy / "dashboards" / "overview.json").write_text("{}", encoding="utf-8")
    (copy / "dashboards" / "old.json").write_text("{}", encoding="utf-8")
    assert {path.name for path in generate.stale()} == {"overview.json", "old.json"}
    assert generate.main(["--check"]) == 1


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_are_whole(path: Path) -> None:
    board = load_board(path)
    uids = {load_board(other)["uid"] for other in BOARDS}
    assert board["uid"] == f"sightline-{path.stem}"
    assert len(uids) == len(BOARDS)
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    for panel in panels:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        if panel["type"] in ("row", "text"):
            continue
        assert len(panel["description"]) > 20, f"{panel['title']} says nothing to its reader"
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$([a-z]\w*)", target["expr"]))
            assert used <= variables, f"{panel['title']} uses {used - variables}"
        for link in panel.get("links", ()):
            assert link["url"].split("?")[0].removeprefix("/d/") in uids
    assert not _overlapping(panels)


def _overlapping(panels: list[dict[str, Any]]) -> bool:
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        p = panel["gridPos"]
        covered = {(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
        if cells & covered:
            return True
        cells |= covered
    return False


def test_panel_links_open_their_runbook_entry() -> None:
    entries = {panel["id"]: panel["title"] for panel in load_board(GRAFANA / "dashboards" / "runbook.json")["panels"]}
    links = [link for path in BOARDS for panel in load_board(path)["panels"] for link in panel.get("links", ()) if link]
    assert links
    for link in links:
        assert f"Runbook: {entries[int(link['url'].partition('viewPanel=')[2])]}" == link["title"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_lead_to_a_runbook_entry(alert: dict[str, Any]) -> None:
    path, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert path == "grafana/README.md"
    entries = generate.runbook(generate.README.read_text(encoding="utf-8"))
    text = {generate.anchor(title): text for title, text in entries.items()}[anchor]
    assert all(f"**{part}**" in text for part in ("Means", "Look", "Do"))
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["annotations"]["summary"]


def test_every_runbook_entry_has_an_alert() -> None:
    entries = generate.runbook(generate.README.read_text(encoding="utf-8"))
    assert {generate.anchor(title) for title in entries} == {
        alert["annotations"]["runbook"].partition("#")[2] for alert in ALERTS
    }


def test_every_alert_has_a_test() -> None:
    tests = yaml.safe_load((GRAFANA / "prometheus" / "tests" / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in ALERTS}


def test_recorded_names_are_used() -> None:
    used = {selector.name for use in USES for selector in use.references.selectors}
    assert set(RECORDED) - used == {"sightline:replicas:count", "sightline:cache_hits:ratio_rate5m"}, (
        "recorded for queries over long times only; use the others or drop them"
    )


@pytest.mark.parametrize("name", RAY_FAMILIES)
def test_ray_exports_what_is_asked_of_it(name: str) -> None:
    """In the installed Ray: its Serve library defines the metric, or its own dashboards show it."""
    bare, package = name.removeprefix("ray_"), Path(ray.__file__).parent
    sources = [*(package / "serve" / "_private").glob("*.py"), *(package / "dashboard").rglob("*_panels.py")]
    assert any(f'"{bare}"' in text or f"{name}{{" in text for text in (p.read_text(encoding="utf-8") for p in sources))


def test_provisioning_and_compose_agree() -> None:
    compose = yaml.safe_load((GRAFANA / "docker-compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    mounts = dict(v.split(":")[:2] for service in services.values() for v in service["volumes"] if v.startswith("./"))
    assert all((GRAFANA / source).is_dir() for source in mounts)
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/sightline.yaml").read_text(encoding="utf-8"))
    assert providers["providers"][0]["options"]["path"] == mounts["./dashboards"]
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8"))
    config = yaml.safe_load((GRAFANA / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    data_source = source["datasources"][0]
    assert data_source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert data_source["url"] == "http://prometheus:9090"
    assert {job["job_name"] for job in config["scrape_configs"]} == {"sightline", "sightline-replicas", "ray"}


def test_kuberay_monitors_use_the_same_jobs() -> None:
    documents = list(yaml.safe_load_all((GRAFANA / "kuberay/monitors.yaml").read_text(encoding="utf-8")))
    scrape, pods = documents
    assert scrape["spec"]["jobName"] == "sightline"
    assert len(scrape["spec"]["staticConfigs"][0]["targets"]) == 1
    assert pods["spec"]["podMetricsEndpoints"][0]["relabelings"][0] == {"targetLabel": "job", "replacement": "ray"}


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")


@promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    _promtool("check", "config", str(GRAFANA / "prometheus" / "prometheus.yml"))
    _promtool("check", "rules", *map(str, RULES))


@promtool
def test_alerts_fire_when_they_should() -> None:
    _promtool("test", "rules", str(GRAFANA / "prometheus" / "tests" / "alerts_test.yml"))


def _promtool(*arguments: str) -> None:
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_synthetic_replicas_export_every_family() -> None:
    """So that the check against a real Prometheus looks at everything."""
    text = synthetic_replicas.page(synthetic_replicas.application()).decode()
    exported = set(re.findall(rf"(?m)^# TYPE {PREFIX}(\w+)", text))
    assert synthetic_replicas.missing_families(exported) == set()


# ---- the tokenizer
def test_selectors_matchers_and_groupings_are_found() -> None:
    found = references(
        'sum by (a, b) (rate(x_total{l="by (c)",m!~"y{2}"}[5m] offset 1h)) / on (d) group_left (e) '
        '(label_replace(z:rate, "f", "$1", "g", "(.*)") > bool 1e3) unless w # comment { '
    )
    assert [str(s) for s in found.selectors] == ['x_total{l="by (c)",m!~"y{2}"}', "z:rate", "w"]
    assert found.labels == {"a", "b", "d", "e"}
    assert found.made_labels == {"f"}


def test_grouping_after_the_expression_and_function_names() -> None:
    found = references("sum(up) by (job) + count without (instance) (up) + time() - histogram_quantile(0.9, q)")
    assert [s.name for s in found.selectors] == ["up", "up", "q"]
    assert found.labels == {"job", "instance"}


@pytest.mark.parametrize("expr", ["sum(up", "up)", "up{job=}", 'up{"job"}', "up{job='x' y='z'}", "up ~ 1", "$x"])
def test_broken_expressions_are_refused(expr: str) -> None:
    with pytest.raises(PromQLError):
        references(expr)


def test_variables_are_filled() -> None:
    assert fill_variables('x{d=~"$d"}[${r}]', {"d": ".*", "r": "5m"}) == 'x{d=~".*"}[5m]'
    with pytest.raises(PromQLError, match="unknown"):
        fill_variables("$unknown", {})


def test_tokens_cover_durations_and_numbers() -> None:
    assert [t.kind for t in tokens("1h30m 1.5e-3 0x1F .5 5")] == ["duration", "number", "number", "number", "number"]
