"""The dashboards' and alerts' queries against a real Prometheus server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from deployments.metrics import Family
from tests.bench import prometheus_check
from tests.bench.prometheus_check import Prometheus, check_alert, check_everything, check_family, check_panel, report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Prometheus]:
    with prometheus_check.synthetic_target() as target, prometheus_check.prometheus(target) as server:
        yield server


def test_every_query_has_data(server: Prometheus) -> None:
    results = check_everything(server)
    assert len(results) > 90
    failed = [r for r in results if r.verdict not in ("data", "zero", "not scraped")]
    assert not failed
    assert {r.where.partition(":")[0] for r in results if r.verdict == "not scraped"} == {"capacity"}


def test_replicas_are_counted_once(server: Prometheus) -> None:
    counts = {s["metric"]["deployment"]: s["value"][1] for s in server.query("sightline:replicas:count")}
    assert counts == {"Ingress": "2", "Preprocessor": "2", "VisionEncoder": "2", "LMEngine": "2"}


@pytest.mark.parametrize(
    ("expr", "verdict"),
    [
        ("sightline_kv_blocks", "data"),
        ("0 * sum(sightline_kv_blocks)", "zero"),
        ("sightline_kv_blocks > 1e9", "no traffic"),
        ("sightline_no_such_family", "EMPTY"),
        ("sum(", "ERROR"),
        ("ray_resources", "not scraped"),
    ],
)
def test_panel_verdicts(server: Prometheus, expr: str, verdict: str) -> None:
    assert check_panel(server, "made up", expr).verdict == verdict


@pytest.mark.parametrize(
    ("expr", "verdict"),
    [
        ("sightline_kv_blocks > 1e9", "data"),
        ('sightline_kv_blocks{state="lost"} > 0', "never happened"),
        ("sightline_no_such_family > 0", "EMPTY"),
        ("sum(sightline_kv_blocks) by > 0", "ERROR"),
    ],
)
def test_alert_verdicts(server: Prometheus, expr: str, verdict: str) -> None:
    assert check_alert(server, "made up", expr).verdict == verdict


def test_a_family_that_nobody_exports_fails_the_check(server: Prometheus, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        check_family(server, Family("lost_total", "counter", (), "")),
        check_alert(server, "made up", "rate(sightline_lost_total[5m]) > 0"),
    ]
    assert [result.verdict for result in results] == ["EMPTY", "EMPTY"]
    assert report(results) == 1
    assert report(results, allow_missing=["lost_total"]) == 0
    assert report(results, allow_missing=["other_total"]) == 1
    assert "lost_total" in capsys.readouterr().out
