"""Autoscaling by work: how many replicas the pixels, patches or tokens at hand need, not how many requests there are.

    replica.record_autoscaling_stats() ──▶ Serve averages over look_back_period_s ──▶ policy(context) ──▶ replicas

Serve's default policy counts requests, and a thumbnail weighs as much there as a 16-megapixel page. A policy here says
how much work comes and waits in units of "one replica's work"; `decide` turns that into a number that does not flap.
Serve then applies its own delays, factors and bounds. In a config file:

    autoscaling_config:
      policy: {policy_function: "deployments.autoscaling:WorkPolicy", policy_kwargs: {drain_s: 10}}

Serve carries this module by value into its controller, where the project need not be installed: standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

QUEUED_WORK = "queued_work"
"""Units of work that wait or are being worked on in a replica."""
ARRIVED_WORK_PER_S = "arrived_work_per_s"
WORK_PER_S = "work_per_s"
"""Units per second that the replica can do, as measured; left out until it is known."""
CPU_LOAD = "cpu_load"
"""CPU seconds per second and core of the replica, 0 to about 1."""
WAITING_TOKENS = "waiting_tokens"
"""Tokens to compute before every waiting sequence has its first output."""
PROMPT_TOKENS_PER_S = "prompt_tokens_per_s"
"""Prompt tokens per second computed while sequences waited; left out until it is known."""
KV_USE = "kv_use"
"""Share of the KV blocks that live sequences hold."""
SEAT_USE = "seat_use"
"""Share of `max_num_seqs` that runs."""

Metrics = Mapping[str, Mapping[Any, float]]
"""Metric name -> replica -> mean over the look-back period."""


class Context(Protocol):
    """What is read of ray.serve.config.AutoscalingContext."""

    current_num_replicas: int
    """Replicas that run."""
    target_num_replicas: int
    """Replicas that were last asked for, those that still start included."""

    @property
    def aggregated_metrics(self) -> Metrics | None: ...

    @property
    def total_num_requests(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Load:
    """In units of what one replica does at its target use."""

    steady: float
    """Work that keeps coming."""
    backlog: float
    """Replicas more that would clear in time what waits already."""


class WorkReading(Protocol):
    """What is read of work_meter.WorkLoad."""

    @property
    def queued(self) -> float: ...

    @property
    def arrived_per_s(self) -> float: ...

    @property
    def capacity_per_s(self) -> float: ...


def work_stats(work: WorkReading) -> dict[str, float]:
    """A reading under the names that WorkPolicy knows."""
    stats = {QUEUED_WORK: work.queued, ARRIVED_WORK_PER_S: work.arrived_per_s}
    # Serve averages over time: a 0 for "unknown" would drag the mean down for a whole look-back period.
    return {**stats, WORK_PER_S: work.capacity_per_s} if work.capacity_per_s else stats


def decide(load: Load, *, target: int, is_starting: bool, slack: float) -> int:
    """How many replicas there should be.

    Rises as far as needed. Falls only to a number that would still do if the load grew by `slack`, so that a load which
    moves by less than that never makes it rise and fall in turn. While replicas start the backlog asks for no more:
    they were started to clear it, and it grows until they run.

    Args:
        target: Replicas that were last asked for.
        is_starting: Whether some of them do not run yet.
        slack: Share of the load, 0 or more.
    """
    total = load.steady + load.backlog
    rise = _ceil(load.steady if is_starting else total)
    return rise if rise > target else min(target, _ceil(total * (1 + slack)))


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """What every policy shares: callable with Serve's context, returns (replicas, state)."""

    slack: float = 0.25
    """Growth of the load that must still fit before replicas are given up."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            allowed = "of 0 or more" if name == "slack" else "above 0"
            number = isinstance(value, int | float) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name != "slack"):
                raise ValueError(f"{name} is {value!r}; it must be a number {allowed}")

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        running, target = context.current_num_replicas, context.target_num_replicas
        metrics = context.aggregated_metrics
        if running == 0 or not metrics:
            # Nothing is known. Serve itself starts the first replica when a request waits.
            return target, {}
        wanted = decide(self.load(metrics), target=target, is_starting=running < target, slack=self.slack)
        if len(metrics.get(self.reported, {})) < running:
            wanted = max(wanted, target)  # a silent replica may be the busy one
        return max(wanted, 1 if context.total_num_requests > 0 else 0), {}

    @property
    def reported(self) -> str:
        """A metric that every replica reports from its start."""
        raise NotImplementedError

    def load(self, metrics: Metrics) -> Load:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class WorkPolicy(_Policy):
    """For stages whose work is known when it arrives: pixels of the preprocessor, patches of the vision encoder."""

    target_use: float = 0.7
    """Share of its capacity that a replica should be busy with steady work."""
    drain_s: float = 10.0
    """Seconds in which a backlog should be cleared; of the order of a replica's start time."""
    target_cpu: float = 0.8
    """CPU load of a replica at its target, where it reports one."""
    assumed_work_per_s: float = 1e6
    """Capacity of a replica until one was measured: low enough to be safe."""

    @property
    def reported(self) -> str:
        return QUEUED_WORK

    def load(self, metrics: Metrics) -> Load:
        per_s = _mean(metrics.get(WORK_PER_S)) or self.assumed_work_per_s
        steady = _sum(metrics.get(ARRIVED_WORK_PER_S)) / (per_s * self.target_use)
        cpu = _sum(metrics.get(CPU_LOAD)) / self.target_cpu
        return Load(max(steady, cpu), _sum(metrics.get(QUEUED_WORK)) / (per_s * self.drain_s))


@dataclass(frozen=True, kw_only=True)
class EnginePolicy(_Policy):
    """For the LM engine: what running sequences hold, and the tokens that wait for a place."""

    target_use: float = 0.8
    """Share of KV blocks, or of seats, that a replica should have in use."""
    drain_s: float = 30.0
    """Longest that the waiting tokens should take to be computed."""
    assumed_tokens_per_s: float = 2000.0
    """Prompt tokens per second of a replica until that was measured."""

    @property
    def reported(self) -> str:
        return WAITING_TOKENS

    def load(self, metrics: Metrics) -> Load:
        kv, seats = metrics.get(KV_USE, {}), metrics.get(SEAT_USE, {})
        use = sum(max(kv.get(replica, 0.0), seats.get(replica, 0.0)) for replica in kv.keys() | seats.keys())
        per_s = _mean(metrics.get(PROMPT_TOKENS_PER_S)) or self.assumed_tokens_per_s
        return Load(use / self.target_use, _sum(metrics.get(WAITING_TOKENS)) / (per_s * self.drain_s))


def _sum(by_replica: Mapping[Any, float] | None) -> float:
    return math.fsum(by_replica.values()) if by_replica else 0.0


def _mean(by_replica: Mapping[Any, float] | None) -> float:
    return _sum(by_replica) / len(by_replica) if by_replica else 0.0


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)  # 0.7 / 0.7 / ... must not become one replica too many
