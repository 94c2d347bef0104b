"""One rule a test; sizes are small enough to follow by hand. Blocks hold 4 tokens unless said otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    MediaError,
    OverloadedError,
    PayloadLostError,
    RateLimitError,
)
from deployments.lm_engine.plan import EmbedSlice, SampledToken, StepPlan
from deployments.lm_engine.request import SequenceStatus
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.stats import Budget
from tests.unit.lm_engine.host_side import EOS, Clock, Driver, config, identity_of, request_of, sequence, text


def drive(**options: Any) -> Driver:
    return Driver(Scheduler(config(**options), Clock()))


def shares(plan: StepPlan) -> dict[str, int]:
    return {chunk.sequence_id: chunk.num_tokens for chunk in plan.chunks}


def encodes(plan: StepPlan) -> list[tuple[str, int]]:
    return [(start.sequence_id, int.from_bytes(start.identity, "little")) for start in plan.encode]


# -- tokens ------------------------------------------------------------------------------------------------------------
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    driver = drive(max_num_batched_tokens=5)
    driver.add(text("a", 12, max_tokens=2))
    plans = [driver.step() for _ in range(4)]
    assert [(p.chunks[0].start, p.chunks[0].num_tokens, p.chunks[0].samples) for p in plans] == [
        (0, 5, False),
        (5, 5, False),
        (10, 2, True),
        (12, 1, True),
    ]
    assert driver.ended[0].output_token_ids == [EOS, EOS]


def test_decodes_come_before_prefills_and_running_before_waiting() -> None:
    driver = drive(max_num_batched_tokens=6)
    driver.add(text("decoding", 3, max_tokens=9))
    driver.step()
    driver.add(text("first", 8))
    driver.add(text("second", 8))
    assert shares(driver.step()) == {"decoding": 1, "first": 5}
    assert shares(driver.step()) == {"decoding": 1, "first": 3, "second": 2}


def test_prefills_can_be_kept_short_while_others_decode() -> None:
    driver = drive(max_prefill_tokens_while_decoding=3)
    driver.add(text("decoding", 8, max_tokens=3))
    assert shares(driver.step()) == {"decoding": 8}
    driver.add(text("a", 20, first=50))
    assert shares(driver.step()) == {"decoding": 1, "a": 3}
    driver.step()
    assert shares(driver.step()) == {"a": 14}


def test_seats_are_limited() -> None:
    driver = drive(max_num_seqs=2)
    for name in "abc":
        driver.add(text(name, 4, max_tokens=2))
    assert shares(driver.step()) == {"a": 4, "b": 4}
    assert driver.scheduler.stats().waiting == 1
    driver.step()
    assert shares(driver.step()) == {"c": 4}


def test_priority_runs_earlier_only_under_its_policy() -> None:
    for policy, expected in (("fcfs", "late"), ("priority", "urgent")):
        driver = drive(max_num_seqs=1, scheduling_policy=policy)
        driver.add(text("late", 4, priority=1))
        driver.add(text("urgent", 4, priority=0))
        assert list(shares(driver.step())) == [expected]


def test_waiting_outweighs_priority_in_the_end() -> None:
    """Bound: a request of priority p waits for none that arrived p * priority_aging_s after it."""
    driver = drive(max_num_seqs=1, scheduling_policy="priority", priority_aging_s=10.0)
    driver.add(text("patient", 4, priority=2, arrival_s=100.0))
    for number in range(5):
        driver.add(text(f"urgent{number}", 4, priority=0, arrival_s=110.0 + 4 * number))
    order = []
    while driver.scheduler.has_work:
        driver.step()
        order += [seq.sequence_id for seq in driver.ended if seq.sequence_id not in order]
    assert order == ["urgent0", "urgent1", "urgent2", "patient", "urgent3", "urgent4"]


def test_a_missing_token_ends_its_sequence_alone() -> None:
    driver = drive()
    driver.add(text("a", 4))
    driver.add(text("b", 4))
    plan = driver.schedule()
    (ended,) = driver.scheduler.update(plan, [SampledToken("b", 1)], {})
    assert (ended.sequence_id, ended.status) == ("a", SequenceStatus.FAILED)
    assert isinstance(ended.error, InternalError)
    driver.run()


def test_the_stop_checker_ends_a_sequence() -> None:
    driver = drive()
    driver.add(text("a", 4))
    driver.schedule()
    (ended,) = driver.update(stop=["a"])
    assert (ended.finish_reason, ended.stop_reason, ended.output_token_ids) == ("stop", EOS, [EOS])
    assert not driver.scheduler.has_work


# -- KV blocks ---------------------------------------------------------------------------------------------------------
def test_the_youngest_is_preempted_and_recomputes() -> None:
    driver = drive(num_blocks=4, enable_prefix_caching=False)
    driver.add(text("old", 8, max_tokens=6))
    driver.add(text("young", 8, max_tokens=6))
    plans = [driver.step() for _ in range(2)]
    assert [plan.preempted for plan in plans] == [(), ("young",)]
    assert shares(plans[1]) == {"old": 1}
    driver.run()
    young = driver.sequences["young"]
    assert (young.num_preemptions, young.num_output_tokens) == (1, 6)
    assert driver.scheduler.stats().preemptions == 1


def test_a_preempted_sequence_finds_its_own_prefix_again() -> None:
    driver = drive(num_blocks=6)
    driver.add(text("old", 8, max_tokens=10))
    driver.add(text("young", 9, first=50, max_tokens=6))
    while not driver.step().preempted:
        pass
    driver.run()
    assert driver.sequences["young"].num_preemptions >= 1
    assert driver.sequences["young"].num_cached_tokens == 0, "usage tells what was cached when it first ran"


def test_who_lacks_blocks_in_the_queue_lets_nobody_pass() -> None:
    driver = drive(num_blocks=4)
    driver.add(text("running", 8, max_tokens=3))
    driver.step()
    driver.add(text("big", 12, first=50))
    driver.add(text("small", 2, first=90))
    assert shares(driver.step()) == {"running": 1}
    assert driver.scheduler.stats().denials["kv_blocks", "deferred"] == 1
    driver.step()
    assert shares(driver.step())["big"] == 12


def test_the_youngest_waits_for_blocks_with_what_it_has() -> None:
    driver = drive(num_blocks=5, enable_prefix_caching=False)
    driver.add(text("old", 8, max_tokens=3))
    driver.add(text("young", 8, max_tokens=3))
    plans = [driver.step() for _ in range(4)]
    assert [shares(plan) for plan in plans] == [{"old": 8, "young": 8}, {"old": 1}, {"old": 1}, {"young": 1}]
    assert driver.scheduler.stats().preemptions == 0


def test_running_prefills_have_a_claim_on_free_blocks() -> None:
    """Without it a second long prompt would be let in, only to be preempted by the first."""
    driver = drive(num_blocks=8)
    driver.add(sequence("a", [1, 2], (5, 8), list(range(50, 60)), max_tokens=1))
    driver.step(encode=False)
    driver.add(text("b", 20, first=90, max_tokens=1))
    assert shares(driver.step(encode=False)) == {}
    driver.encoded()
    driver.run()
    assert driver.scheduler.stats().preemptions == 0


def test_nobody_is_let_in_by_a_step_that_preempts() -> None:
    driver = drive(num_blocks=4, enable_prefix_caching=False)
    driver.add(text("old", 8, max_tokens=6))
    driver.add(text("young", 8, max_tokens=6))
    driver.step()
    driver.add(text("new", 2))
    assert shares(driver.step()) == {"old": 1}


def test_an_equal_prompt_hits_and_still_computes_its_last_token() -> None:
    driver = drive()
    driver.add(text("a", 8, max_tokens=1))
    driver.run()
    second = driver.add(text("b", 8, max_tokens=1))
    plan = driver.step()
    assert (plan.chunks[0].start, plan.chunks[0].num_tokens) == (4, 4)
    assert second.num_cached_tokens == 4
    stats = driver.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (16, 4)


def test_reset_forgets_prefixes() -> None:
    driver = drive()
    driver.add(text("a", 9, max_tokens=1))
    driver.run()
    assert driver.scheduler.reset_prefix_cache() == 2
    assert driver.add(text("b", 9)).num_cached_tokens == 0
    assert shares(driver.step()) == {"b": 9}


def test_nobody_starves_for_blocks_while_small_ones_keep_coming() -> None:
    """Bound: a prompt as large as the pool starts once those that ran before it have ended."""
    driver = drive(num_blocks=8, enable_prefix_caching=False)
    for number in range(3):
        driver.add(text(f"small{number}", 4, max_tokens=4))
    driver.step()
    driver.add(text("big", 28, max_tokens=2))
    for number in range(3, 12):
        driver.add(text(f"small{number}", 4, max_tokens=4))
        driver.step()
    assert driver.sequences["big"].is_finished


# -- pictures ----------------------------------------------------------------------------------------------------------
def test_text_before_an_unready_picture_is_computed_meanwhile() -> None:
    driver = drive()
    driver.add(sequence("a", [1, 2, 3], (5, 6), [4]))
    plan = driver.step(encode=False)
    assert (shares(plan), encodes(plan)) == ({"a": 3}, [("a", 5)])
    assert driver.step(encode=False).is_empty
    driver.encoded()
    plan = driver.step()
    assert shares(plan) == {"a": 7}
    assert plan.chunks[0].embeds == (EmbedSlice(identity_of(5), 0, 0, 6),)


def test_chunks_may_end_inside_a_picture() -> None:
    driver = drive(max_num_batched_tokens=4)
    driver.add(sequence("a", [1, 2], (5, 7), [3], max_tokens=1))
    driver.step()
    slices = [driver.step().chunks[0].embeds for _ in range(2)]
    assert slices == [(EmbedSlice(identity_of(5), 0, 0, 4),), (EmbedSlice(identity_of(5), 0, 4, 3),)]


@pytest.mark.parametrize("max_num_batched_tokens", range(1, 22))
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_every_chunk_border_uses_the_right_rows(max_num_batched_tokens: int, enable_prefix_caching: bool) -> None:
    """The driver checks each row and each KV position against the prompt."""
    driver = drive(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=enable_prefix_caching)
    for name in "ab":
        driver.add(sequence(name, [1, 2, 3], (5, 8), [4], (6, 5), (5, 8), [9, 9]))
        driver.run()
    assert driver.ended[0].output_token_ids == driver.ended[1].output_token_ids


def test_many_pictures_under_one_prompt_stay_apart() -> None:
    """The driver compares each KV position that is read with what this sequence should find there."""
    driver = drive(max_num_seqs=32, num_blocks=300, encoder_cache_slots=64)
    for number in range(200):
        driver.add(sequence(f"r{number}", [1, 2, 3, 4, 5], (number % 150, 7), [6, 7, 8], max_tokens=3))
    driver.run()
    assert len(driver.ended) == 200
    assert driver.scheduler.stats().prefix_hit_tokens > 0


def test_chunks_may_not_end_inside_a_picture_if_told_so() -> None:
    driver = drive(max_num_batched_tokens=8, disable_chunked_mm_input=True)
    driver.add(sequence("a", [1, 2], (5, 7), [3], max_tokens=1))
    assert [shares(driver.step()) for _ in range(2)] == [{"a": 2}, {"a": 8}]


def test_a_whole_picture_goes_before_decodes_once_they_left_too_little_for_it() -> None:
    driver = drive(max_num_batched_tokens=8, disable_chunked_mm_input=True)
    driver.add(text("decoding", 2, max_tokens=9))
    driver.step()
    driver.add(sequence("picture", (5, 8), [3], max_tokens=1))
    plans = [shares(driver.step()) for _ in range(4)]
    assert plans == [{"decoding": 1}, {"decoding": 1}, {"picture": 8}, {"decoding": 1, "picture": 1}]


def test_several_items_of_a_request_are_encoded_side_by_side() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 4), [1], (6, 4), [2]))
    assert encodes(driver.step()) == [("a", 5), ("a", 6)]


def test_encodes_of_a_step_are_limited_in_slots_and_in_patches() -> None:
    cases: tuple[tuple[dict[str, int], Budget], ...] = (
        ({"max_encoder_slots_per_step": 9}, "encoder_slots"),
        ({"max_encoder_patches_per_step": 36}, "encoder_patches"),
    )
    for limits, budget in cases:
        driver = drive(**limits)
        driver.add(sequence("a", (5, 8), [1]))
        driver.add(sequence("b", (6, 8), [1]))
        assert [encodes(driver.step()), encodes(driver.step())] == [[("a", 5)], [("b", 6)]]
        assert driver.scheduler.stats().denials[budget, "deferred"] >= 1


def test_a_picture_is_let_go_when_its_last_slot_is_computed_and_hits_later() -> None:
    driver = drive(enable_prefix_caching=False)
    driver.add(sequence("a", (5, 8), [1, 2], max_tokens=9))
    driver.step()
    assert driver.scheduler.stats().slots_held == 8
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.slots_held, stats.slots_idle) == (0, 8)
    driver.add(sequence("b", [9], (5, 8), [1], max_tokens=1))
    plan = driver.step()
    assert (plan.encode, shares(plan)) == ((), {"a": 1, "b": 10})
    assert driver.scheduler.stats().embed_hits == 1


def test_a_prefix_hit_over_a_picture_needs_no_embedding() -> None:
    driver = drive(encoder_cache_slots=8, max_encoder_slots_per_step=8)
    driver.add(sequence("a", (5, 8), [1, 2], max_tokens=1))
    driver.run()
    driver.add(sequence("other", (6, 8), [1], max_tokens=1))
    driver.run()
    driver.add(sequence("b", (5, 8), [1, 2], max_tokens=1))
    plan = driver.step()
    assert (plan.encode, shares(plan)) == ((), {"b": 2})


def test_a_prefix_hit_that_ends_inside_a_picture_needs_it_again() -> None:
    driver = drive(encoder_cache_slots=8, max_encoder_slots_per_step=8)
    driver.add(sequence("a", [9], (5, 8), max_tokens=1))
    driver.run()
    driver.add(sequence("other", (6, 8), [1], max_tokens=1))
    driver.run()
    driver.add(sequence("b", [9], (5, 8), max_tokens=1))
    plan = driver.step()
    assert (encodes(plan), plan.chunks) == ([("b", 5)], ())
    plan = driver.step()
    assert plan.chunks[0].start == 8
    assert plan.chunks[0].embeds == (EmbedSlice(identity_of(5), 0, 7, 1),)


def test_encodes_start_ahead_for_waiting_requests_and_make_room_for_running_ones() -> None:
    driver = drive(max_num_seqs=1, encoder_cache_slots=16, enable_prefix_caching=False)
    driver.add(sequence("a", [1, 2, 3, 4], (5, 8), [1], (6, 8), max_tokens=1))
    driver.add(sequence("b", (7, 8), [1], max_tokens=1))
    assert encodes(driver.step()) == [("a", 5), ("a", 6)]
    driver.step()
    assert encodes(driver.schedule()) == [("b", 7)], "a's pictures are computed: their slots are idle"
    stats = driver.scheduler.stats()
    assert stats.slots_held + stats.slots_ahead == 8


def test_waiting_requests_hold_no_slots() -> None:
    driver = drive(max_num_seqs=1, encoder_cache_slots=8, max_encoder_slots_per_step=8)
    driver.add(text("runs", 4, max_tokens=8))
    driver.step()
    driver.add(sequence("waits", (5, 8), [1]))
    assert encodes(driver.step()) == [("waits", 5)]
    stats = driver.scheduler.stats()
    assert (stats.slots_held, stats.slots_idle) == (0, 8)


def test_text_overtakes_a_request_whose_picture_has_no_slots_yet() -> None:
    driver = drive(encoder_cache_slots=8, max_encoder_slots_per_step=8)
    driver.add(sequence("a", (5, 8), [1]))
    driver.step(encode=False)
    driver.add(sequence("b", (6, 4), [1]))
    driver.add(sequence("c", (5, 8), [2]))
    driver.add(text("t", 4))
    plan = driver.step(encode=False)
    assert shares(plan) == {"t": 4}
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 2), "c would only prolong the hold that b waits for"
    assert stats.denials["embedding_slots", "deferred"] == 1


def test_a_small_encode_does_not_pass_a_large_one_that_is_denied() -> None:
    driver = drive(max_encoder_slots_per_step=9)
    driver.add(sequence("a", (5, 8), [1]))
    driver.add(sequence("b", (6, 8), [1]))
    driver.add(sequence("c", (7, 1), [1]))
    assert [encodes(driver.step()), encodes(driver.step())] == [[("a", 5)], [("b", 6), ("c", 7)]]


def test_nobody_starves_for_slots_while_others_share_a_popular_picture() -> None:
    """The popular picture takes two steps to compute, so that without a gate somebody would always hold it.

    Bound: the big picture starts once those that held something before it have used it up.
    """
    limits = {"encoder_cache_slots": 8, "max_encoder_slots_per_step": 8, "max_num_batched_tokens": 5}
    driver = drive(**limits, max_num_seqs=4, enable_prefix_caching=False)
    driver.add(sequence("popular", [1, 2], (5, 4), [3], max_tokens=1))
    driver.step()
    driver.add(sequence("big", (6, 8), [1], max_tokens=1))
    for number in range(12):
        driver.add(sequence(f"popular{number}", [1, 2], (5, 4), [3], max_tokens=1))
        driver.step()
    assert driver.sequences["big"].is_finished


def test_who_lacks_blocks_gives_up_the_slots_that_an_older_one_waits_for() -> None:
    """Three that block each other: `old` waits for slots, `young` has them but no blocks, which `middle` has used up
    by decoding, who cannot go on either."""
    driver = drive(num_blocks=8, encoder_cache_slots=8, max_encoder_slots_per_step=8)
    driver.add(sequence("old", [1, 2, 3, 4], (5, 4), (6, 6), max_tokens=1))
    driver.add(text("middle", 4, first=50, max_tokens=24))
    driver.step(encode=False)
    driver.encoded(identity_of(5))
    driver.add(sequence("young", (7, 4), [1], max_tokens=1))
    assert encodes(driver.step(encode=False)) == [("young", 7)]
    while driver.step(encode=False).chunks:
        pass
    driver.encoded()
    assert driver.step().preempted == ("young",)
    assert encodes(driver.step()) == [("old", 6)]
    driver.run()
    assert driver.scheduler.stats().stalled_steps == 0


def test_what_waits_first_is_not_evicted_for_what_waits_second() -> None:
    driver = drive(max_num_seqs=1, encoder_cache_slots=8, max_encoder_slots_per_step=8)
    driver.add(text("runs", 4, max_tokens=9))
    driver.step()
    driver.add(sequence("first", (5, 8), [1]))
    driver.add(sequence("second", (6, 8), [1]))
    assert encodes(driver.step()) == [("first", 5)]
    assert driver.step().is_empty is False
    assert driver.plan.encode == ()
    assert driver.plan.evicted_embeds == ()


def test_an_equal_picture_in_flight_is_joined() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 8), [1]))
    driver.add(sequence("b", [9], (5, 8), [1]))
    plan = driver.step(encode=False)
    assert encodes(plan) == [("a", 5)]
    driver.encoded()
    assert shares(driver.step()) == {"a": 9, "b": 9}


# -- the encoder fails -------------------------------------------------------------------------------------------------
def test_a_bad_item_ends_all_that_hold_it_and_nobody_else() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 8), [1]))
    driver.add(sequence("b", [9], (5, 8), [1]))
    driver.add(sequence("c", (6, 8), [1]))
    driver.step(encode=False)
    start = driver.in_flight.pop(identity_of(5))
    error = MediaError("broken")
    failed = driver.scheduler.on_embedding_failed(start.identity, error, start.ticket)
    assert [(seq.sequence_id, seq.error, seq.finish_reason) for seq in failed] == [
        ("a", error, "error"),
        ("b", error, "error"),
    ]
    driver.run()
    assert [seq.sequence_id for seq in driver.ended] == ["c"]


def test_a_lost_payload_ends_its_request_and_others_ask_with_their_own() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 8), [1]))
    driver.add(sequence("b", [9], (5, 8), [1]))
    driver.step(encode=False)
    start = driver.in_flight.pop(identity_of(5))
    failed = driver.scheduler.on_embedding_failed(start.identity, PayloadLostError("gone"), start.ticket)
    assert [seq.sequence_id for seq in failed] == ["a"]
    assert encodes(driver.step()) == [("b", 5)]
    driver.run()


def test_a_failed_encode_ahead_ends_the_waiting_request() -> None:
    driver = drive(max_num_seqs=1)
    driver.add(text("runs", 4))
    driver.add(sequence("waits", (5, 8), [1]))
    driver.step(encode=False)
    driver.in_flight.clear()
    failed = driver.scheduler.on_embedding_failed(identity_of(5), MediaError("broken"))
    assert [seq.sequence_id for seq in failed] == ["waits"]


def test_a_late_failure_of_a_cancelled_encode_is_ignored() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 8), [1]))
    (start,) = driver.step(encode=False).encode
    driver.scheduler.abort("a")
    driver.add(sequence("b", (5, 8), [1]))
    plan = driver.step(encode=False)
    assert plan.evicted_embeds == (identity_of(5),)
    assert encodes(plan) == [("b", 5)]
    assert driver.scheduler.on_embedding_failed(start.identity, MediaError("late"), start.ticket) == []
    driver.encoded()
    driver.run()
    assert driver.sequences["b"].finish_reason == "length"


def test_the_last_abort_still_cancels_its_encode() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 8), [1]))
    driver.step(encode=False)
    driver.scheduler.abort("a")
    assert driver.scheduler.has_work
    assert driver.schedule().evicted_embeds == (identity_of(5),)
    assert not driver.scheduler.has_work


def test_an_encode_started_for_another_waiting_request_goes_on() -> None:
    driver = drive(max_num_seqs=1)
    driver.add(text("runs", 4, max_tokens=9))
    driver.add(sequence("first", (5, 8), [1]))
    driver.add(sequence("second", [9], (5, 8), [1]))
    assert encodes(driver.step(encode=False)) == [("first", 5)]
    driver.scheduler.abort("second")
    assert driver.step(encode=False).evicted_embeds == ()
    driver.scheduler.abort("first")
    assert driver.step(encode=False).evicted_embeds == (identity_of(5),)


def test_an_encode_that_others_hold_survives_its_requester() -> None:
    driver = drive()
    driver.add(sequence("a", (5, 8), [1]))
    driver.add(sequence("b", [9], (5, 8), [1]))
    driver.step(encode=False)
    driver.scheduler.abort("a")
    assert driver.step(encode=False).evicted_embeds == ()
    driver.encoded()
    assert shares(driver.step()) == {"b": 9}


# -- several choices ---------------------------------------------------------------------------------------------------
def choices(driver: Driver, count: int, **options: Any) -> None:
    for index in range(count):
        driver.add(text("r" if index == 0 else f"r#{index}", 9, index=index, **options))


def test_choices_wait_for_the_first_one_and_hit_its_prompt() -> None:
    driver = drive()
    choices(driver, 3)
    assert shares(driver.step()) == {"r": 9}
    assert shares(driver.step()) == {"r": 1, "r#1": 1, "r#2": 1}
    driver.run()
    assert sorted(seq.sequence_id for seq in driver.ended) == ["r", "r#1", "r#2"]


def test_choices_do_not_wait_without_a_prefix_cache() -> None:
    driver = drive(enable_prefix_caching=False)
    choices(driver, 2)
    assert shares(driver.step()) == {"r": 9, "r#1": 9}


def test_if_the_first_choice_leaves_the_next_one_takes_its_place() -> None:
    driver = drive(max_num_batched_tokens=4)
    choices(driver, 3)
    driver.step()
    driver.scheduler.abort("r")
    driver.scheduler.abort("r#2")
    driver.scheduler.check_integrity()
    assert list(shares(driver.step())) == ["r#1"]
    driver.run()
    assert [seq.sequence_id for seq in driver.ended] == ["r#1"]


# -- coming and going --------------------------------------------------------------------------------------------------
def test_an_abort_while_the_step_runs_frees_all_and_ignores_the_token() -> None:
    driver = drive()
    driver.add(text("a", 4))
    driver.schedule()
    aborted = driver.scheduler.abort("a")
    assert aborted is not None
    assert (aborted.status, aborted.finish_reason) == (SequenceStatus.ABORTED, "abort")
    assert driver.update() == []
    assert driver.scheduler.stats().blocks_used == 0
    assert driver.scheduler.abort("a") is None


def test_a_plan_that_was_never_run_is_made_again() -> None:
    driver = drive()
    driver.add(text("a", 4))
    first = driver.scheduler.schedule()
    assert shares(driver.step()) == shares(first) == {"a": 4}


def test_a_thousand_aborts_leave_nothing_behind() -> None:
    driver = drive(request_timeout_s=600.0)
    scheduler = driver.scheduler
    for number in range(3000):
        scheduler.add(sequence(f"r{number}", [1, 2], (number, 4), [3], arrival_s=1000.0))
        scheduler.schedule()
        scheduler.abort(f"r{number}")
    scheduler.schedule()
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert len(scheduler._deadlines) <= 1100
    assert len(scheduler._siblings) == 0


def test_deadlines_end_waiting_and_running_sequences() -> None:
    clock = Clock(0.0)
    driver = Driver(Scheduler(config(max_num_seqs=1), clock))
    driver.add(text("runs", 4, max_tokens=99, deadline_s=5.0))
    driver.add(text("waits", 4, deadline_s=4.0))
    driver.step()
    clock.now_s = 6.0
    driver.schedule()
    ended = driver.update()
    assert [seq.sequence_id for seq in ended] == ["waits", "runs"]
    assert all(isinstance(seq.error, DeadlineError) for seq in ended)
    assert driver.scheduler.stats().expired == 2


def test_a_request_without_a_deadline_gets_the_default() -> None:
    clock = Clock(0.0)
    driver = Driver(Scheduler(config(request_timeout_s=10.0), clock))
    assert driver.add(text("a", 4, arrival_s=3.0)).deadline_s == 13.0


def test_the_queue_has_a_time_limit_that_ends_with_the_first_step() -> None:
    clock = Clock(0.0)
    driver = Driver(Scheduler(config(max_num_seqs=1, max_queue_s=2.0), clock))
    driver.add(text("runs", 4, max_tokens=99))
    driver.add(text("waits", 4))
    driver.step()
    clock.now_s = 3.0
    driver.schedule()
    (ended,) = driver.update()
    assert ended.sequence_id == "waits"
    assert isinstance(ended.error, OverloadedError)
    assert ended.error.retry_after_s
    assert "waited 3.0 s" in ended.error.message


def test_tenants_share_the_seats() -> None:
    driver = drive(max_num_seqs=1, enable_prefix_caching=False)
    for number in range(8):
        driver.add(text(f"flood{number}", 4, namespace="flood", max_tokens=1))
    driver.add(text("small", 4, namespace="small", max_tokens=1))
    driver.run()
    assert [seq.sequence_id for seq in driver.ended].index("small") == 1


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_refusals_are_counted_by_budget() -> None:
    driver = drive(max_queued_requests=1)
    with pytest.raises(ContextLengthError):
        driver.scheduler.check_admission(request_of(text("a", 300)))
    driver.add(text("a", 4))
    with pytest.raises(OverloadedError):
        driver.scheduler.check_admission(request_of(text("b", 4)))
    with pytest.raises(OverloadedError):
        driver.scheduler.check_admission(request_of(text("b", 4, namespace="other")))
    driver.add(text("o", 4, namespace="other"))
    with pytest.raises(RateLimitError):
        driver.scheduler.check_admission(request_of(text("c", 4)))
    assert driver.scheduler.stats().denials == {("context", "rejected"): 1, ("queue", "rejected"): 3}


def test_what_can_never_run_is_not_queued_either() -> None:
    driver = drive(num_blocks=2)
    with pytest.raises(ContextLengthError):
        driver.add(text("a", 9))
    driver.add(text("b", 5))
    with pytest.raises(ValueError, match="in use"):
        driver.add(text("b", 5))
    driver.run()


def test_a_stall_is_noticed() -> None:
    """No known sequence of events leads there, so the books are cooked: an encode in flight is made to vanish."""
    clock = Clock(0.0)
    driver = Driver(Scheduler(config(), clock))
    driver.add(sequence("a", (5, 8), [1]))
    driver.step(encode=False)
    clock.now_s = 1.0
    driver.step(encode=False)
    clock.now_s = 7.5
    assert driver.scheduler.stats().stalled_s == 7.5
    assert driver.scheduler.stats().stalled_steps == 0, "an encode is in flight"
    entry = driver.scheduler._embeds.get(identity_of(5))
    assert entry is not None
    driver.scheduler._encodes.ready_end = lambda sequence: 0  # type: ignore[method-assign]
    entry.ready = True
    driver.schedule()
    assert driver.scheduler.stats().stalled_steps == 1
