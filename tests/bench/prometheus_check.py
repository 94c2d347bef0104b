"""Every panel's and alert's query against a real Prometheus that scrapes an application.

    python -m tests.bench.prometheus_check                                     synthetic replicas, no application needed
    python -m tests.bench.prometheus_check --target http://127.0.0.1:8000      a running application (send it load)
    python -m tests.bench.prometheus_check --situations --watch-s 60           an application short of everything
    ... --png FOLDER                                                           also draw every panel (needs matplotlib)

Prometheus runs on loopback with the repository's configuration; only targets, intervals and paths are changed. A query
passes if it returns data, a true zero included. Alerts are silent when all is well, so each selector in an alert's
query is asked for alone. Prints a table, then one JSON line; the exit code is 1 if a query fails.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import yaml

from deployments.metrics import FAMILIES, PREFIX, Family
from grafana.promql import Selector, fill_variables, references
from tests.bench import synthetic_replicas

GRAFANA = Path(__file__).parents[2] / "grafana"
SCRAPE_S = 1
RATE_INTERVAL = "15s"
VARIABLES = {"deployment": ".*", "replica": ".*", "tenant": ".*", "__rate_interval": RATE_INTERVAL, "__range": "1h"}

Verdict = Literal["data", "zero", "no traffic", "never happened", "not scraped", "EMPTY", "ERROR"]
PASSING: frozenset[Verdict] = frozenset(("data", "zero", "never happened", "not scraped"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    where: str
    expr: str
    verdict: Verdict
    num_series: int = 0
    note: str = ""


class Prometheus:
    """The few calls of its HTTP API that are needed."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        return self._get("/api/v1/query", query=expr)["data"]["result"]

    def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        answer = self._get("/api/v1/query_range", query=expr, start=start, end=end, step=step_s)
        return answer["data"]["result"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def rules_evaluated(self) -> bool:
        groups = self._get("/api/v1/rules")["data"]["groups"]
        return bool(groups) and all(not group["lastEvaluation"].startswith("0001") for group in groups)

    def _get(self, path: str, **parameters: object) -> dict[str, Any]:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise QueryError(json.load(error)["error"]) from None


class QueryError(RuntimeError):
    """Prometheus refused a query; the message is its own."""


@contextmanager
def synthetic_target() -> Iterator[str]:
    """URL of a server whose /metrics shows synthetic replicas."""
    replicas, lock = synthetic_replicas.application(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                with lock:
                    body = synthetic_replicas.page(replicas)
                content_type = "text/plain; version=0.0.4; charset=utf-8"
            elif self.path == "/metrics/targets":
                body, content_type = b"[]", "application/json"
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def adapted_configuration(target: str) -> dict[str, Any]:
    """The repository's configuration with another target and intervals of a second.

    Args:
        target: Base URL of the application.
    """
    text = (GRAFANA / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    address = urllib.parse.urlsplit(target).netloc
    config = yaml.safe_load(text.replace("sightline:8000", address))
    config["global"] = {f"{name}_interval": f"{SCRAPE_S}s" for name in ("scrape", "evaluation")}
    config["global"]["scrape_timeout"] = f"{SCRAPE_S}s"
    config["rule_files"] = [str(GRAFANA / "prometheus" / "rules" / "*.yml")]
    return config


@contextmanager
def prometheus(target: str, binary: str = "prometheus") -> Iterator[Prometheus]:
    """A server on loopback that has scraped `target` a few times and evaluated the rules."""
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(yaml.safe_dump(adapted_configuration(target)), encoding="utf-8")
        address = f"127.0.0.1:{_free_port()}"
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address={address}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                server = Prometheus(f"http://{address}")
                _wait("Prometheus did not start", lambda: process.poll() is None and server.is_ready(), 30)
                _wait("the target was not scraped", lambda: _has_scraped(server), 60)
                yield server
            except TimeoutError as error:
                log.seek(0)
                raise RuntimeError(f"{error}\n{log.read().decode(errors='replace')[-2000:]}") from error
            finally:
                process.terminate()
                process.wait(timeout=20)


def _has_scraped(server: Prometheus, scrapes: int = 4) -> bool:
    up = server.query('sum_over_time(up{job="sightline"}[1m])')
    return bool(up) and float(up[0]["value"][1]) >= scrapes and server.rules_evaluated()


def _wait(what: str, done: Callable[[], bool], limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > ends:
            raise TimeoutError(what)
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """(board and panel, query, legend) of every panel."""
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                legend = target["legendFormat"].replace("__auto", "")
                yield f"{path.stem}: {panel['title']}", fill_variables(target["expr"], VARIABLES), legend


def alert_queries() -> Iterator[tuple[str, str]]:
    for path in sorted((GRAFANA / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    yield rule["alert"], rule["expr"]


def check_panel(server: Prometheus, where: str, expr: str) -> Result:
    try:
        series = server.query(expr)
    except QueryError as error:
        return Result(where=where, expr=expr, verdict="ERROR", note=str(error))
    values = [float(s["value"][1]) for s in series]
    numbers = [value for value in values if not math.isnan(value)]
    if numbers:
        verdict: Verdict = "data" if any(numbers) else "zero"
    elif _reads_ray(expr):
        verdict = "not scraped"
    elif values or _all_have_data(server, expr):
        verdict = "no traffic"
    else:
        verdict = "EMPTY"
    return Result(where=where, expr=expr, verdict=verdict, num_series=len(series))


def check_alert(server: Prometheus, where: str, expr: str) -> Result:
    """The query must be accepted, and each of its selectors must find series or differ from one that does by values."""
    try:
        firing = len(server.query(expr))
    except QueryError as error:
        return Result(where=where, expr=expr, verdict="ERROR", note=str(error))
    never, verdict = [], "data"
    for selector in references(expr).selectors:
        if server.query(str(selector)):
            continue
        if not server.query(selector.name) and not selector.name.startswith("sightline:"):
            return Result(where=where, expr=expr, verdict="EMPTY", note=f"nothing is named {selector.name}")
        never.append(str(selector))
    if never:
        verdict = "never happened"
    note = "; ".join([*(["true now"] if firing else []), *never])
    return Result(where=where, expr=expr, verdict=verdict, num_series=firing, note=note)  # type: ignore[arg-type]


def _reads_ray(expr: str) -> bool:
    return any(selector.name.startswith("ray_") for selector in references(expr).selectors)


def _all_have_data(server: Prometheus, expr: str) -> bool:
    """Whether every family of the query exists, whatever the labels' values."""
    return all(server.query(Selector(selector.name).name) for selector in references(expr).selectors)


def check_family(server: Prometheus, family: Family) -> Result:
    """A panel reads 0 for a counter that is not exported at all, so whether it is gets asked for by itself."""
    name = f"{PREFIX}{family.name}{'_count' if family.kind == 'histogram' else ''}"
    series = server.query(f"count({name})")
    found = int(float(series[0]["value"][1])) if series else 0
    return Result(where=f"family {family.name}", expr=name, verdict="data" if found else "EMPTY", num_series=found)


def check_everything(server: Prometheus) -> list[Result]:
    families = [check_family(server, family) for family in FAMILIES]
    panels = [check_panel(server, where, expr) for where, expr, _ in panel_queries()]
    return families + panels + [check_alert(server, where, expr) for where, expr in alert_queries()]


def report(results: Sequence[Result], *, allow_idle: bool = False, allow_missing: Sequence[str] = ()) -> int:
    """Print a table and a JSON line; the exit code.

    Args:
        allow_idle: Ratios and quantiles without traffic pass.
        allow_missing: Families without prefix that this application need not export, and queries of nothing else.
    """
    for result in results:
        print(f"{result.verdict:14} {result.num_series:4}  {result.where:58} {result.note}".rstrip())
    passing = PASSING | {"no traffic"} if allow_idle else PASSING
    failed = [r for r in results if r.verdict not in passing and not _may_be_empty(r, allow_missing)]
    for result in failed:
        print(f"\n{result.verdict}: {result.where}\n  {result.expr}\n  {result.note}")
    counts = Counter(result.verdict for result in results)
    print(json.dumps({"queries": len(results), "verdicts": counts, "failed": [asdict(r) for r in failed]}))
    return 1 if failed else 0


def _may_be_empty(result: Result, allowed: Sequence[str]) -> bool:
    if result.verdict != "EMPTY":
        return False
    bases = (re.sub(r"_(bucket|sum|count)$", "", s.name) for s in references(result.expr).selectors)
    return any(base.removeprefix(PREFIX) in allowed for base in bases)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", help="base URL of a running application (default: synthetic replicas)")
    parser.add_argument(
        "--situations",
        action="store_true",
        help="start an application with tight budgets, and bring each of its limits about again and again",
    )
    parser.add_argument(
        "--ray-metrics",
        action="store_true",
        help="with --situations: start Ray's metric agents as well, and scrape them",
    )
    parser.add_argument("--prometheus", default="prometheus", help="the program (default: %(default)s)")
    parser.add_argument("--watch-s", type=float, default=0, help="keep scraping for so long before asking")
    parser.add_argument("--allow-idle", action="store_true", help="let ratios and quantiles without traffic pass")
    parser.add_argument(
        "--allow-missing",
        metavar="FAMILY",
        action="append",
        default=[],
        help="a family that need not exist here, such as cache_breaker_open without Redis",
    )
    parser.add_argument("--png", type=Path, help="draw every panel into this folder")
    args = parser.parse_args(argv)
    if shutil.which(args.prometheus) is None:
        parser.error(f"{args.prometheus} is not installed (Debian: apt-get install prometheus)")
    chosen = situations_target(args.ray_metrics) if args.situations else target_or_synthetic(args.target)
    with chosen as target, prometheus(target, args.prometheus) as server:
        began = time.time()
        time.sleep(args.watch_s)
        results = check_everything(server)
        if args.png:
            from tests.bench.draw_panels import draw_boards

            draw_boards(server, args.png, start=began - 5, end=time.time())
    return report(results, allow_idle=args.allow_idle, allow_missing=args.allow_missing)


@contextmanager
def situations_target(ray_metrics: bool) -> Iterator[str]:
    """URL of a real application under a load that brings every forced situation about, as long as the block runs."""
    from tests.serve.situations import Situations, running_situations

    def load(app: Situations, stop: threading.Event) -> None:
        steps = (
            *(
                app.repeat,
                app.same_picture_at_once,
                app.named_picture,
                app.more_pictures_than_slots,
                app.more_pictures_than_context,
                app.more_pixels_than_allowed,
            ),
            *(app.long_answers_at_once, app.small_picture, app.broken_picture, app.fetched_picture, app.refused_url),
            *(app.cancelled, app.shared_hit, app.corrupt_entry, app.redis_killed, app.redis_back, app.completion),
        )
        while not stop.is_set():
            for step in steps:
                if not stop.is_set():
                    step()

    with (
        tempfile.TemporaryDirectory(prefix="situations-") as folder,
        running_situations(Path(folder), dashboard=ray_metrics) as app,
    ):
        stop = threading.Event()
        thread = threading.Thread(target=load, args=(app, stop))
        thread.start()
        try:
            yield app.app.url
        finally:
            stop.set()
            thread.join()


@contextmanager
def target_or_synthetic(target: str | None) -> Iterator[str]:
    """The URL as given, or synthetic replicas for as long as the block runs."""
    if target is not None:
        yield target.rstrip("/")
        return
    with synthetic_target() as url:
        yield url


if __name__ == "__main__":
    sys.exit(main())
