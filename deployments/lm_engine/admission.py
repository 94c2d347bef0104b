"""Says whether a request can ever be served, and whether there is room for it now. Pure: changes nothing.

What can never fit is the caller's error and names the limit and the value; what does not fit now is refused with the
time after which a retry makes sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.errors import (
    ContextLengthError,
    InvalidRequestError,
    MediaError,
    OverloadedError,
    RateLimitError,
    SightlineError,
)
from deployments.lm_engine.config import SchedulerConfig
from deployments.lm_engine.stats import Budget
from deployments.messages import GenerateRequest, MediaItem

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The waiting line as one request finds it."""

    num_waiting: int = 0
    num_waiting_of_tenant: int = 0
    num_tenants: int = 0
    """Tenants with waiting sequences, this one not counted unless it has some."""
    served_per_s: float = 0.0
    """Measured rate at which sequences leave the line; 0 if not known."""


@dataclass(frozen=True, slots=True)
class Denial:
    """A request that is not admitted: which budget said no, and what the caller is told."""

    budget: Budget
    error: SightlineError


def check_admission(request: GenerateRequest, limits: SchedulerConfig, queue: QueueState | None = None) -> None:
    """Raise the error of `find_denial`, if any."""
    denial = find_denial(request, limits, queue)
    if denial is not None:
        raise denial.error


def find_denial(request: GenerateRequest, limits: SchedulerConfig, queue: QueueState | None = None) -> Denial | None:
    """Why `request` is not admitted; None if it is.

    Errors: ContextLengthError and InvalidRequestError for what never fits, RateLimitError for a tenant that fills more
    than its share of a full queue, OverloadedError for all others then.
    """
    denial = find_misfit(len(request.prompt_token_ids), request.sampling.max_tokens, request.items, limits)
    return denial or (_queue_denial(request, limits, queue) if queue is not None else None)


def find_misfit(
    prompt_tokens: int, max_tokens: int, items: Iterable[MediaItem], limits: SchedulerConfig
) -> Denial | None:
    """Why a sequence could never run to its end, even alone; None if it can."""
    denial = _context_denial(prompt_tokens, max_tokens, limits)
    for item in items:
        denial = denial or _item_denial(item, limits)
    return denial


def _context_denial(prompt_tokens: int, max_tokens: int, limits: SchedulerConfig) -> Denial | None:
    if prompt_tokens == 0:
        return Denial("context", InvalidRequestError("the prompt has no tokens", param="messages"))
    if prompt_tokens >= limits.max_model_len:
        message = (
            f"the prompt has {prompt_tokens} tokens but this model's context length is {limits.max_model_len} tokens, "
            f"of which at least one is for the output"
        )
        return Denial("context", ContextLengthError(message, param="messages"))
    if max_tokens < 1:
        message = f"max_tokens must be at least 1; it is {max_tokens}"
        return Denial("context", InvalidRequestError(message, param="max_tokens"))
    if prompt_tokens + max_tokens > limits.max_model_len:
        message = (
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{prompt_tokens + max_tokens}, but this model's context length is {limits.max_model_len} tokens"
        )
        return Denial("context", ContextLengthError(message, param="max_tokens"))
    # The last token's KV is never needed, since nothing follows it.
    num_blocks = -(-(prompt_tokens + max_tokens - 1) // limits.block_size)
    if num_blocks > limits.num_blocks:
        message = (
            f"the prompt's {prompt_tokens} tokens and max_tokens {max_tokens} need {num_blocks} KV blocks of "
            f"{limits.block_size} tokens but the server has {limits.num_blocks}"
        )
        return Denial("kv_blocks", ContextLengthError(message, param="max_tokens"))
    return None


def _item_denial(item: MediaItem, limits: SchedulerConfig) -> Denial | None:
    checks: tuple[tuple[Budget, str, int, int], ...] = (
        ("encoder_slots", "tokens", item.num_slots, limits.max_encoder_slots_per_step),
        ("embedding_slots", "tokens", item.num_slots, limits.encoder_cache_slots),
        ("encoder_patches", "patches", item.num_patches, limits.max_encoder_patches_per_step),
    )
    for budget, unit, value, limit in checks:
        if value > limit:
            message = f"the {item.modality} takes {value} {unit} but the server allows at most {limit}"
            return Denial(budget, MediaError(message, code=f"{item.modality}_too_large", param=item.param or None))
    if limits.disable_chunked_mm_input and item.num_slots > limits.max_num_batched_tokens:
        message = (
            f"the {item.modality} takes {item.num_slots} tokens but a step, which must not split it, "
            f"has at most {limits.max_num_batched_tokens}"
        )
        error = MediaError(message, code=f"{item.modality}_too_large", param=item.param or None)
        return Denial("step_tokens", error)
    return None


def _queue_denial(request: GenerateRequest, limits: SchedulerConfig, queue: QueueState) -> Denial | None:
    count = queue.num_waiting + request.sampling.n
    limit = limits.max_queued_requests
    if limit and queue.num_waiting and count > limit:
        retry_s = retry_after_s(count - limit, queue.served_per_s)
        tenants = queue.num_tenants + (queue.num_waiting_of_tenant == 0)
        if tenants > 1 and queue.num_waiting_of_tenant >= limit / tenants:
            message = f"{queue.num_waiting_of_tenant} of your requests are waiting already; the queue holds {limit}"
            return Denial("queue", RateLimitError(message, retry_after_s=retry_s))
        message = f"{queue.num_waiting} requests are waiting; the queue holds {limit}"
        return Denial("queue", OverloadedError(message, retry_after_s=retry_s))
    if limits.max_queue_s and queue.served_per_s > 0:
        wait_s = queue.num_waiting / queue.served_per_s
        if wait_s > limits.max_queue_s:
            message = (
                f"requests wait about {wait_s:.0f} s now; the server lets none wait above {limits.max_queue_s:g} s"
            )
            surplus = queue.num_waiting - limits.max_queue_s * queue.served_per_s
            return Denial("queue", OverloadedError(message, retry_after_s=retry_after_s(surplus, queue.served_per_s)))
    return None


def retry_after_s(num_sequences: float, served_per_s: float) -> float:
    """Whole seconds until `num_sequences` have left the line, within [MIN_RETRY_S, MAX_RETRY_S]."""
    if served_per_s <= 0:
        return MIN_RETRY_S
    return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(num_sequences / served_per_s))))


class ServiceRate:
    """Rate of events over the recent past, as an exponentially fading count.

    Args:
        horizon_s: Age at which an event counts 1/e of a new one.
    """

    def __init__(self, horizon_s: float = 10.0) -> None:
        self._horizon_s = horizon_s
        self._count = 0.0
        self._since_s: float | None = None
        self._last_s = 0.0

    def record(self, now_s: float, events: int = 1) -> None:
        if self._since_s is None:
            self._since_s = self._last_s = now_s
        self._count = self._faded(now_s) + events
        self._last_s = max(self._last_s, now_s)

    def per_s(self, now_s: float) -> float:
        """Events a second; 0 until the first second has passed."""
        if self._since_s is None or now_s - self._since_s < 1.0:
            return 0.0
        # A count that began `age` ago has only seen this part of what the horizon would hold.
        seen = 1.0 - math.exp(-(now_s - self._since_s) / self._horizon_s)
        return self._faded(now_s) / (self._horizon_s * seen)

    def _faded(self, now_s: float) -> float:
        return self._count * math.exp(-max(0.0, now_s - self._last_s) / self._horizon_s)
