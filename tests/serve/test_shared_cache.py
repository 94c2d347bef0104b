"""One picture, one computation, in a cluster of two replicas of every stage over a real Valkey server.

Everything is judged by counters over all replicas, never by clocks. The encoder waits for company longer than it would
in earnest, so that an encode is surely under way when its replica is killed.
"""

from __future__ import annotations

import base64
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from cache_service.codec import label
from cache_service.tenants import hash_api_key
from tests.redis.rig import Server, running_server
from tests.serve.app_process import AppProcess, Samples, replicas_with, running_app, total

pytestmark = [pytest.mark.serve, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

ENCODE_S = 2.0
BREAKER_OPEN_S = 0.5
REQUEST_TIMEOUT_S = 120.0
TRIES = 5
"""Rounds of requests until each replica has had one: which one Serve asks is its choice."""
# Equal work meets in one replica where it can; here it shall not, so that the replicas have something to share.
SPREAD = {
    "LMEngine": {
        "request_router_config": {
            "request_router_class": "deployments.request_router:AffinityRouter",
            "request_router_kwargs": {"bound": 1.01, "min_bound": 1},
        }
    },
    "VisionEncoder": {
        "request_router_config": {
            "request_router_class": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
        }
    },
}

KEYS = {name: f"key-of-tenant-{name}-0123456789" for name in ("main", "alone", "first", "second")}
SHARE_GROUPS = {"first": "labs", "second": "labs"}


@dataclass
class Cluster:
    app: AppProcess
    valkey: Server

    def ask(self, *parts: dict[str, Any], tenant: str = "main", **options: Any) -> httpx.Response:
        """One question about pictures, answered by one token."""
        content = [*parts, {"type": "text", "text": "What colour is it?"}]
        body = {"model": self.app.model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **options}
        return httpx.post(
            f"{self.app.url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {KEYS[tenant]}"},
            timeout=REQUEST_TIMEOUT_S,
        )

    def ask_at_once(self, times: int, *parts: dict[str, Any], **options: Any) -> list[int]:
        """Statuses of equal questions that are all under way together."""
        with ThreadPoolExecutor(times) as pool:
            replies = [pool.submit(self.ask, *parts, **options) for _ in range(times)]
            return [reply.result().status_code for reply in replies]

    def encodes(self) -> float:
        return total(self.app.samples(), "encoder_items_total")

    def keys(self, kind: str) -> list[bytes]:
        with self.valkey.admin() as admin:
            return list(admin.scan_iter(f"sightline:*:{kind}:{{*}}", count=1000))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shared_cache")
    tenants = [
        {"name": name, "key_hashes": [hash_api_key(key)], **_share(name)}
        for name, key in KEYS.items()
    ]  # fmt: skip
    keys_file = folder / "tenants.yaml"
    keys_file.write_text(yaml.safe_dump({"tenants": tenants}))
    with running_server() as valkey:
        # Waits for Redis longer than the defaults: a test machine may be busy, and a miss would look like a fault.
        redis = {
            "url": valkey.url,
            "read_timeout_s": 2.0,
            "connect_timeout_s": 2.0,
            "breaker_open_s": BREAKER_OPEN_S,
        }
        args = {
            "cache": {"redis": redis},
            "server": {"api_keys_file": str(keys_file)},
            "vision_encoder": {"max_wait_s": ENCODE_S, "num_threads": 1},
        }
        replicas = {"Preprocessor": 2, "VisionEncoder": 2, "LMEngine": 2}
        with running_app(folder, args=args, replicas=replicas, options=SPREAD) as app:
            cluster = Cluster(app, valkey)
            # An encoder's very first item does not wait for company; the tests' pictures should.
            while len(replicas_with(app.samples(), "encoder_items_total")) < 2:
                with ThreadPoolExecutor(4) as pool:
                    assert {
                        reply.status_code for reply in pool.map(cluster.ask, [new_picture() for _ in range(4)])
                    } == {200}
            yield cluster


