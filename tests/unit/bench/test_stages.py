"""Time to first token by stage: from pages of our own exporter, and only where the sums mean something."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from app.auth import Authenticator
from app.deployment import PrometheusObserver
from app.ingress import ServerHooks, create_app
from cache_service.tenants import TenantRegistry
from deployments.messages import GenerationStats, PreparedPrompt, PrepareRequest, SequenceDelta
from deployments.metrics import ReplicaMetrics, render
from tests.bench.load.answer import Outcome
from tests.bench.load.runner import Runner
from tests.bench.load.runner import Server as BenchedServer
from tests.bench.load.stages import Counters, FirstToken, first_token
from tests.bench.load.workload import Workload
from tests.contract.test_http_api import Server
from tests.fakes import FakePreprocessor
from tests.unit.app.helpers import MODEL
from tests.unit.bench.fake_server import FakeServer

CHAT = "/v1/chat/completions"


class SlowPreprocessor(FakePreprocessor):
    """Takes 120 ms, and knows of 100 ms what they were for."""

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        await asyncio.sleep(0.12)
        return replace(await super().prepare(request), stage_seconds={"tokenize": 0.1})


class Ingress:
    """Counts requests as a replica of the ingress does."""

    def __init__(self, name: str) -> None:
        self._metrics = ReplicaMetrics("Ingress", name)
        self._stages = self._metrics.histogram("request_stage_seconds")
        self._first = self._metrics.histogram("time_to_first_token_seconds")
        self._requests = self._metrics.counter("requests_total")
        self._requests.labels(CHAT, "200")

    def finish(self, **stage_s: float) -> None:
        for stage, seconds in stage_s.items():
            self._stages.labels(stage).observe(seconds)
        self._first.labels(CHAT).observe(sum(stage_s.values()) - stage_s.get("generation", 0.0))
        self._requests.labels(CHAT, "200").inc()

    def page(self, *others: Ingress) -> Counters:
        found = Counters.parse(render([r._metrics.collect() for r in (self, *others)]).decode())
        assert found is not None
        return found


def answered(ttft_s: float, error: str | None = None) -> Outcome:
    made = Outcome(begun_s=1.0, ended_s=9.0, error=error)
    made.first_s = 1.0 + ttft_s
    return made


def test_stages_before_the_first_token_add_up_over_replicas() -> None:
    one, two = Ingress("one"), Ingress("two")
    one.finish(receive=9, prefill=9, generation=9)
    before = one.page(two)
    one.finish(receive=0.01, encode=0.05, prefill=0.025, transfer=0.015, generation=5)
    two.finish(receive=0.01, encode=0.15, prefill=0.025, transfer=0.015, generation=7)
    found = first_token(one.page(two).since(before), [answered(0.11), answered(0.21)])
    assert isinstance(found, FirstToken)
    assert list(found.stage_s) == ["encode", "prefill", "transfer", "receive"]
    assert found.stage_s["encode"] == pytest.approx(0.1)
    assert found.sum_s == pytest.approx(0.15)
    assert found.server_s == pytest.approx(0.15)
    assert found.client_s == pytest.approx(0.16)
    assert found.ratio == pytest.approx(0.9375)
    assert not found.adds_up
    assert FirstToken({"encode": 0.096}, 0.096, 0.1).adds_up


def test_no_breakdown_where_the_sums_are_not_of_the_same_requests() -> None:
    ingress = Ingress("one")
    before = ingress.page()
    ingress.finish(receive=0.1, generation=1)
    gained = ingress.page().since(before)
    assert isinstance(first_token(gained, [answered(0.1)]), FirstToken)
    assert "failed" in str(first_token(gained, [answered(0.1), answered(0.1, "timeout")]))
    assert "alone" in str(first_token(gained, [answered(0.1), answered(0.1)]))
    assert "no request" in str(first_token(gained, [answered(0.1, "timeout")]))


def test_a_replaced_replica_makes_the_difference_meaningless() -> None:
    old, new = Ingress("old"), Ingress("new")
    old.finish(receive=0.5, generation=1)
    with pytest.raises(ValueError, match="went back"):
        new.page().since(old.page())


def test_another_servers_page_says_nothing() -> None:
    assert Counters.parse("# TYPE vllm:num_requests gauge\nvllm:num_requests 3\n") is None


async def test_the_real_edge_says_where_its_time_goes() -> None:
    """HTTP, pipeline and exporter are the server's own, the stages behind them are fakes that take their time."""
    server, metrics = Server(preprocessor=SlowPreprocessor()), ReplicaMetrics("Ingress", "one")
    stats = GenerationStats(prompt_tokens=3, completion_tokens=2, stage_seconds={"queue": 0.002, "prefill": 0.01})
    server.engine.script = (
        (SequenceDelta(text="a", token_ids=(1,)),),
        (SequenceDelta(text="b", token_ids=(2,), finish_reason="length", stats=stats),),
    )

    async def page() -> bytes:
        return render([metrics.collect()])

    hooks = ServerHooks(
        check_ready=server.hooks.check_ready,
        metrics_text=page,
        metrics_targets=server.hooks.metrics_targets,
        reset_prefix_cache=server.hooks.reset_prefix_cache,
    )
    server.app = create_app(
        server.pipeline, server.settings, Authenticator(TenantRegistry()), hooks, PrometheusObserver(metrics)
    )
    workload = Workload(requests=6, concurrency=2, images=0, text_characters=8, out_tokens=2)
    async with server.start():
        runner = Runner(server=BenchedServer(url=server.url, model=MODEL), progress=False)
        run = await asyncio.to_thread(runner.run, workload)
    assert run["errors"] == {}
    found = run["first_token"]
    assert {"receive", "admission", "tokenize", "queue", "prefill", "transfer"} <= set(found["stage_ms"])
    assert "generation" not in found["stage_ms"]
    assert found["stage_ms"]["tokenize"] == pytest.approx(100)
    # Between the stages' clocks lie microseconds; what the client sees beyond them is HTTP.
    assert found["sum_of_stages_ms"] == pytest.approx(found["server_ttft_ms"], rel=0.05)
    assert found["sum_of_stages_ms"] < found["client_ttft_ms"]


def test_the_fake_speaks_as_our_exporter_does() -> None:
    """Or the tests that use it would show nothing of a real server."""
    import urllib.request

    with FakeServer() as server:
        page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    counters = Counters.parse(page)
    assert counters is not None
    ours = Ingress("one")
    ours.finish(**dict.fromkeys(counters.stage_s, 0.0))
    assert ours.page().stage_s == counters.stage_s
