"""Series under vLLM's metric names, for dashboards and autoscalers that know those. Only where the meaning is equal.

Left out, since ours mean something else: `e2e_request_latency_seconds` (ours counts failed requests), prefill time
(ours does not hold the wait for embeddings).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from deployments.metrics import PREFIX


@dataclass(frozen=True, slots=True)
class Alias:
    """Series of one family, or those with certain labels, summed over the labels that vLLM does not have."""

    name: str
    kind: str
    ours: str
    labels: Mapping[str, str] = field(default_factory=dict)


ALIASES = (
    Alias("vllm:num_requests_running", "gauge", "scheduler_requests", {"state": "running"}),
    Alias("vllm:num_requests_waiting", "gauge", "scheduler_requests", {"state": "waiting"}),
    Alias("vllm:num_preemptions", "counter", "preemptions_total"),
    Alias("vllm:prompt_tokens", "counter", "prompt_tokens_total"),
    Alias("vllm:generation_tokens", "counter", "generated_tokens_total"),
    Alias("vllm:prefix_cache_queries", "counter", "prompt_tokens_total"),
    Alias("vllm:prefix_cache_hits", "counter", "prompt_tokens_total", {"source": "cached"}),
    Alias("vllm:mm_cache_queries", "counter", "cache_lookups_total", {"tier": "alias"}),
    Alias("vllm:mm_cache_hits", "counter", "cache_lookups_total", {"tier": "alias", "result": "hit"}),
    Alias("vllm:time_to_first_token_seconds", "histogram", "time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "histogram", "engine_inter_token_seconds"),
    Alias("vllm:request_queue_time_seconds", "histogram", "engine_stage_seconds", {"stage": "queue"}),
    Alias("vllm:request_decode_time_seconds", "histogram", "engine_stage_seconds", {"stage": "generation"}),
)
KV_USAGE = "vllm:kv_cache_usage_perc"
"""Used blocks as a share of all, 0 to 1: the name says percent, vLLM's value does not."""
_KEPT = ("deployment", "replica", "le")


def with_vllm_names(metrics: Iterable[Metric], model_name: str) -> list[Metric]:
    """One replica's metrics, followed by the same values under vLLM's names with a label `model_name`."""
    own = list(metrics)
    by_name = {metric.name: metric for metric in own}
    aliases = [_alias(alias, by_name, model_name) for alias in ALIASES]
    return [*own, *(metric for metric in (*aliases, _kv_usage(by_name, model_name)) if metric is not None)]


def _alias(alias: Alias, by_name: Mapping[str, Metric], model_name: str) -> Metric | None:
    source = by_name.get(PREFIX + alias.ours.removesuffix("_total"))
    if source is None:
        return None
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in source.samples:
        if alias.labels.items() <= sample.labels.items():
            name = alias.name + sample.name.removeprefix(source.name)
            kept = tuple((label, sample.labels[label]) for label in _KEPT if label in sample.labels)
            sums[name, kept] = sums.get((name, kept), 0.0) + sample.value
    if not sums:
        return None
    made = Metric(alias.name, f"As {source.name}. {source.documentation}", alias.kind)
    made.samples = [
        Sample(name, {**dict(kept), "model_name": model_name}, value) for (name, kept), value in sums.items()
    ]
    return made


def _kv_usage(by_name: Mapping[str, Metric], model_name: str) -> Metric | None:
    source = by_name.get(PREFIX + "kv_blocks")
    if source is None or not source.samples:
        return None
    total = sum(sample.value for sample in source.samples)
    used = sum(sample.value for sample in source.samples if sample.labels["state"] == "used")
    labels = {label: source.samples[0].labels[label] for label in _KEPT if label in source.samples[0].labels}
    made = Metric(KV_USAGE, f"As {source.name}. Used KV blocks as a share of all, 0 to 1.", "gauge")
    made.samples = [Sample(KV_USAGE, {**labels, "model_name": model_name}, used / total if total else 0.0)]
    return made
