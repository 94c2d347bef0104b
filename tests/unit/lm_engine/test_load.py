"""What the autoscaler hears of an engine."""

from __future__ import annotations

import pytest

from deployments.lm_engine.load import EngineLoadMeter
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.stats import SchedulerStats
from tests.unit.lm_engine.host_side import Driver, config, text


def stats(*, waiting: int = 0, scheduled: int = 0, generated: int = 0) -> SchedulerStats:
    return SchedulerStats(
        running=2,
        waiting=waiting,
        waiting_tokens=waiting * 100,
        blocks_total=8,
        blocks_used=6,
        scheduled_tokens=scheduled,
        generated_tokens=generated,
    )


def test_use_is_a_share_of_blocks_and_of_seats() -> None:
    load = EngineLoadMeter(max_num_seqs=8).read(stats(waiting=3), 0.0)
    assert (load.kv_use, load.seat_use, load.waiting_tokens, load.prompt_tokens_per_s) == (0.75, 0.25, 300, 0.0)


def test_prompt_tokens_are_what_was_scheduled_and_yielded_no_token() -> None:
    meter = EngineLoadMeter(max_num_seqs=8)
    meter.read(stats(waiting=1), 0.0)
    load = meter.read(stats(waiting=1, scheduled=5_000, generated=1_000), 2.0)
    assert load.prompt_tokens_per_s == pytest.approx(2_000.0)


def test_an_engine_without_a_line_says_nothing_of_what_it_could_do() -> None:
    meter = EngineLoadMeter(max_num_seqs=8)
    meter.read(stats(), 0.0)
    assert meter.read(stats(scheduled=5_000), 2.0).prompt_tokens_per_s == 0.0
    assert meter.read(stats(waiting=1, scheduled=9_000), 4.0).prompt_tokens_per_s == 0.0
    assert meter.read(stats(waiting=1, scheduled=9_500), 5.0).prompt_tokens_per_s == 500.0


def test_tokens_that_wait_are_those_no_cache_is_known_to_hold() -> None:
    driver = Driver(Scheduler(config(max_num_seqs=1, max_num_batched_tokens=32)))
    driver.add(text("first", 16))
    driver.add(text("other", 10, first=100))
    assert driver.scheduler.stats().waiting_tokens == 26
    driver.step()
    assert driver.scheduler.stats().waiting_tokens == 10
    driver.run()
    assert driver.scheduler.stats().waiting_tokens == 0


def test_choices_that_wait_for_the_first_one_of_their_request_have_no_tokens_of_their_own() -> None:
    driver = Driver(Scheduler(config()))
    driver.add(text("a", 16))
    driver.add(text("a#1", 16, index=1))
    assert driver.scheduler.stats().waiting == 2
    assert driver.scheduler.stats().waiting_tokens == 16