_seeds = count(1)


def new_picture() -> dict[str, Any]:
    """A picture nobody has seen."""
    pixels = np.random.default_rng(next(_seeds)).integers(0, 256, (84, 84, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def _share(name: str) -> dict[str, str]:
    return {"share_group": SHARE_GROUPS[name]} if name in SHARE_GROUPS else {}


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.02)


def change(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


def test_100_at_once_are_encoded_once(cluster: Cluster) -> None:
    before = cluster.app.samples()
    statuses = cluster.ask_at_once(100, new_picture())
    after = cluster.app.samples()
    assert Counter(statuses) == {200: 100}
    assert change(before, after, "encoder_items_total") == 1
    assert change(before, after, "media_total", outcome="seen") == 100
    assert change(before, after, "media_total", outcome="decoded") <= 2  # one for each replica, at most
    assert len(replicas_with(after - before, "media_total", outcome="seen")) == 2


def test_equal_work_of_both_encoder_replicas_is_done_once(cluster: Cluster) -> None:
    """Rounds until both replicas were asked for the same picture: which of them is asked is the router's choice."""
    for _ in range(10):
        before = cluster.app.samples()
        assert set(cluster.ask_at_once(12, new_picture())) == {200}
        after = cluster.app.samples()
        assert change(before, after, "encoder_items_total") == 1
        if len(replicas_with(after - before, "cache_lookups_total", deployment="VisionEncoder", tier="memory")) == 2:
            assert change(before, after, "single_flight_joins_total", scope="cluster") == 1
            return
    pytest.fail("one encoder replica was asked by both engines in every round")


def test_killed_leader_is_replaced_and_the_picture_encoded_once_more(cluster: Cluster) -> None:
    wait_until_quiet(cluster)
    picture = new_picture()
    before, known = cluster.app.samples(), encoder_replicas(cluster)
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(cluster.ask, picture)
        until(lambda: bool(cluster.keys("lease:embedding")))
        leader = lease_holder(cluster)
        others = [pool.submit(cluster.ask, picture) for _ in range(19)]
        leader.kill()
        statuses = Counter(reply.result().status_code for reply in [first, *others])
    assert statuses == {200: 20}
    after, seen = cluster.app.samples(), encoder_replicas(cluster)
    assert known - seen  # one has died
    assert sum(max(0, change(before, after, "encoder_items_total", replica=name)) for name in known | seen) == 1


def encoder_replicas(cluster: Cluster) -> set[str]:
    return replicas_with(cluster.app.samples(), "replica_start_time_seconds", deployment="VisionEncoder")


def wait_until_quiet(cluster: Cluster) -> None:
    """Until all commands of earlier requests are seconds past, so that the next ones tell who sends them."""
    with cluster.valkey.admin() as admin:
        own = admin.client_id()
        until(lambda: all(int(client["idle"]) > 2 for client in admin.client_list() if int(client["id"]) != own))


def lease_holder(cluster: Cluster) -> psutil.Process:
    """The encoder replica that has just talked to the server: with one request under way, the leader."""
    with cluster.valkey.admin() as admin:
        ports = {int(client["addr"].rpartition(":")[2]) for client in admin.client_list() if int(client["idle"]) <= 2}
    (holder,) = (
        process
        for process in cluster.app.processes()
        if "VisionEncoder" in " ".join(process.cmdline())
        and ports & {connection.laddr.port for connection in process.net_connections("tcp") if connection.laddr}
    )
    return holder


def test_tenants_share_nothing(cluster: Cluster) -> None:
    picture = new_picture()
    assert cluster.ask(picture, tenant="main").status_code == 200
    before = cluster.app.samples()
    assert cluster.ask(picture, tenant="alone").status_code == 200
    after = cluster.app.samples()
    assert change(before, after, "encoder_items_total") == 1
    assert change(before, after, "media_total", outcome="decoded") == 1
    assert change(before, after, "cache_lookups_total", result="hit") == 0
    assert change(before, after, "prompt_tokens_total", source="cached") == 0
    assert change(before, after, "single_flight_joins_total") == 0


def test_cache_salt_divides_a_tenant(cluster: Cluster) -> None:
    picture = new_picture()
    assert cluster.ask(picture, cache_salt="mine").status_code == 200
    before = cluster.app.samples()
    assert cluster.ask(picture, cache_salt="yours").status_code == 200
    middle = cluster.app.samples()
    assert change(before, middle, "encoder_items_total") == 1
    assert change(before, middle, "cache_lookups_total", result="hit") == 0
    assert cluster.ask(picture, cache_salt="mine").status_code == 200
    assert cluster.encodes() == total(middle, "encoder_items_total")


def test_share_group_shares(cluster: Cluster) -> None:
    picture = new_picture()
    assert cluster.ask(picture, tenant="first").status_code == 200
    until(lambda: stored_for(cluster, "group:labs") == 1)
    before = cluster.app.samples()
    assert set(cluster.ask_at_once(8, picture, tenant="second")) == {200}
    after = cluster.app.samples()
    assert change(before, after, "encoder_items_total") == 0
    assert change(before, after, "media_total", outcome="decoded") == 0
    hits = change(before, after, "cache_lookups_total", result="hit", deployment="Preprocessor")
    assert hits >= 8  # by a replica's own table, or by the other one's record


def stored_for(cluster: Cluster, namespace: str) -> int:
    """Embeddings in Redis that bear a namespace's label, as the operator's tool finds them."""
    with cluster.valkey.admin() as admin:
        return sum(label(namespace) in admin.getrange(key, 0, 255) for key in cluster.keys("embedding"))


def test_replicas_know_each_others_pictures(cluster: Cluster) -> None:
    """Seen by one replica, a picture is decoded by neither from then on, and its uuid alone is enough for both."""
    picture = {**new_picture(), "uuid": "the-one-with-the-boat"}
    assert cluster.ask(picture).status_code == 200
    until(lambda: len(cluster.keys("uuid")) == 1)
    before = cluster.app.samples()
    bare = {"type": "image_url", "image_url": None, "uuid": "the-one-with-the-boat"}
    for _ in range(TRIES):
        assert set(cluster.ask_at_once(16, picture)) == {200}
        assert set(cluster.ask_at_once(16, bare)) == {200}
        after = cluster.app.samples()
        if len(replicas_with(after - before, "media_total", outcome="seen")) == 2:
            break
    else:
        pytest.fail("Serve asked one preprocessor alone")
    assert change(before, after, "media_total", outcome="decoded") == 0
    assert change(before, after, "encoder_items_total") == 0
    unknown = cluster.ask(bare, tenant="alone")
    assert unknown.status_code == 400
    assert unknown.json()["error"]["code"] == "unknown_media_uuid"


def test_redis_dies_and_comes_back_under_load(cluster: Cluster) -> None:
    repeated = new_picture()
    pictures: Sequence[dict[str, Any]] = [repeated, *(new_picture() for _ in range(3))]
    stop = False

    def load() -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not stop:
            for part in (repeated, new_picture(), *pictures):
                statuses[cluster.ask(part).status_code] += 1
        return statuses

    with ThreadPoolExecutor(6) as pool:
        workers = [pool.submit(load) for _ in range(6)]
        try:
            until(lambda: bool(cluster.keys("embedding")))
            cluster.valkey.kill()
            errors = total(cluster.app.samples(), "cache_lookups_total", tier="redis", result="error")
            until(lambda: total(cluster.app.samples(), "cache_lookups_total", tier="redis", result="error") > errors)
            cluster.valkey.start()
            until(lambda: bool(cluster.keys("embedding")))  # it came back empty: these were written since
            until(lambda: bool(cluster.keys("alias")))
        finally:
            stop = True
        statuses = sum((worker.result() for worker in workers), Counter[int]())
    assert set(statuses) == {200}, statuses
