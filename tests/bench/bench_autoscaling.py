"""Autoscaling by work against Serve's default policy, on step and burst traces of pictures for the vision encoder.

    python -m tests.bench.bench_autoscaling [--seed 0] [--out tests/bench/results]

A simulation: each replica encodes first come, first served at a fixed number of patches per second; a new one serves
after its start time; requests go to the replica with the least to do. The metrics are those that a replica reports,
averaged over the look-back period, and both policies run inside Serve's own wrapper (scaling factors, delays, bounds)
with the same bounds and delays. Nothing else of Serve runs. Traces:

- `step`     the rate of requests grows eightfold for ten minutes;
- `burst`    one minute of tenfold rate every five minutes;
- `pictures` the rate stays, the pictures grow from thumbnails to pages.

The default policy runs at Serve's own target of 2 requests a replica, and at the target that costs most nearly the same
replica time on the `step` trace as the work policy, which nobody knows beforehand. Writes autoscaling.json and
autoscaling.png.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import matplotlib
import numpy as np
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_autoscaling_config, replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.autoscaling import WorkPolicy, work_stats
from deployments.work_meter import WorkMeter

matplotlib.use("Agg")
from matplotlib.figure import Figure

PATCHES_PER_S = 60_000.0
START_S = 30.0
TICK_S = 1.0
REPORT_S = 10.0
LOOK_BACK_S = 30.0
BOUNDS = {"min_replicas": 1, "max_replicas": 16, "upscale_delay_s": 5, "downscale_delay_s": 300}
DEFAULT_TARGET = 2.0
TARGETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True)
class Trace:
    name: str
    arrivals_s: np.ndarray
    patches: np.ndarray
    length_s: float


def traces(seed: int) -> Iterator[Trace]:
    rng = np.random.default_rng(seed)
    steady, page = 20.0, 1_500.0

    def make(name: str, length_s: float, rate: Callable[[float], float], mean: Callable[[float], float]) -> Trace:
        peak = max(rate(t) for t in np.arange(0.0, length_s, 1.0))
        times = np.cumsum(rng.exponential(1 / peak, int(peak * length_s * 1.2)))
        times = times[times < length_s]
        times = times[rng.random(len(times)) < np.array([rate(t) for t in times]) / peak]
        # Log-normal: photographs and scans are spread over more than a decade of sizes.
        sizes = rng.lognormal(-0.32, 0.8, len(times)) * np.array([mean(t) for t in times])
        return Trace(name, times, np.clip(sizes, 64, 65_536), length_s)

    yield make("step", 2400, lambda t: steady * (8 if 300 <= t < 900 else 1), lambda _: page)
    yield make("burst", 2400, lambda t: steady * (10 if t % 300 >= 240 else 1), lambda _: page)
    yield make("pictures", 2400, lambda _: steady * 2, lambda t: 6_000.0 if 300 <= t < 900 else 400.0)


@dataclass(eq=False)
class Replica:
    ready_s: float
    clock: Callable[[], float]
    free_s: float = 0.0
    """When it has done everything that was given to it."""
    jobs: list[tuple[float, float, Any]] = field(default_factory=list)
    """(end, patches, the meter's context), a heap by end."""
    reports: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    leaving: bool = False

    def __post_init__(self) -> None:
        self.free_s = self.ready_s
        self.meter = WorkMeter(clock=self.clock)

    def give(self, now: float, patches: float) -> float:
        """Returns when it will be encoded."""
        self.free_s = max(self.free_s, now) + patches / PATCHES_PER_S
        context = self.meter.doing(patches)
        context.__enter__()
        heapq.heappush(self.jobs, (self.free_s, patches, context))
        return self.free_s


@dataclass
class Result:
    trace: str
    policy: str
    wait_p50_s: float
    wait_p95_s: float
    wait_max_s: float
    replica_minutes: float
    most_replicas: int
    changes: int
    reversals: int
    """Changes in the other direction within five minutes of the last one."""


@dataclass
class Series:
    time_s: list[float] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    backlog_s: list[float] = field(default_factory=list)
    """Time one replica would need for everything that waits."""


class Simulation:
    def __init__(self, trace: Trace, policy: Callable[[Any], Any], target_requests: float) -> None:
        self.now = 0.0
        self._trace, self._policy = trace, policy
        self._config = AutoscalingConfig(
            look_back_period_s=LOOK_BACK_S, target_ongoing_requests=target_requests, **BOUNDS
        )
        self._replicas = [Replica(0.0, lambda: self.now)]
        self._target = 1
        self._state: dict[str, Any] = {}
        self.series = Series()
        self.waits: list[float] = []
        self.changes: list[tuple[float, int]] = []
        self.replica_s = 0.0

    def run(self) -> None:
        fake_time = SimpleNamespace(time=lambda: self.now)
        arrivals = deque(zip(self._trace.arrivals_s.tolist(), self._trace.patches.tolist(), strict=True))
        ticks = np.arange(TICK_S, self._trace.length_s, TICK_S).tolist()
        with mock.patch("ray.serve.autoscaling_policy.time", fake_time):
            for tick in ticks:
                while arrivals and arrivals[0][0] <= tick:
                    self._arrive(*arrivals.popleft())
                self._advance(tick)
                self._control()

    def _arrive(self, at: float, patches: float) -> None:
        self._advance(at)
        ready = [r for r in self._replicas if r.ready_s <= at and not r.leaving]
        end = min(ready, key=lambda r: r.free_s).give(at, patches)
        self.waits.append(end - at - patches / PATCHES_PER_S)

    def _advance(self, to: float) -> None:
        """Complete jobs in order, so that the meters see time pass."""
        for replica in self._replicas:
            while replica.jobs and replica.jobs[0][0] <= to:
                self.now, _, context = heapq.heappop(replica.jobs)
                context.__exit__(None, None, None)
        self.now = to

    def _control(self) -> None:
        self.replica_s += TICK_S * len(self._replicas)
        self._replicas = [r for r in self._replicas if not r.leaving or r.jobs]
        serving = [r for r in self._replicas if r.ready_s <= self.now and not r.leaving]
        for replica in serving:
            stats = {**work_stats(replica.meter.read()), "requests": float(len(replica.jobs))}
            replica.reports.append((self.now, stats))
            while replica.reports[0][0] < self.now - LOOK_BACK_S - REPORT_S:
                replica.reports.popleft()
        desired, self._state = self._policy(self._context(serving))
        desired = min(max(desired, self._config.min_replicas), self._config.max_replicas)
        if desired != self._target:
            self.changes.append((self.now, desired - self._target))
            self._resize(desired)
        self.series.time_s.append(self.now)
        self.series.target.append(self._target)
        self.series.running.append(len(serving))
        self.series.backlog_s.append(sum(p for r in self._replicas for _, p, _ in r.jobs) / PATCHES_PER_S)

    def _context(self, serving: list[Replica]) -> AutoscalingContext:
        # Replicas report every REPORT_S: what the controller averages is that old at most.
        reported_s = math.floor(self.now / REPORT_S) * REPORT_S
        metrics: dict[str, dict[Any, float]] = {}
        for index, replica in enumerate(serving):
            window = [stats for at, stats in replica.reports if reported_s - LOOK_BACK_S < at <= reported_s]
            for name in {name for stats in window for name in stats}:
                metrics.setdefault(name, {})[index] = statistics.fmean(s[name] for s in window if name in s)
        return AutoscalingContext(
            deployment_id=DeploymentID("VisionEncoder", "sightline"),
            deployment_name="VisionEncoder",
            app_name="sightline",
            current_num_replicas=len(serving),
            target_num_replicas=self._target,
            running_replicas=[],
            total_num_requests=sum(metrics.get("requests", {}).values()),
            total_queued_requests=0.0,
            aggregated_metrics={name: values for name, values in metrics.items() if name != "requests"},
            raw_metrics=None,
            capacity_adjusted_min_replicas=self._config.min_replicas,
            capacity_adjusted_max_replicas=self._config.max_replicas,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=self._config,
        )

    def _resize(self, desired: int) -> None:
        staying = [r for r in self._replicas if not r.leaving]
        for _ in range(desired - len(staying)):
            self._replicas.append(Replica(self.now + START_S, lambda: self.now))
        # Serve stops those first that do not serve yet.
        for replica in sorted(staying, key=lambda r: -r.ready_s)[: max(0, len(staying) - desired)]:
            replica.leaving = True
        self._replicas = [r for r in self._replicas if not (r.leaving and r.ready_s > self.now)]
        self._target = desired


def simulate(trace: Trace, name: str, policy: Callable[[Any], Any], target: float) -> tuple[Result, Series]:
    simulation = Simulation(trace, _apply_autoscaling_config(policy), target)
    simulation.run()
    changes = simulation.changes
    pairs = itertools.pairwise(changes)
    p50, p95 = np.percentile(simulation.waits, [50, 95])
    result = Result(
        trace=trace.name,
        policy=name,
        wait_p50_s=round(float(p50), 3),
        wait_p95_s=round(float(p95), 3),
        wait_max_s=round(max(simulation.waits), 2),
        replica_minutes=round(simulation.replica_s / 60, 1),
        most_replicas=max(simulation.series.target),
        changes=len(changes),
        reversals=sum(a[1] * b[1] < 0 and b[0] - a[0] < 300 for a, b in pairs),
    )
    return result, simulation.series


def draw(found: dict[str, dict[str, Series]], path: Path) -> None:
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, len(found), sharex=True)
    for column, (trace, by_policy) in enumerate(found.items()):
        for policy, series in by_policy.items():
            axes[0][column].plot(series.time_s, series.running, label=policy, linewidth=1.2)
            axes[1][column].plot(series.time_s, np.maximum(series.backlog_s, 1e-3), linewidth=1.0)
        axes[0][column].set_title(trace)
        axes[1][column].set_yscale("log")
        axes[1][column].set_xlabel("s")
    axes[0][0].set_ylabel("replicas that serve")
    axes[1][0].set_ylabel("backlog, s of one replica")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    policy = WorkPolicy(drain_s=30, assumed_work_per_s=PATCHES_PER_S)
    all_traces = list(traces(args.seed))
    by_work, _ = simulate(all_traces[0], "work", policy, DEFAULT_TARGET)
    tried = {t: simulate(all_traces[0], "tuned", replica_queue_length_autoscaling_policy, t)[0] for t in TARGETS}
    best = min(TARGETS, key=lambda t: abs(tried[t].replica_minutes - by_work.replica_minutes))
    policies: dict[str, tuple[Callable[[Any], Any], float]] = {
        "work": (policy, DEFAULT_TARGET),
        f"requests, target {DEFAULT_TARGET:g} (Serve's default)": (
            replica_queue_length_autoscaling_policy,
            DEFAULT_TARGET,
        ),
    }
    if best != DEFAULT_TARGET:
        policies[f"requests, target {best:g} (tuned on step)"] = (replica_queue_length_autoscaling_policy, best)
    results: list[Result] = []
    found: dict[str, dict[str, Series]] = {}
    for trace in all_traces:
        for name, (function, target) in policies.items():
            result, series = simulate(trace, name, function, target)
            results.append(result)
            found.setdefault(trace.name, {})[name] = series
            print(json.dumps(asdict(result)))
    args.out.mkdir(parents=True, exist_ok=True)
    setting = {
        "patches_per_s": PATCHES_PER_S, "start_s": START_S, "look_back_s": LOOK_BACK_S, "report_s": REPORT_S,
        "seed": args.seed, **BOUNDS, "work_policy": asdict(policy),
    }  # fmt: skip
    page = {"setting": setting, "results": [asdict(result) for result in results]}
    (args.out / "autoscaling.json").write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    draw(found, args.out / "autoscaling.png")


if __name__ == "__main__":
    main()
