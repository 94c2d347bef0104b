"""Load on a fake server, from one process and from several."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.bench.load.drive import Load, drive, split
from tests.bench.load.prepare import bodies
from tests.bench.load.workload import Workload
from tests.unit.bench.fake_server import Behaviour, FakeServer

TEXT = Workload(requests=12, images=0, out_tokens=6)
WORK = bodies(TEXT, "fake-vl", progress=False)


def load(server: FakeServer, **options: object) -> Load:
    return Load(url=server.url, **{"bodies": WORK, "concurrency": 4, **options})  # type: ignore[arg-type]


def test_a_closed_loop_keeps_so_many_in_flight_and_asks_everything_once() -> None:
    with FakeServer(pause_s=0.05) as server:
        result = drive(load(server), processes=1)
    assert server.most_in_flight == 4
    assert Counter(server.bodies) == Counter(WORK)
    assert [outcome.error for outcome in result.outcomes] == [None] * 12
    assert {len(outcome.piece_s) for outcome in result.outcomes} == {6}
    assert {outcome.prompt_tokens for outcome in result.outcomes} == {17}
    assert len(result.lag_s) > 0


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with FakeServer(pause_s=0.5) as server:
        result = drive(load(server, concurrency=0, arrivals_s=[0.0] * 12), processes=1)
    assert server.most_in_flight == 12
    assert all(outcome.late_s >= 0 for outcome in result.outcomes)


def test_an_open_loop_may_have_a_limit() -> None:
    with FakeServer(pause_s=0.05) as server:
        drive(load(server, concurrency=3, arrivals_s=[0.0] * 12), processes=1)
    assert server.most_in_flight == 3
    assert len(server.bodies) == 12


def test_no_request_begins_once_the_time_is_up() -> None:
    with FakeServer(pause_s=0.8) as server:
        result = drive(load(server, seconds=0.4), processes=1)
        assert [outcome.error for outcome in result.outcomes] == [None] * 4
        late = drive(load(server, seconds=0.4, concurrency=0, arrivals_s=[0.0, 0.05, *[9.0] * 10]), processes=1)
    assert len(late.outcomes) == 2


def test_every_failure_is_an_outcome_of_its_kind() -> None:
    behaviours: list[Behaviour] = ["answer", "refuse", "break", "cut", "error", "unfinished", "silent"]
    with FakeServer(lambda number: behaviours[number % 7]) as server:
        result = drive(load(server, bodies=WORK[:7], concurrency=1), processes=1)
    assert [outcome.error for outcome in result.outcomes] == [
        None, "HTTP 429 rate_limited", "HTTP 502", "stream cut", "stream error replica_lost", "stream cut", "no tokens",
    ]  # fmt: skip
    assert result.outcomes[1].detail == "try later"


def test_a_silent_server_is_given_up() -> None:
    with FakeServer(lambda number: "hang") as server:
        (outcome,) = drive(load(server, bodies=WORK[:1], timeout_s=0.2), processes=1).outcomes
    assert outcome.error == "timeout"


def test_nobody_listens() -> None:
    with FakeServer() as server:
        gone = server.url
    (outcome,) = drive(Load(url=gone, bodies=WORK[:1], concurrency=1), processes=1).outcomes
    assert outcome.error is not None
    assert outcome.error.startswith("connection: ")


def test_a_large_body_arrives_whole() -> None:
    large = b'{"max_tokens": 1, "pad": "' + b"x" * 5_000_000 + b'"}'
    with FakeServer() as server:
        (outcome,) = drive(load(server, bodies=[large]), processes=1).outcomes
        assert outcome.error is None
        assert server.bodies == [large]


def test_the_key_goes_along_and_stays_out_of_texts() -> None:
    with FakeServer() as server:
        secret = load(server, bodies=WORK[:1], api_key="sk-secret")
        drive(secret, processes=1)
        assert server.headers[0]["Authorization"] == "Bearer sk-secret"
        assert server.headers[0]["Content-Type"] == "application/json"
    assert "secret" not in repr(secret)


def test_several_processes_share_the_work() -> None:
    with FakeServer(lambda number: "refuse" if number == 5 else "answer", pause_s=0.1) as server:
        result = drive(load(server), processes=2)
    assert Counter(server.bodies) == Counter(WORK)
    assert server.most_in_flight <= 4
    assert sum(outcome.error is None for outcome in result.outcomes) == 11
    # All on one clock: their requests overlap instead of following each other.
    first_end = min(outcome.ended_s for outcome in result.outcomes)
    assert sum(outcome.begun_s < first_end for outcome in result.outcomes) >= 3


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("concurrency", [0, 1, 4, 7])
def test_parts_are_the_whole(processes: int, concurrency: int) -> None:
    arrivals = [float(index) for index in range(12)]
    whole = Load(url="", bodies=WORK, concurrency=concurrency, arrivals_s=arrivals)
    parts = split(whole, processes)
    assert sum(part.concurrency for part in parts) == concurrency
    assert Counter(body for part in parts for body in part.bodies) == Counter(WORK)
    pairs = [pair for part in parts for pair in zip(part.bodies, part.arrivals_s or (), strict=True)]
    assert sorted(pairs) == sorted(zip(WORK, arrivals, strict=True))
    if concurrency:
        assert all(part.concurrency >= 1 for part in parts)
    assert split(replace(whole, arrivals_s=None), 1)[0].arrivals_s is None
