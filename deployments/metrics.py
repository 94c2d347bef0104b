"""Prometheus: every family by name, filled from the stats that the cores keep as data. The only file that knows it.

Each replica has a registry of its own and hands out its families as plain `Metric` objects with two labels added,
`deployment` and `replica`. The ingress gathers those of every replica and renders one page. A restarted replica has a
new `replica` label, so a counter starts a new series instead of going backwards, and a dead replica's series end.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

PREFIX = "sightline_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
BATCH_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family: its name without the prefix, kind, labels and meaning (unit included)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


FAMILIES: tuple[Family, ...] = (
    # Ingress: what clients see.
    Family("requests_total", "counter", ("endpoint", "status"), "Finished requests by HTTP status; 499: client left."),
    Family("request_seconds", "histogram", ("endpoint",), "Seconds from arrival to the last byte.", SECONDS),
    Family(
        "time_to_first_token_seconds", "histogram", ("endpoint",), "Seconds from arrival to the first delta.", SECONDS
    ),
    Family("inter_token_seconds", "histogram", ("endpoint",), "Seconds per token between two deltas.", TOKEN_SECONDS),
    Family("request_stage_seconds", "histogram", ("stage",), "Seconds a request spent in one stage.", SECONDS),
    Family("requests_in_flight", "gauge", ("state",), "Requests past admission (running) or before it (queued)."),
    # Caches, all stages.
    Family("cache_lookups_total", "counter", ("tier", "result"), "Look-ups by tier: hit, miss, error, corrupt."),
    Family("cache_bytes", "gauge", ("tier",), "Bytes held by a tier of this replica."),
    Family("cache_evictions_total", "counter", ("tier",), "Entries evicted for room."),
    Family("cache_transfer_bytes_total", "counter", ("tier", "direction"), "Payload bytes read from or written to."),
    Family("single_flight_joins_total", "counter", ("scope",), "Callers that joined a computation under way."),
    Family("cache_breaker_open", "gauge", ("tier",), "1 while the tier is skipped after repeated failures."),
    # Vision encoder.
    Family("encoder_invocations_total", "counter", ("modality", "path"), "Forward passes; path graph, static, eager."),
    Family("encoder_items_total", "counter", ("modality",), "Items encoded."),
    Family("encoder_graph_replays_total", "counter", ("budget",), "Graph replays by slot budget."),
    Family("encoder_padded_tokens_total", "counter", ("modality",), "Slots computed for nobody."),
    Family("encoder_tokens_total", "counter", ("modality",), "Slots computed for items."),
    Family("encoder_eager_fallbacks_total", "counter", ("reason",), "Eager passes although graphs exist."),
    Family("encoder_batch_items", "histogram", (), "Items of one forward pass.", BATCH_ITEMS),
    Family("encoder_paced_seconds_total", "counter", (), "Seconds rounds were held back while tokens were decoded."),
    Family("encoder_batch_seconds_total", "counter", ("modality",), "Seconds in forward passes, upload to result."),
    Family("encoder_batch_failures_total", "counter", ("kind",), "Failed passes: out_of_memory or error."),
    Family("encoder_peak_bytes", "gauge", ("kind",), "Activations of the largest pass so far: predicted, measured."),
    Family("encoder_graph_bytes", "gauge", (), "Memory of captured graphs, or of static buffers on CPU."),
    Family("encoder_capture_seconds", "gauge", (), "Seconds that calibration and capture took at start."),
    # LM engine.
    Family("budget_rejections_total", "counter", ("budget", "outcome"), "Denials: deferred to later, or rejected."),
    Family("scheduler_requests", "gauge", ("state",), "Sequences running and waiting."),
    Family("kv_blocks", "gauge", ("state",), "KV blocks: used, cached (reusable), free."),
    Family("embedding_slots", "gauge", ("state",), "Embedding slots: used, cached (reusable), free."),
    Family("preemptions_total", "counter", (), "Sequences whose blocks were taken; they recompute."),
    Family("prompt_tokens_total", "counter", ("source",), "Prompt tokens computed, or cached by a prefix hit."),
    Family("generated_tokens_total", "counter", (), "Tokens sampled."),
    Family("engine_steps_total", "counter", (), "Steps of the engine loop."),
    Family("engine_step_failures_total", "counter", (), "Steps that raised; only their requests failed."),
    Family("scheduler_stalled_seconds", "gauge", (), "Seconds for which work was queued and nothing was scheduled."),
    Family(
        "engine_time_to_first_token_seconds", "histogram", (), "Seconds from the engine's queue to a token.", SECONDS
    ),
    Family("engine_inter_token_seconds", "histogram", (), "Seconds between two steps' tokens.", TOKEN_SECONDS),
    Family(
        "engine_stage_seconds", "histogram", ("stage",), "Seconds of one sequence in a stage of the engine.", SECONDS
    ),
    Family("encode_retries_total", "counter", (), "Encoder calls that the engine made again."),
    Family(
        "encoder_hedges_total", "counter", ("outcome",), "Slow encoder calls: the second one's outcome, or over_budget."
    ),
    Family(
        "embedding_transfer_bytes_total",
        "counter",
        ("direction", "backend"),
        "Bytes of embeddings put by encoders and got by engines.",
    ),
    Family(
        "embedding_transfer_seconds",
        "histogram",
        ("direction", "backend"),
        "Seconds to put an embedding, or to get it where it can be read.",
        SECONDS,
    ),
    Family("embedding_pool_bytes", "gauge", ("state",), "Host memory for embeddings on their way: used, free."),
    Family("embedding_pool_waiting", "gauge", (), "Embeddings that wait for room in that memory."),
    Family(
        "embedding_pool_expired_total", "counter", (), "Times that memory was taken and never used; a fault of ours."
    ),
    # Preprocessor.
    Family("media_total", "counter", ("modality", "outcome"), "Items prepared, by outcome."),
    Family("media_failures_total", "counter", ("code",), "Requests refused for a picture or video, by error code."),
    Family("media_fetches_total", "counter", ("outcome",), "Fetches of media URLs that ended, by outcome."),
    Family("media_fetches_in_flight", "gauge", (), "Fetches under way, those waiting for a place included."),
    Family("media_fetch_redirects_total", "counter", (), "Redirects followed."),
    Family("media_fetch_bytes_total", "counter", (), "Bytes of bodies read, those of failed fetches included."),
    Family("decode_jobs_total", "counter", (), "Jobs of decode workers: headers read, items decoded or remade."),
    Family("decode_worker_losses_total", "counter", ("cause",), "Decode processes that crashed or hung in a job."),
    Family("uuid_bindings_total", "counter", ("result",), "Uses of a media uuid: new, same, rebound, refused."),
    # Tenants: configured names only; whoever else calls is `other`.
    Family("tenant_requests_total", "counter", ("tenant", "status"), "Finished requests by tenant and HTTP status."),
    Family("tenant_tokens_total", "counter", ("tenant", "kind"), "Tokens: prompt, cached (of them), image, generated."),
    # Every replica.
    Family(
        "metrics_age_seconds", "gauge", (), "Age of the replica's series on this page; above 0: it does not answer."
    ),
    Family("replica_start_time_seconds", "gauge", (), "Unix time since when the replica exports; one series each."),
)

BY_NAME = {family.name: family for family in FAMILIES}

Sample = tuple[str, tuple[str, ...], float | Mapping[int, int]]
"""(family name without prefix, label values in the family's order, value). A histogram's value is how often each
observed number came."""
Read = Callable[[], Iterable[Sample]]


class ReplicaMetrics:
    """The registry of one replica.

    Args:
        deployment: Deployment name, a label of every series.
        replica: Replica id, unique over restarts.
        read: Called at each scrape; yields the current values of counters and gauges that a core keeps as data.
    """

    def __init__(self, deployment: str, replica: str, read: Read | None = None) -> None:
        self._labels = {"deployment": deployment, "replica": replica}
        self._registry = CollectorRegistry(auto_describe=False)
        self._read = read
        self.gauge("replica_start_time_seconds").set_to_current_time()
        if read is not None:
            self._registry.register(_StatsCollector(read))  # type: ignore[arg-type]

    def counter(self, name: str) -> Counter:
        family = _family(name, "counter")
        return Counter(PREFIX + name.removesuffix("_total"), family.meaning, family.labels, registry=self._registry)

    def gauge(self, name: str) -> Gauge:
        family = _family(name, "gauge")
        return Gauge(PREFIX + name, family.meaning, family.labels, registry=self._registry)

    def histogram(self, name: str) -> Histogram:
        family = _family(name, "histogram")
        return Histogram(PREFIX + name, family.meaning, family.labels, registry=self._registry, buckets=family.buckets)

    def collect(self) -> list[Metric]:
        """Every family with its samples, labelled with this replica. Picklable."""
        metrics = []
        for metric in self._registry.collect():
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            metrics.append(labelled)
        return metrics


class _StatsCollector:
    """Counters and gauges read from a core at scrape time, so that nothing is counted twice."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        grouped: dict[str, dict[tuple[str, ...], float]] = {}
        sizes: dict[str, dict[tuple[str, ...], Tally[int]]] = {}
        for name, labels, value in self._read():
            if isinstance(value, Mapping):
                sizes.setdefault(name, {}).setdefault(labels, Tally()).update(value)
                continue
            values = grouped.setdefault(name, {})
            values[labels] = values.get(labels, 0.0) + value
        for name, values in grouped.items():
            family = BY_NAME[name]
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = make(PREFIX + name, family.meaning, labels=family.labels)
            for labels, value in values.items():
                metric.add_metric(labels, value)
            yield metric
        for name, counts in sizes.items():
            family = BY_NAME[name]
            histogram = HistogramMetricFamily(PREFIX + name, family.meaning, labels=family.labels)
            for labels, tally in counts.items():
                histogram.add_metric(labels, _buckets(family, tally), sum(size * n for size, n in tally.items()))
            yield histogram


def _buckets(family: Family, tally: Mapping[int, int]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    bounds = (*family.buckets, math.inf)
    return [(floatToGoString(bound), sum(n for size, n in tally.items() if size <= bound)) for bound in bounds]


def render(replicas: Iterable[Iterable[Metric]]) -> bytes:
    """One Prometheus page from the families of several replicas, each family's header once."""
    merged: dict[str, Metric] = {}
    for metrics in replicas:
        for metric in metrics:
            known = merged.get(metric.name)
            if known is None:
                merged[metric.name] = known = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            known.samples.extend(metric.samples)
    return generate_latest(_Page(merged))  # type: ignore[arg-type]


class _Page:
    def __init__(self, merged: Mapping[str, Metric]) -> None:
        self._merged = merged

    def collect(self) -> Iterable[Metric]:
        return self._merged.values()


def replica_of(metrics: Iterable[Metric]) -> str:
    """The replica whose metrics these are."""
    start = PREFIX + "replica_start_time_seconds"
    return next(metric.samples[0].labels["replica"] for metric in metrics if metric.name == start)


def page_age(deployment: str, replica: str, seconds: float) -> Metric:
    """The gauge that says how old a replica's series on the ingress's page are."""
    family = _family("metrics_age_seconds", "gauge")
    metric = GaugeMetricFamily(PREFIX + family.name, family.meaning, labels=("deployment", "replica"))
    metric.add_metric((deployment, replica), seconds)
    return metric


def _family(name: str, kind: str) -> Family:
    family = BY_NAME[name]
    if family.kind != kind:
        raise ValueError(f"{name} is a {family.kind}, not a {kind}")
    return family


def table() -> str:
    """The families as a Markdown table."""
    rows = ["| family | type | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(family.labels) or "–"
        rows.append(f"| `{PREFIX}{family.name}` | {family.kind} | {labels} | {family.meaning} |")
    return "\n".join(rows)
