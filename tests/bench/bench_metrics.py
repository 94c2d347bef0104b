"""What metrics cost: CPU spent on them for one request, as a share of all CPU that a real application spends on one.

    python -m tests.bench.bench_metrics --out tests/bench/results/metrics.json

The application runs with one replica of each deployment. Its CPU per request is what its replicas and proxy used while
requests ran, less what they use when idle. The CPU of metrics is measured in this process, on the real classes: all
observations of one such request (in the ingress and in the engine), and a whole page over the application's four
replicas, which one scrape costs at any rate of requests. On a busy machine both take longer alike; CPU is compared, not
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from app.deployment import PrometheusObserver
from app.ingress import CHAT
from app.observer import Usage
from deployments.lm_engine.deployment import EngineObservations
from deployments.lm_engine.engine_stats import EngineCounters
from deployments.lm_engine.stats import SchedulerStats
from deployments.metrics import ReplicaMetrics
from tests.bench import synthetic_replicas
from tests.serve.app_process import AppProcess, running_app
from tests.serve.situations import picture, text

SCRAPE_INTERVAL_S = 15
"""As in grafana/prometheus/prometheus.yml."""
STAGES = ("receive", "admission", "tokenize", "fetch", "decode", "preprocess", "queue", "encode", "transfer", "prefill")
ENGINE_STAGES = ("queue", "encode", "prefill", "generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    requests: int
    tokens_per_request: int
    request_cpu_ms: float
    """All replicas and the proxy together, less their idle CPU."""
    idle_cpu_share: float
    """CPUs used by the idle application."""
    observations_cpu_us: float
    """Counters and histograms of one request, in the ingress and in the engine."""
    observations_share: float
    scrape_cpu_ms: float
    """Collecting and rendering one page over four replicas."""
    scrape_share_of_a_cpu: float
    """At one scrape in 15 s."""
    page_bytes: int


def cpu_of(work: Callable[[], object], rounds: int, times: int) -> float:
    """CPU seconds of one call: the median of several rounds."""
    seconds = []
    for _ in range(rounds):
        began_s = time.process_time()
        for _ in range(times):
            work()
        seconds.append((time.process_time() - began_s) / times)
    return statistics.median(seconds)


def observations(tokens: int) -> Callable[[], None]:
    """Does what one request with so many streamed tokens makes metrics do."""
    observer = PrometheusObserver(ReplicaMetrics("Ingress", "i"), frozenset(("acme",)))
    counters, engine = EngineCounters(), EngineObservations(ReplicaMetrics("LMEngine", "e"))
    stage_seconds = dict.fromkeys((*STAGES, "generation"), 0.01)
    engine_seconds = dict.fromkeys(ENGINE_STAGES, 0.01)
    usage = Usage(prompt_tokens=100, completion_tokens=tokens, image_tokens=36)

    def one_request() -> None:
        observer.started(CHAT)
        observer.first_token(CHAT, 0.1)
        counters.observe_first_token(0.1)
        for _ in range(tokens - 1):
            observer.token_gap(CHAT, 0.01, 1)
            counters.observe_inter_token(0.01)
        observer.finished(CHAT, 200, 1.0, stage_seconds, usage, "acme")
        counters.observe_end("stop", engine_seconds)
        engine.add(counters.take(SchedulerStats(), 0))

    return one_request


def cpu_seconds(app: AppProcess) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in app.processes() if process.is_running())


def measure_application(app: AppProcess, requests: int, tokens: int, idle_s: float) -> tuple[float, float]:
    """(CPU seconds of one request, CPUs used when idle)."""
    with httpx.Client(base_url=app.url, timeout=300, trust_env=False) as client:

        def ask() -> None:
            content = [picture(), text()]
            body = {"model": app.model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
            with client.stream("POST", CHAT, json={**body, "ignore_eos": True, "stream": True}) as answer:
                assert answer.status_code == 200
                answer.read()

        for _ in range(5):
            ask()
        before, began_s = cpu_seconds(app), time.monotonic()
        time.sleep(idle_s)
        idle = (cpu_seconds(app) - before) / (time.monotonic() - began_s)
        before, began_s = cpu_seconds(app), time.monotonic()
        for _ in range(requests):
            ask()
        used_s, passed_s = cpu_seconds(app) - before, time.monotonic() - began_s
    return (used_s - idle * passed_s) / requests, idle


def measure(requests: int, tokens: int, idle_s: float) -> Result:
    with tempfile.TemporaryDirectory() as folder, running_app(Path(folder), args={}, replicas={}) as app:
        request_s, idle = measure_application(app, requests, tokens, idle_s)
    observations_s = cpu_of(observations(tokens), rounds=9, times=200)
    replicas = synthetic_replicas.application()[::2]
    page = synthetic_replicas.page(replicas)
    scrape_s = cpu_of(lambda: synthetic_replicas.page(replicas), rounds=9, times=5)
    return Result(
        requests=requests,
        tokens_per_request=tokens,
        request_cpu_ms=round(request_s * 1e3, 2),
        idle_cpu_share=round(idle, 4),
        observations_cpu_us=round(observations_s * 1e6, 1),
        observations_share=round(observations_s / request_s, 5),
        scrape_cpu_ms=round(scrape_s * 1e3, 2),
        scrape_share_of_a_cpu=round(scrape_s / SCRAPE_INTERVAL_S, 6),
        page_bytes=len(page),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")
    parser.add_argument("--idle-s", type=float, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    result = measure(args.requests, args.tokens, args.idle_s)
    line = json.dumps({"benchmark": "metrics", "cpus": psutil.cpu_count(), **asdict(result)})
    print(line)
    if args.out:
        args.out.write_text(json.dumps(json.loads(line), indent=2) + "\n", encoding="utf-8")
    return 0 if result.observations_share + result.scrape_share_of_a_cpu < 0.01 else 1


if __name__ == "__main__":
    raise SystemExit(main())
