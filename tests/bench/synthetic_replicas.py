"""Replicas that export every family with every label value, and count on at each scrape: no engine is needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import get_args

from deployments.hedging import OUTCOMES
from deployments.lm_engine.stats import Budget, Outcome
from deployments.messages import Modality
from deployments.metrics import BY_NAME, FAMILIES, Family, ReplicaMetrics, Sample, render
from deployments.ports import EmbeddingTransfer
from deployments.transfer_meter import Direction

STATUSES = ("200", "400", "401", "404", "413", "429", "499", "500", "503", "504")

VALUES: dict[str, tuple[str, ...]] = {
    "endpoint": ("/v1/chat/completions", "/v1/completions", "/tokenize"),
    "status": STATUSES,
    "stage": (
        *("receive", "admission", "tokenize", "fetch", "decode", "preprocess"),
        *("queue", "encode", "transfer", "prefill", "generation"),
    ),
    "tier": ("memory", "redis", "lm_embeddings", "alias", "sources"),
    "result": ("hit", "miss", "error", "corrupt"),
    "direction": ("read", "write"),
    "scope": ("preprocessor", "encoder", "cluster"),
    "modality": get_args(Modality),
    "path": ("graph", "static", "eager"),
    "reason": ("slots", "patches", "items", "segments", "frames", "cheaper", "replay_failed"),
    "encoder_graph_replays_total.budget": ("256", "1024", "4096"),
    "budget": (*get_args(Budget), "rate", "tenant", "queue_wait", "encoder", "item_pixels", "item_bytes"),
    "outcome": get_args(Outcome),
    "media_total.outcome": ("seen", "decoded", "remade"),
    "code": ("unsupported_format", "image_too_large", "invalid_image"),
    "media_fetches_total.outcome": ("fetched", "refused", "timed_out", "failed"),
    "cause": ("crashed", "hung"),
    "uuid_bindings_total.result": ("new", "same", "rebound", "refused"),
    "engine_stage_seconds.stage": ("queue", "encode", "prefill", "generation"),
    "encoder_batch_failures_total.kind": ("out_of_memory", "error"),
    "encoder_peak_bytes.kind": ("predicted", "measured"),
    "requests_in_flight.state": ("running", "queued"),
    "scheduler_requests.state": ("running", "waiting"),
    "kv_blocks.state": ("used", "cached", "free"),
    "embedding_slots.state": ("used", "cached", "free"),
    "embedding_pool_bytes.state": ("used", "free"),
    "embedding_transfer_bytes_total.direction": get_args(Direction),
    "embedding_transfer_seconds.direction": get_args(Direction),
    "backend": get_args(EmbeddingTransfer),
    "encoder_hedges_total.outcome": OUTCOMES,
    "source": ("computed", "cached"),
    "tenant": ("acme", "labs", "other"),
    "tenant_tokens_total.kind": ("prompt", "cached", "image", "generated"),
}
"""Label -> values that the code may set; `family.label` where one label means different things."""


def values_of(family: Family, label: str) -> tuple[str, ...] | None:
    """None if nothing is known about the label's values."""
    return VALUES.get(f"{family.name}.{label}") or VALUES.get(label)


_OWNERS = {
    "Ingress": ("requests", "request_", "time_to", "inter_token", "tenant_", "budget_rejections", "metrics_"),
    "Preprocessor": ("media", "decode_", "uuid_", "cache_", "single_flight"),
    "VisionEncoder": ("encoder", "cache_", "single_flight"),
    "LMEngine": (
        "scheduler",
        "kv_",
        "embedding",
        "preempt",
        "prompt_",
        "generated",
        "engine",
        "encode_",
        "budget_rejections",
        "encoder_hedges",
    ),
}


class SyntheticReplica:
    """One replica's registry; every collect moves its counters and histograms on."""

    def __init__(self, deployment: str, replica: str, families: Sequence[Family], seed: int) -> None:
        self._random = random.Random(seed)
        self._scrapes = 0
        self._stats = [f for f in families if f.kind != "histogram"]
        self.metrics = ReplicaMetrics(deployment, replica, self._read)
        self._histograms = [(f, self.metrics.histogram(f.name)) for f in families if f.kind == "histogram"]

    def observe(self) -> None:
        self._scrapes += 1
        for family, histogram in self._histograms:
            for labels in _label_sets(family):
                child = histogram.labels(*labels) if labels else histogram
                for _ in range(5):
                    child.observe(self._random.choice(family.buckets) * self._random.uniform(0.3, 1.0))

    def _read(self) -> Iterator[Sample]:
        for family in self._stats:
            for position, labels in enumerate(_label_sets(family)):
                step = 1 + position % 7
                yield family.name, labels, float(step * self._scrapes if family.kind == "counter" else step)


def application() -> list[SyntheticReplica]:
    """Two replicas of each deployment; together they export every family."""
    replicas = []
    for deployment, prefixes in _OWNERS.items():
        families = [f for f in FAMILIES if f.name.startswith(prefixes) and f.name != "replica_start_time_seconds"]
        for number in range(2):
            replicas.append(SyntheticReplica(deployment, f"{deployment.lower()}-{number}", families, seed=number))
    return replicas


def page(replicas: Sequence[SyntheticReplica]) -> bytes:
    """The next state of all replicas as one Prometheus page."""
    for replica in replicas:
        replica.observe()
    return render(replica.metrics.collect() for replica in replicas)


def _label_sets(family: Family) -> list[tuple[str, ...]]:
    known = []
    for label in family.labels:
        values = values_of(family, label)
        if values is None:
            raise ValueError(f"{family.name} has the label {label}, of which no values are known here")
        known.append(values)
    return list(itertools.product(*known))


def missing_families(exported: set[str]) -> set[str]:
    """Names without prefix that no synthetic replica exports."""
    return set(BY_NAME) - exported
