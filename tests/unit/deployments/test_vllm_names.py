"""Aliases have the values of what they stand for, and vLLM's form."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import BY_NAME, ReplicaMetrics, Sample, render
from deployments.vllm_names import ALIASES, KV_USAGE, with_vllm_names


def read() -> Iterator[Sample]:
    yield "prompt_tokens_total", ("computed",), 70
    yield "prompt_tokens_total", ("cached",), 30
    yield "cache_lookups_total", ("alias", "hit"), 2
    yield "cache_lookups_total", ("alias", "miss"), 5
    yield "cache_lookups_total", ("memory", "hit"), 100
    yield "scheduler_requests", ("running",), 3
    yield "kv_blocks", ("used",), 6
    yield "kv_blocks", ("cached",), 4
    yield "kv_blocks", ("free",), 10


def page() -> dict[str, dict[str, float]]:
    """Sample name -> le ("" if none) -> value."""
    metrics = ReplicaMetrics("LMEngine", "r1", read)
    first_token = metrics.histogram("time_to_first_token_seconds")
    first_token.labels("/v1/chat/completions").observe(0.2)
    first_token.labels("/v1/completions").observe(0.3)
    found: dict[str, dict[str, float]] = {}
    text = render([with_vllm_names(metrics.collect(), "m")]).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                bound = labels.pop("le", "")
                assert labels == {"deployment": "LMEngine", "replica": "r1", "model_name": "m"}
                assert bound not in found.setdefault(sample.name, {})
                found[sample.name][bound] = sample.value
    return found


def test_values() -> None:
    found = page()
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == {"": 100}
    assert found["vllm:prefix_cache_hits_total"] == {"": 30}
    assert found["vllm:mm_cache_queries_total"] == {"": 7}
    assert found["vllm:mm_cache_hits_total"] == {"": 2}
    assert found["vllm:num_requests_running"] == {"": 3}
    assert found[KV_USAGE] == {"": 0.3}


def test_histograms_are_summed_over_labels_that_vllm_does_not_have() -> None:
    found = page()
    buckets = found["vllm:time_to_first_token_seconds_bucket"]
    assert (buckets["0.1"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (0, 1, 2, 2)
    assert found["vllm:time_to_first_token_seconds_count"] == {"": 2}
    assert found["vllm:time_to_first_token_seconds_sum"] == {"": 0.5}


def test_nothing_is_made_of_what_a_replica_does_not_have() -> None:
    assert "vllm:num_preemptions_total" not in page()
    assert with_vllm_names([], "m") == []


def test_aliases_name_what_exists() -> None:
    for alias in ALIASES:
        family = BY_NAME[alias.ours]
        assert family.kind == alias.kind
        assert set(alias.labels) <= set(family.labels)
