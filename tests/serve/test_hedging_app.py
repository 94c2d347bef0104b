"""Two encoder replicas, one of which hangs: its pictures are answered for by the other one, and nobody waits for it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from tests.serve.app_process import AppProcess, running_app, total
from tests.serve.test_routing_app import ask, picture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WARM_UP = 24
"""Pictures after which patience follows what encodes take here."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppProcess]:
    folder = tmp_path_factory.mktemp("hedging")
    # It shall not be Serve that helps, by replacing the replica that hangs.
    patient = {"VisionEncoder": {"health_check_timeout_s": 600, "health_check_period_s": 600}}
    with running_app(folder, args={}, replicas={"VisionEncoder": 2}, options=patient) as app:
        for i in range(WARM_UP):
            assert ask(app, picture(10_000 + i)).status_code == 200
        yield app


def encoders(app: AppProcess) -> list[psutil.Process]:
    found = []
    for process in app.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ServeReplica" in (line := " ".join(process.cmdline())) and ":VisionEncoder" in line:
                found.append(process)
    return found


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def hedges(app: AppProcess, outcome: str) -> float:
    return total(app.samples(), "encoder_hedges_total", outcome=outcome)


def test_pictures_of_a_replica_that_hangs_are_answered_for_by_the_other_one(app: AppProcess) -> None:
    """An engine gives an encoder call up after 120 s; clients here do so after 60."""
    first, second = encoders(app)
    before = hedges(app, "won")
    with frozen(first), ThreadPoolExecutor(4) as pool:
        urls = [picture(20_000 + i) for i in range(16)]
        answers = list(pool.map(lambda url: ask(app, url, timeout_s=60), urls))
        assert first.status() == psutil.STATUS_STOPPED
        assert {answer.status_code for answer in answers} == {200}
        several = ask(app, *(picture(30_000 + i) for i in range(4)), text="What are these?", timeout_s=60)
        assert several.status_code == 200
    assert hedges(app, "won") > before
    assert {process.pid for process in encoders(app)} == {first.pid, second.pid}


def test_a_replica_that_wakes_up_is_used_again(app: AppProcess) -> None:
    before = app.samples()
    deadline_s, number = time.monotonic() + 60, 40_000
    used: set[str] = set()
    while len(used) < 2:
        assert time.monotonic() < deadline_s, "one replica gets nothing any more"
        number += 1
        assert ask(app, picture(number)).status_code == 200
        gained = app.samples() - before
        used = {
            dict(labels)["replica"]
            for (name, labels), value in gained.items()
            if name == "encoder_items_total" and value
        }
