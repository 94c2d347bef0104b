from __future__ import annotations

import pytest

from deployments.errors import (
    ContextLengthError,
    InvalidRequestError,
    MediaError,
    OverloadedError,
    RateLimitError,
    SightlineError,
)
from deployments.lm_engine.admission import QueueState, ServiceRate, check_admission, find_denial
from tests.unit.lm_engine.host_side import Part, config, request_of, sequence, text


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limits", "budget", "error", "words"),
    [
        ([[]], 1, {}, "context", InvalidRequestError, "no tokens"),
        ([[1] * 256], 1, {}, "context", ContextLengthError, "256 tokens but this model's context length is 256"),
        ([[1] * 250], 7, {}, "context", ContextLengthError, "max_tokens is 7, together 257"),
        ([[1]], 0, {}, "context", InvalidRequestError, "max_tokens must be at least 1; it is 0"),
        ([[1] * 9], 9, {"num_blocks": 4}, "kv_blocks", ContextLengthError, "need 5 KV blocks .* has 4"),
        ([(5, 33), [1]], 1, {}, "encoder_slots", MediaError, "image takes 33 tokens .* at most 32"),
        ([(5, 9)], 1, {"encoder_cache_slots": 8}, "embedding_slots", MediaError, "takes 9 tokens .* at most 8"),
        ([(5, 9)], 1, {"max_encoder_patches_per_step": 35}, "encoder_patches", MediaError, "36 patches .* at most 35"),
        (
            [(5, 9)],
            1,
            {"max_num_batched_tokens": 8, "disable_chunked_mm_input": True},
            "step_tokens",
            MediaError,
            "must not split it, has at most 8",
        ),
    ],
)
def test_what_never_fits_is_refused_with_limit_and_value(
    prompt: list[Part],
    max_tokens: int,
    limits: dict[str, int],
    budget: str,
    error: type[SightlineError],
    words: str,
) -> None:
    request = request_of(sequence("a", *prompt, max_tokens=max_tokens))
    denial = find_denial(request, config(**limits))
    assert denial is not None
    assert denial.budget == budget
    assert denial.error.status == 400
    assert denial.error.param
    with pytest.raises(error, match=words):
        check_admission(request, config(**limits))


def test_the_last_token_needs_no_place() -> None:
    """8 prompt tokens and 9 of output: the last one is sampled from position 15, so 16 positions do."""
    request = request_of(text("a", 8, max_tokens=9))
    assert find_denial(request, config(num_blocks=4)) is None
    assert find_denial(request_of(text("a", 8, max_tokens=10)), config(num_blocks=4)) is not None


def test_the_whole_context_may_be_used() -> None:
    assert find_denial(request_of(text("a", 250, max_tokens=6)), config()) is None


def test_a_bad_item_is_named() -> None:
    denial = find_denial(request_of(sequence("a", (3, 4), (5, 33))), config())
    assert denial is not None
    assert (denial.error.param, denial.error.code) == ("messages[0].content[5].image_url", "image_too_large")


REQUEST = request_of(text("a", 4))


def test_a_full_queue_names_the_time_to_come_back() -> None:
    limits = config(max_queued_requests=10)
    assert find_denial(REQUEST, limits, QueueState(num_waiting=9)) is None
    denial = find_denial(REQUEST, limits, QueueState(num_waiting=30, served_per_s=4.0))
    assert denial is not None
    assert isinstance(denial.error, OverloadedError)
    assert denial.error.retry_after_s == 6.0, "21 too many at 4 a second"


def test_who_fills_more_than_a_fair_share_of_a_full_queue_is_told_so() -> None:
    limits = config(max_queued_requests=10)
    greedy = find_denial(REQUEST, limits, QueueState(num_waiting=10, num_waiting_of_tenant=8, num_tenants=2))
    modest = find_denial(REQUEST, limits, QueueState(num_waiting=10, num_waiting_of_tenant=2, num_tenants=2))
    assert greedy is not None
    assert modest is not None
    assert isinstance(greedy.error, RateLimitError)
    assert isinstance(modest.error, OverloadedError)


def test_a_request_larger_than_the_queue_is_served_by_an_idle_engine() -> None:
    assert find_denial(request_of(text("a", 4), n=20), config(max_queued_requests=10), QueueState()) is None


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    limits = config(max_queue_s=5.0)
    assert find_denial(REQUEST, limits, QueueState(num_waiting=20, served_per_s=4.0)) is None
    denial = find_denial(REQUEST, limits, QueueState(num_waiting=48, served_per_s=4.0))
    assert denial is not None
    assert "wait about 12 s now" in denial.error.message
    assert denial.error.retry_after_s == 7.0
    assert find_denial(REQUEST, limits, QueueState(num_waiting=48)) is None, "nothing is known of the rate yet"


def test_the_service_rate_follows_what_happens() -> None:
    rate = ServiceRate(horizon_s=10.0)
    assert rate.per_s(0.0) == 0.0
    for step in range(100):
        rate.record(step * 0.1)
    assert rate.per_s(10.0) == pytest.approx(10.0, rel=0.05)
    for step in range(100, 700):
        rate.record(step * 0.1, events=2)
    assert rate.per_s(70.0) == pytest.approx(20.0, rel=0.05)
    assert rate.per_s(200.0) < 0.01
