"""What the autoscaler wants to know of an engine, from two snapshots of its scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.lm_engine.stats import SchedulerStats
from deployments.work_meter import CapacityEstimate


@dataclass(frozen=True, slots=True)
class EngineLoad:
    waiting_tokens: int
    """Tokens to compute before every waiting sequence has its next output."""
    prompt_tokens_per_s: float
    """Prompt tokens computed per second while sequences waited; 0 while unknown."""
    kv_use: float
    """Share of the KV blocks that live sequences hold."""
    seat_use: float
    """Share of `max_num_seqs` that runs."""


class EngineLoadMeter:
    """Args:
    max_num_seqs: Sequences that may run at once.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._prompt_rate = CapacityEstimate()
        self._last: tuple[SchedulerStats, float] | None = None

    def read(self, stats: SchedulerStats, now_s: float) -> EngineLoad:
        """The load at `now_s`, a clock that never runs backwards."""
        if self._last is not None:
            before, before_s = self._last
            # Without a line at both ends the engine may have been idle: the rate would be that of the arrivals.
            if before.waiting and stats.waiting and now_s > before_s:
                self._prompt_rate.add(max(0, _prompt_tokens(stats) - _prompt_tokens(before)), now_s - before_s)
        self._last = stats, now_s
        return EngineLoad(
            waiting_tokens=stats.waiting_tokens,
            prompt_tokens_per_s=self._prompt_rate.per_s,
            kv_use=stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0,
            seat_use=stats.running / self._max_num_seqs,
        )


def _prompt_tokens(stats: SchedulerStats) -> int:
    """Tokens scheduled that did not each yield one: prompts, recomputation after a preemption included."""
    return stats.scheduled_tokens - stats.generated_tokens
