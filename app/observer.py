"""What one request went through, as data, and who is told about it. Metrics and logs are made from this elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deployments.messages import DeltaBatch, GenerationStats


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request, all choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0

    def add(self, stats: GenerationStats) -> None:
        """Count one sequence. The prompt is shared by the choices of a request and counts once."""
        self.prompt_tokens = max(self.prompt_tokens, stats.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, stats.cached_tokens)
        self.image_tokens = max(self.image_tokens, stats.image_tokens)
        self.completion_tokens += stats.completion_tokens


class RequestObserver(Protocol):
    """Calls are made on the event loop and must not block."""

    def started(self, endpoint: str) -> None:
        """A request to an API endpoint has arrived."""

    def first_token(self, endpoint: str, seconds: float) -> None:
        """Seconds from arrival to the first delta."""

    def token_gap(self, endpoint: str, seconds: float, num_tokens: int) -> None:
        """Seconds between two deltas of one request; the later one held `num_tokens` tokens over all choices."""

    def finished(
        self,
        endpoint: str,
        status: int,
        seconds: float,
        stage_seconds: Mapping[str, float],
        usage: Usage,
        tenant: str = "",
    ) -> None:
        """The request is over, whatever the outcome; 499 if the client left. `tenant` is "" before anybody is known."""


class NullObserver:
    def started(self, endpoint: str) -> None: ...

    def first_token(self, endpoint: str, seconds: float) -> None: ...

    def token_gap(self, endpoint: str, seconds: float, num_tokens: int) -> None: ...

    def finished(
        self,
        endpoint: str,
        status: int,
        seconds: float,
        stage_seconds: Mapping[str, float],
        usage: Usage,
        tenant: str = "",
    ) -> None: ...


@dataclass(slots=True)
class RequestTrace:
    """Filled by the pipeline and the ingress while a request runs; read once, when it ends."""

    observer: RequestObserver
    request_id: str
    endpoint: str = "other"
    """A route of ours, or `other`: bounded, so that it may label metrics."""
    tenant: str = ""
    context: Mapping[str, str] = field(default_factory=dict)
    """Travels with the request through the stages; see deployments/tracing.py."""
    clock: Callable[[], float] = time.perf_counter
    arrived_s: float = 0.0
    status: int = 0
    error_code: str | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    cache_results: dict[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    attempts: int = 0
    stream: bool = False
    num_media: int = 0
    wants_timings: bool = False
    """Whether the caller asked for stage times and cache results in the answer."""
    _engine_began_s: float | None = None
    _first_delta_s: float | None = None
    _last_delta_s: float | None = None

    def __post_init__(self) -> None:
        self.arrived_s = self.clock()

    def begin(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.observer.started(endpoint)

    def fork(self) -> RequestTrace:
        """A trace for one of several generations of this request; nobody is told about it before `join`."""
        part = RequestTrace(NullObserver(), self.request_id, self.endpoint, self.tenant, self.context, self.clock)
        part.arrived_s = self.arrived_s
        return part

    def join(self, parts: Sequence[RequestTrace]) -> None:
        """Token counts add up; of a stage that ran side by side the longest time counts."""
        for part in parts:
            part.close_stages()
            self.attempts = max(self.attempts, part.attempts)
            self.usage.prompt_tokens += part.usage.prompt_tokens
            self.usage.completion_tokens += part.usage.completion_tokens
            self.usage.cached_tokens += part.usage.cached_tokens
            self.usage.image_tokens += part.usage.image_tokens
            for stage, seconds in part.stage_seconds.items():
                self.stage_seconds[stage] = max(seconds, self.stage_seconds.get(stage, 0.0))
            for lookup, count in part.cache_results.items():
                self.cache_results[lookup] = self.cache_results.get(lookup, 0) + count

    def add_stages(self, seconds: Mapping[str, float]) -> None:
        for stage, value in seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + value

    def add_window(self, began_s: float, parts: Mapping[str, float], rest: str) -> None:
        """Share out the time from `began_s` until now: to its parts, and what they don't explain to the stage `rest`.

        Parts that ran side by side and sum up to more than passed are scaled down to it, so that stages add up to the
        request's time.
        """
        self._share(self.clock() - began_s, parts, rest)

    def enter_engine(self) -> None:
        """From here on the time until the first delta is the engine's and the way there and back."""
        self._engine_began_s = self.clock()

    def timings(self) -> dict[str, object]:
        """Stage times so far and cache results, as the answer shows them to who asked."""
        self._close_generation()
        stages = {stage: round(seconds, 6) for stage, seconds in self.stage_seconds.items()}
        return {"stage_seconds": stages, "cache_results": dict(self.cache_results)}

    def close_stages(self) -> None:
        """Count the time until now to the stage at work. Idempotent but for the time."""
        self._close_generation()
        if self._engine_began_s is not None and self._first_delta_s is None:
            self.add_window(self._engine_began_s, {}, "transfer")  # It ended without an answer.
            self._engine_began_s = None

    def _close_generation(self) -> None:
        if self._first_delta_s is not None:
            self.stage_seconds["generation"] = self.clock() - self._first_delta_s

    def _share(self, passed_s: float, parts: Mapping[str, float], rest: str) -> None:
        explained_s = sum(parts.values())
        scale = min(1.0, passed_s / explained_s) if explained_s > 0 else 0.0
        self.add_stages({stage: seconds * scale for stage, seconds in parts.items()})
        self.add_stages({rest: max(0.0, passed_s - explained_s)})

    def on_deltas(self, deltas: DeltaBatch) -> None:
        now = self.clock()
        if self._last_delta_s is None:
            self._first_delta_s = now
            self.observer.first_token(self.endpoint, now - self.arrived_s)
        else:
            num_tokens = sum(len(delta.token_ids) for delta in deltas)
            self.observer.token_gap(self.endpoint, now - self._last_delta_s, num_tokens)
        self._last_delta_s = now
        slowest: dict[str, float] = {}
        for delta in deltas:
            if delta.stats is not None:
                self.usage.add(delta.stats)
                for stage, seconds in delta.stats.stage_seconds.items():
                    slowest[stage] = max(seconds, slowest.get(stage, 0.0))
        slowest.pop("generation", None)  # Measured here, with the way of the deltas and their writing.
        if slowest and self._engine_began_s is not None and self._first_delta_s is not None:
            self._share(self._first_delta_s - self._engine_began_s, slowest, "transfer")
            self._engine_began_s = None

    def end(self) -> None:
        self.close_stages()
        if self.endpoint != "other":
            self.observer.finished(
                self.endpoint, self.status, self.clock() - self.arrived_s, self.stage_seconds, self.usage, self.tenant
            )
