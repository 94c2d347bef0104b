"""What the engine observed, as data; a shim turns it into metrics. Filled by the engine thread, read by any other."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.lm_engine.stats import SchedulerStats

_MAX_OBSERVATIONS = 65_536
"""Observations kept between two reads; older ones are dropped, so that an unread engine does not grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts are totals since the start; observations are those since the last read."""

    scheduler: SchedulerStats
    prompt_tokens_computed: int = 0
    """Prompt tokens of sequences with a first token that were computed; recomputing after preemption not counted."""
    prompt_tokens_cached: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    generated_tokens: int = 0
    steps: int = 0
    step_faults: int = 0
    """Steps that raised: faults of ours."""
    encode_retries: int = 0
    embed_bytes: int = 0
    """Bytes of embeddings resident on the device now."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Sequences ended, by finish reason."""
    time_to_first_token_s: tuple[float, ...] = ()
    inter_token_s: tuple[float, ...] = ()
    stage_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Per ended sequence: queue, encode, prefill, generation."""


class EngineCounters:
    """The live side of EngineStats."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._first_token_s: deque[float] = deque(maxlen=_MAX_OBSERVATIONS)
        self._inter_token_s: deque[float] = deque(maxlen=_MAX_OBSERVATIONS)
        self._stages: dict[str, deque[float]] = {}
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.generated_tokens = 0
        self.steps = 0
        self.step_faults = 0
        self.encode_retries = 0

    def observe_first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_token_s.append(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        with self._lock:
            self._inter_token_s.append(seconds)

    def observe_end(self, finish_reason: str, stage_seconds: Mapping[str, float]) -> None:
        with self._lock:
            self._finished[finish_reason] += 1
            for stage, seconds in stage_seconds.items():
                self._stages.setdefault(stage, deque(maxlen=_MAX_OBSERVATIONS)).append(seconds)

    def take(self, scheduler: SchedulerStats, embed_bytes: int) -> EngineStats:
        """The totals, and the observations since the last call."""
        with self._lock:
            first, self._first_token_s = self._first_token_s, deque(maxlen=_MAX_OBSERVATIONS)
            inter, self._inter_token_s = self._inter_token_s, deque(maxlen=_MAX_OBSERVATIONS)
            stages, self._stages = self._stages, {}
            finished = dict(self._finished)
        return EngineStats(
            scheduler=scheduler,
            prompt_tokens_computed=self.prompt_tokens_computed,
            prompt_tokens_cached=self.prompt_tokens_cached,
            generated_tokens=self.generated_tokens,
            steps=self.steps,
            step_faults=self.step_faults,
            encode_retries=self.encode_retries,
            embed_bytes=embed_bytes,
            finished=finished,
            time_to_first_token_s=tuple(first),
            inter_token_s=tuple(inter),
            stage_seconds={stage: tuple(values) for stage, values in stages.items()},
        )
