"""Metrics of the real application, started as its users start it: forced situations move the right series."""

from __future__ import annotations

import base64
import io
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import ROOT, free_port

CHAT = "/v1/chat/completions"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "app.serve", "serve_configs/dev.yaml", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            _wait_until_ready(client, process)
            ask(client, picture(1))
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    for _ in range(480):
        assert process.poll() is None, "the application has ended"
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise AssertionError("the application did not become ready")


def picture(shade: int) -> str:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, 80, 200)).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def ask(client: httpx.Client, url: str, max_tokens: int = 8, **headers: str) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {
        "model": "sightline-demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return client.post(CHAT, json=body, headers=headers)


def scrape(client: httpx.Client) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("deployment", "replica")}
            key = sample.name.removeprefix("sightline_"), frozenset(labels.items())
            found[key] = found.get(key, 0.0) + sample.value
    return found


def gained(before: Series, after: Series, name: str, **labels: str) -> float:
    key = name, frozenset(labels.items())
    return after[key] - before[key]


def test_first_events_show_as_an_increase(client: httpx.Client) -> None:
    now = scrape(client)
    assert now["requests_total", frozenset({("endpoint", CHAT), ("status", "503")})] == 0
    assert now["budget_rejections_total", frozenset({("budget", "kv_blocks"), ("outcome", "deferred")})] == 0
    assert now["encoder_batch_failures_total", frozenset({("kind", "out_of_memory")})] == 0


def test_a_new_picture_then_a_repeat(client: httpx.Client) -> None:
    url, start = picture(7), scrape(client)
    assert ask(client, url).status_code == 200
    first = scrape(client)
    assert gained(start, first, "cache_lookups_total", tier="alias", result="miss") == 1
    assert gained(start, first, "encoder_batch_items_count") == 1
    assert gained(start, first, "encoder_batch_items_sum") == 1
    assert gained(start, first, "engine_time_to_first_token_seconds_count") == 1
    assert ask(client, url).status_code == 200
    second = scrape(client)
    assert gained(first, second, "cache_lookups_total", tier="alias", result="hit") == 1
    assert gained(first, second, "encoder_batch_items_count") == 0


def test_a_broken_picture_is_counted_by_code(client: httpx.Client) -> None:
    before = scrape(client)
    answer = ask(client, "data:image/png;base64,AAAA")
    after = scrape(client)
    assert answer.status_code == 400
    assert after["media_failures_total", frozenset({("code", answer.json()["error"]["code"])})] == 1
    assert gained(before, after, "requests_total", endpoint=CHAT, status="400") == 1


def test_callers_without_a_configured_name_are_other(client: httpx.Client) -> None:
    before = scrape(client)
    assert ask(client, picture(9)).status_code == 200
    after = scrape(client)
    assert gained(before, after, "tenant_requests_total", tenant="other", status="200") == 1
    assert gained(before, after, "tenant_tokens_total", tenant="other", kind="generated") == 8


def test_stage_times_add_up_to_the_clients_time(client: httpx.Client) -> None:
    """Summed over requests, so that one hiccup of a shared machine is no failure."""
    seen_s = explained_s = 0.0
    for shade in range(20, 28):
        began = time.perf_counter()
        answer = ask(client, picture(shade), 64, **{"x-sightline-timings": "1"})
        seen_s += time.perf_counter() - began
        stages = answer.json()["sightline"]["stage_seconds"]
        assert {"receive", "tokenize", "decode", "queue", "encode", "prefill", "transfer", "generation"} <= set(stages)
        explained_s += sum(stages.values())
    assert explained_s == pytest.approx(seen_s, rel=0.05)


def test_nobody_who_did_not_ask_sees_timings(client: httpx.Client) -> None:
    assert "sightline" not in ask(client, picture(1)).json()
