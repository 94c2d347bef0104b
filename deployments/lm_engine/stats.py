"""Counters of the engine's host side as data; a shim turns them into metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Budget = Literal[
    "step_tokens",
    "encoder_slots",
    "encoder_patches",
    "embedding_slots",
    "kv_blocks",
    "sequences",
    "context",
    "queue",
]
Outcome = Literal["deferred", "rejected"]


class DenialCounter:
    """Every time a budget said no: `deferred` is tried again in a later step, `rejected` never is."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Budget, Outcome]] = Counter()

    def deferred(self, budget: Budget) -> None:
        self._counts[budget, "deferred"] += 1

    def rejected(self, budget: Budget) -> None:
        self._counts[budget, "rejected"] += 1

    def snapshot(self) -> dict[tuple[Budget, Outcome], int]:
        return dict(self._counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """One moment of a scheduler. Counts without another word are totals since the start and never fall."""

    running: int = 0
    """Sequences running now, those that wait for an embedding included."""
    waiting: int = 0
    """Sequences waiting now: queued, preempted, or for the first choice of their request."""
    waiting_tokens: int = 0
    """Tokens that waiting sequences must have computed before their next output, as far as no cache is known to
    hold them."""
    blocks_total: int = 0
    blocks_used: int = 0
    """KV blocks in use now."""
    blocks_cached: int = 0
    """KV blocks that can be found by key now, used or free."""
    slots_total: int = 0
    slots_held: int = 0
    """Embedding slots held by running sequences now."""
    slots_ahead: int = 0
    """Embedding slots of encodes in flight for waiting sequences now."""
    slots_idle: int = 0
    """Embedding slots resident now but held by nobody."""
    denials: Mapping[tuple[Budget, Outcome], int] = field(default_factory=dict)
    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    block_evictions: int = 0
    """Cached KV blocks handed out for other contents."""
    embed_evictions: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, once a sequence."""
    prefix_hit_tokens: int = 0
    embed_hits: int = 0
    """Items whose embedding was resident or on its way when first held."""
    encode_starts: int = 0
    expired: int = 0
    """Sequences ended by a deadline or the queue's time limit."""
    stalled_steps: int = 0
    """Steps with work queued, nothing scheduled and no encode in flight: each one is a fault of ours."""
    stalled_s: float = 0.0
    """For how long nothing has been scheduled though work is queued; encodes in flight or not."""
