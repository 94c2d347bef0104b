"""What the real application tells about itself: each forced situation moves the right series, lines and spans.

Judged by counters, never by clocks; where times are compared, they are sums over many requests.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.app_process import Samples, total
from tests.serve.situations import CHAT, Situations, picture, running_situations, text, until

pytestmark = [pytest.mark.serve, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Situations]:
    telemetry = {"log_level": "DEBUG", "scrape_replicas": True, "vllm_metric_names": True}
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401

        telemetry |= {"otlp_traces_endpoint": "", "trace_sample_ratio": 0.0}
    except ImportError:
        pass
    with running_situations(tmp_path_factory.mktemp("metrics"), telemetry) as app:
        yield app


class Gained:
    """What counters gained while the block ran."""

    def __init__(self, app: Situations) -> None:
        self._app = app

    def __enter__(self) -> Gained:
        self._before = self._app.app.samples()
        return self

    def __exit__(self, *_: object) -> None:
        self._after = self._app.app.samples()

    def __call__(self, name: str, **labels: str) -> float:
        return total(self._after, name, **labels) - total(self._before, name, **labels)


def has_series(samples: Samples, name: str, **labels: str) -> bool:
    return any(found == name and labels.items() <= dict(having).items() for found, having in samples)


def test_first_events_show_as_an_increase(app: Situations) -> None:
    now = app.app.samples()
    assert has_series(now, "requests_total", endpoint=CHAT, status="503")
    assert has_series(now, "budget_rejections_total", budget="kv_blocks", outcome="deferred")
    assert has_series(now, "encoder_batch_failures_total", kind="out_of_memory")
    assert has_series(now, "decode_worker_losses_total", cause="hung")
    assert has_series(now, "cache_breaker_open", tier="redis")


def test_a_new_picture_then_a_repeat(app: Situations) -> None:
    with Gained(app) as gained:
        app.repeat()
    assert gained("cache_lookups_total", tier="alias", result="miss") == 1
    assert gained("cache_lookups_total", tier="alias", result="hit") == 1
    assert gained("media_total", outcome="decoded") == 1
    assert gained("encoder_batch_items_count") == gained("encoder_batch_items_sum") == 1
    assert gained("prompt_tokens_total", source="cached") > 0
    assert gained("engine_time_to_first_token_seconds_count") == 2
    assert gained("tenant_requests_total", tenant="other", status="200") == 2
    assert gained("tenant_tokens_total", tenant="other", kind="generated") == 8


def test_a_known_name_for_other_bytes_is_rebound(app: Situations) -> None:
    with Gained(app) as gained:
        app.named_picture()
    assert gained("uuid_bindings_total", result="new") == 1
    assert gained("uuid_bindings_total", result="rebound") == 1


def test_the_same_picture_at_once_is_encoded_once(app: Situations) -> None:
    with Gained(app) as gained:
        app.same_picture_at_once()
    assert gained("encoder_items_total") == 1
    assert gained("media_total", outcome="seen") == 4


def test_an_embedding_from_the_shared_tier(app: Situations) -> None:
    with Gained(app) as gained:
        app.shared_hit()
    assert gained("cache_lookups_total", tier="redis", result="hit") == 1
    assert gained("cache_transfer_bytes_total", tier="redis", direction="read") > 0
    assert gained("cache_transfer_bytes_total", tier="redis", direction="write") > 0


def test_more_pictures_than_slots_are_deferred(app: Situations) -> None:
    with Gained(app) as gained:
        app.more_pictures_than_slots()
    assert gained("budget_rejections_total", budget="embedding_slots", outcome="deferred") > 0
    assert gained("budget_rejections_total", outcome="rejected") == 0
    assert gained("encoder_items_total") == 6


def test_what_can_never_fit_is_rejected(app: Situations) -> None:
    with Gained(app) as gained:
        assert app.more_pictures_than_context().status_code == 400
        assert app.more_pixels_than_allowed().status_code == 400
    assert gained("budget_rejections_total", budget="context", outcome="rejected") == 1
    assert gained("budget_rejections_total", budget="item_pixels", outcome="rejected") == 1
    assert gained("media_failures_total", code="image_too_large") == 1
    assert gained("requests_total", endpoint=CHAT, status="400") == 2


def test_long_answers_at_once_are_preempted(app: Situations) -> None:
    with Gained(app) as gained:
        app.long_answers_at_once()
    assert gained("preemptions_total") > 0
    assert gained("generated_tokens_total") == 1600


def test_a_picture_over_the_ladder_runs_eagerly(app: Situations) -> None:
    with Gained(app) as gained:
        app.small_picture()
    # Whether padding it is cheaper than running it eagerly was measured at start, on this machine.
    static = gained("encoder_invocations_total", path="static")
    cheaper = gained("encoder_eager_fallbacks_total", reason="cheaper")
    assert (static + cheaper, gained("encoder_eager_fallbacks_total", reason="slots")) == (1, 0)
    with Gained(app) as gained:
        assert app.ask(picture(), text()).status_code == 200
    assert gained("encoder_invocations_total", path="eager") == 1
    assert gained("encoder_eager_fallbacks_total", reason="slots") == 1


def test_a_broken_picture_is_counted_by_code(app: Situations) -> None:
    with Gained(app) as gained:
        answer = app.broken_picture()
    assert answer.status_code == 400
    assert gained("media_failures_total", code=answer.json()["error"]["code"]) == 1


def test_fetches_are_counted_by_outcome(app: Situations) -> None:
    with Gained(app) as gained:
        app.fetched_picture()
        assert app.refused_url().status_code == 400
    assert gained("media_fetches_total", outcome="fetched") == 1
    assert gained("media_fetches_total", outcome="failed") == 0
    assert gained("media_fetch_redirects_total") == 1
    assert gained("media_fetch_bytes_total") > 10_000
    assert gained("decode_jobs_total") > 0


def test_a_client_that_leaves(app: Situations) -> None:
    with Gained(app) as gained:
        app.cancelled()
        until(lambda: total(app.app.samples(), "scheduler_requests", state="running") == 0)
        until(lambda: total(app.app.samples(), "requests_in_flight") == 0)
    assert gained("requests_total", endpoint=CHAT, status="499") == 1
    assert 0 < gained("generated_tokens_total") < 400


def test_a_corrupt_entry_is_a_counted_miss(app: Situations) -> None:
    with Gained(app) as gained:
        app.corrupt_entry()
    assert gained("cache_lookups_total", tier="redis", result="corrupt") == 1


def test_a_dead_redis_opens_the_breaker_and_requests_go_on(app: Situations) -> None:
    with Gained(app) as gained:
        app.redis_killed()
    try:
        assert gained("cache_lookups_total", tier="redis", result="error") > 0
        assert total(app.app.samples(), "cache_breaker_open", tier="redis") == 1
    finally:
        app.redis_back()


def test_stage_times_add_up_to_the_clients_time_under_load(app: Situations) -> None:
    """Of two clients at once; sums over requests, and another round if this machine hiccuped in the one before."""
    ratios = []
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            rounds = list(pool.map(lambda _: measure(app), range(2)))
        explained_s, seen_s = (sum(times) for times in zip(*rounds, strict=True))
        ratios.append(explained_s / seen_s)
        if 0.95 <= ratios[-1] <= 1.05:
            return
    pytest.fail(f"stage times were {ratios} of the client's time")


def measure(app: Situations, requests: int = 6) -> tuple[float, float]:
    """(seconds that stages explain, seconds that the client saw) of a few requests."""
    explained_s = seen_s = 0.0
    with httpx.Client(base_url=app.app.url, timeout=120, trust_env=False) as client:
        for _ in range(requests):
            body = app.body(picture(), text(), max_tokens=64)
            began_s = time.perf_counter()
            answer = client.post(CHAT, json=body, headers={"x-sightline-timings": "1"})
            seen_s += time.perf_counter() - began_s
            stages = answer.json()["sightline"]["stage_seconds"]
            names = {"receive", "tokenize", "decode", "queue", "encode", "prefill", "transfer", "generation"}
            assert names <= set(stages)
            explained_s += sum(stages.values())
    return explained_s, seen_s


def test_nobody_who_did_not_ask_sees_timings(app: Situations) -> None:
    assert "sightline" not in app.ask(text()).json()


# ---- logs
def log_lines(app: Situations) -> list[dict[str, Any]]:
    """Of all replicas. The files are found by the replicas' ids, since other clusters may write beside this one's."""
    replicas = {dict(labels)["replica"] for name, labels in app.app.samples() if name == "replica_start_time_seconds"}
    files = {path for path in Path("/tmp/ray").glob("session_2*/logs/serve/*.jsonl") if named(path, replicas)}
    assert len(files) == len(replicas) == 4
    return [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]


def named(path: Path, replicas: set[str]) -> bool:
    return any(replica in path.name for replica in replicas)


def lines_of(app: Situations, request_id: str, wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def have_come() -> bool:
        found[:] = [line for line in log_lines(app) if line.get("request_id") == request_id]
        return wanted(found)

    until(have_come)
    return found


def test_one_line_a_finished_request_and_one_a_stage_of_it(app: Situations) -> None:
    secret = "zebra crossing"
    answer = app.ask(picture(), text(secret), headers={"x-request-id": "log-test-1"})
    assert answer.status_code == 200
    found = lines_of(app, "log-test-1", lambda lines: len(lines) >= 4)
    by_message = {line["message"]: line for line in found}
    assert len(by_message) == len(found) == 4
    finished = by_message[f"POST {CHAT} 200"]
    assert (finished["deployment"], finished["level"], finished["status"]) == ("Ingress", "INFO", 200)
    assert finished["completion_tokens"] == 4
    assert sum(finished["stage_seconds"].values()) <= finished["seconds"]
    assert by_message["preprocessor.prepare"]["stage_seconds"]["decode"] > 0
    assert by_message["vision_encoder.encode"]["computed"] == 1
    assert by_message["lm_engine.generate"]["stage_seconds"]["generation"] > 0
    assert {line["deployment"] for line in found} == {"Ingress", "Preprocessor", "VisionEncoder", "LMEngine"}
    assert secret not in json.dumps(log_lines(app))


def test_a_refused_request_has_its_line_too(app: Situations) -> None:
    app.ask({"type": "image_url", "image_url": {"url": "data:,x"}}, text(), headers={"x-request-id": "log-test-2"})
    (finished,) = (
        line
        for line in lines_of(app, "log-test-2", lambda lines: any("status" in line for line in lines))
        if "status" in line
    )
    assert finished["status"] == 400
    assert finished["error_code"]


# ---- scraping
def test_targets_are_the_replicas_own_pages(app: Situations) -> None:
    targets = app.client.get("/metrics/targets").json()
    assert {target["labels"]["deployment"] for target in targets} == {
        "Ingress", "Preprocessor", "VisionEncoder", "LMEngine",
    }  # fmt: skip
    for target in targets:
        (address,) = target["targets"]
        page = httpx.get(f"http://{address}/metrics", trust_env=False)
        assert page.status_code == 200
        replicas = {line.partition('replica="')[2].partition('"')[0] for line in series_of(page.text)}
        assert replicas == {target["labels"]["replica"]}
        assert httpx.get(f"http://{address}/", trust_env=False).status_code == 404


def series_of(page: str) -> list[str]:
    return [line for line in page.splitlines() if line and not line.startswith("#")]


def test_vllm_names_show_the_same_values(app: Situations) -> None:
    now = app.app.samples()
    assert total(now, "vllm:num_requests_running", model_name=app.app.model) == 0
    assert total(now, "vllm:mm_cache_queries_total") == total(now, "cache_lookups_total", tier="alias") > 0
    hits = total(now, "cache_lookups_total", tier="alias", result="hit")
    assert total(now, "vllm:mm_cache_hits_total") == hits > 0
    assert total(now, "vllm:generation_tokens_total") == total(now, "generated_tokens_total") > 0
    assert total(now, "vllm:prompt_tokens_total") == total(now, "prompt_tokens_total")
    assert total(now, "vllm:time_to_first_token_seconds_count") == total(now, "time_to_first_token_seconds_count")


def test_a_replica_that_hangs_keeps_nobody_back(app: Situations) -> None:
    """It shows its last values, marked by their age, and no counter falls."""
    before = app.app.samples()
    (process,) = (p for p in app.app.processes() if "VisionEncoder" in " ".join(p.cmdline()))
    process.send_signal(signal.SIGSTOP)
    try:
        assert app.ask(text("No picture.")).status_code == 200
        while_hung = app.app.samples()
    finally:
        process.send_signal(signal.SIGCONT)
    for name in ("encoder_items_total", "encoder_invocations_total"):
        assert total(while_hung, name) == total(before, name) > 0
    assert total(while_hung, "generated_tokens_total") > total(before, "generated_tokens_total")
    assert total(while_hung, "metrics_age_seconds", deployment="VisionEncoder") > 0
    assert total(while_hung, "metrics_age_seconds", deployment="LMEngine") == 0
    until(lambda: total(app.app.samples(), "metrics_age_seconds") == 0)


# ---- traces
def spans_of(app: Situations, trace_id: str) -> dict[str, Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: dict[str, Any] = {}
    for export in list(app.collector.exports):
        for resource in ExportTraceServiceRequest.FromString(export).resource_spans:
            for scope in resource.scope_spans:
                found |= {span.name: span for span in scope.spans if span.trace_id.hex() == trace_id}
    return found


def test_spans_of_all_stages_hang_under_the_clients(app: Situations) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "trace-test"}
    assert app.ask(picture(), text(), headers=headers).status_code == 200
    names = {CHAT, "preprocessor.prepare", "vision_encoder.encode", "lm_engine.generate"}
    until(lambda: set(spans_of(app, TRACE_ID)) >= names)
    spans = spans_of(app, TRACE_ID)
    assert set(spans) == names
    assert spans[CHAT].parent_span_id.hex() == PARENT_ID
    assert {spans[name].parent_span_id for name in names - {CHAT}} == {spans[CHAT].span_id}
    for span in spans.values():
        attributes = {attribute.key: attribute.value for attribute in span.attributes}
        assert attributes["sightline.request_id"].string_value == "trace-test"


def test_who_sends_no_trace_context_is_not_traced_at_a_ratio_of_0(app: Situations) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    exports = [ExportTraceServiceRequest.FromString(export) for export in list(app.collector.exports)]
    spans = [span for e in exports for r in e.resource_spans for scope in r.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in spans} <= {TRACE_ID}


# ---- the end of a replica; last, since it changes the cluster
def test_a_killed_replica_s_series_end(app: Situations) -> None:
    def replicas(samples: Samples) -> set[str]:
        return {
            dict(labels)["replica"]
            for name, labels in samples
            if name == "replica_start_time_seconds" and dict(labels)["deployment"] == "Preprocessor"
        }

    (old,) = replicas(app.app.samples())
    (process,) = (p for p in app.app.processes() if "Preprocessor" in " ".join(p.cmdline()))
    process.kill()
    psutil.wait_procs([process], timeout=10)
    until(lambda: old not in replicas(app.app.samples()))
    until(lambda: len(replicas(app.app.samples())) == 1, timeout_s=60)
    assert app.ask(picture(), text()).status_code == 200
