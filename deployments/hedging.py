"""A second call for what takes too long: hedged requests (Dean & Barroso, "The Tail at Scale", CACM 56(2), 2013).

    call ──── patience ────▶ no answer: the same call to another replica ──▶ the first good answer wins,
              (Patience)            if the budget has one left (HedgeBudget)        the other call is cancelled

Patience follows what calls have taken of late, so that only outliers are called twice; the budget keeps a deployment
that is slow as a whole from getting more to do. Knows no RPC framework.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

T = TypeVar("T")

Outcome = Literal["won", "lost", "failed", "cancelled", "over_budget"]
"""Of a second call: it answered first, or second; it failed; nobody wanted an answer any more; it was not made."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

OVERHEAD_PATCHES = 1024
"""What a call takes beside its patches, as a number of patches: about what an encoder computes while a call and its
payload travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgingConfig:
    """When an encoder call is made a second time, to another replica. With a single one it joins the first call there,
    which costs that replica nothing."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    enabled: bool = True
    """Whether calls are ever made twice."""
    quantile: float = 0.95
    """Of recent encodes, each taken relative to its patches: the base of patience."""
    factor: float = 3.0
    """Patience as a multiple of that quantile."""
    min_s: float = 0.25
    """Least patience."""
    initial_s: float = 10.0
    """Patience while fewer than `min_samples` encodes have been seen."""
    min_samples: int = 20
    """Encodes from which patience is derived."""
    max_share: float = 0.05
    """Most second calls, as a share of all calls, in the long run."""
    burst: int = 16
    """Second calls beyond that share that a quiet time saves up: enough for the router to notice a replica that hangs
    by the calls that pile up there."""

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ValueError(f"hedging.quantile is {self.quantile}; it must be above 0 and at most 1")
        if self.factor < 1:
            raise ValueError(f"hedging.factor is {self.factor}; it must be at least 1")
        for name in ("min_s", "initial_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"hedging.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("min_samples", "burst"):
            if getattr(self, name) < 1:
                raise ValueError(f"hedging.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.max_share <= 1:
            raise ValueError(f"hedging.max_share is {self.max_share}; it must be between 0 and 1")


class Patience:
    """How long a call may take before it counts as an outlier.

    Each sample is taken per patch, with a constant number of patches for what every call takes, so that one quantile
    serves small and large items alike, and a larger item is never given less time than a smaller one.

    Args:
        window: Samples remembered.
    """

    def __init__(self, config: HedgingConfig, *, window: int = 512) -> None:
        self._config = config
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = max(window, config.min_samples)

    def observe(self, num_patches: int, seconds: float) -> None:
        """A call has been answered after so long."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        rate = seconds / (num_patches + OVERHEAD_PATCHES)
        self._recent.append(rate)
        insort(self._sorted, rate)

    def seconds(self, num_patches: int) -> float:
        """For a call with so many patches."""
        config = self._config
        if len(self._sorted) < config.min_samples:
            return max(config.min_s, config.initial_s)
        rank = min(int(config.quantile * len(self._sorted)), len(self._sorted) - 1)
        return max(config.min_s, config.factor * self._sorted[rank] * (num_patches + OVERHEAD_PATCHES))


class HedgeBudget:
    """A token bucket that calls fill: n of them allow at most `max_share * n + burst` second ones, in any order."""

    def __init__(self, max_share: float, burst: int) -> None:
        self._share, self._burst = max_share, burst
        self._tokens = float(burst)

    def note_call(self) -> None:
        self._tokens = min(self._burst, self._tokens + self._share)

    def take(self) -> bool:
        """Whether one more second call may be made; takes it if so."""
        # Shares such as 0.05 are not exact in binary: twenty of them shall be one.
        if self._tokens < 1 - 1e-9:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    value: T
    is_typical: bool = True
    """Whether the time it took says anything of the next call's; a cache hit's does not."""


Call = Callable[[], Coroutine[Any, Any, Answer[T]]]


class Hedger:
    """Makes calls, a second time where the first takes too long. Belongs to one event loop.

    Args:
        is_final: Whether an error stands whatever another replica would say.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        config: HedgingConfig,
        *,
        is_final: Callable[[BaseException], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled, self._is_final, self._clock = config.enabled, is_final, clock
        self._patience = Patience(config)
        self._budget = HedgeBudget(config.max_share, config.burst)
        self._losers: set[asyncio.Task[Any]] = set()
        self.outcomes: Counter[Outcome] = Counter()

    async def run(self, num_patches: int, first: Call[T], second: Call[T]) -> T:
        """The first good answer of one or two calls; the other one is cancelled.

        Raises:
            What the calls raised, once there is none left that could still answer.
        """
        self._budget.note_call()
        running = {self._start(first): self._clock()}
        hedge: asyncio.Task[Answer[T]] | None = None
        was_denied = False
        try:
            while True:
                timeout_s = self._patience.seconds(num_patches) if self._enabled and hedge is None else None
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    began_s, error = running.pop(task), task.exception()
                    if error is None:
                        answer = task.result()
                        if answer.is_typical:
                            self._patience.observe(num_patches, self._clock() - began_s)
                        if hedge is not None:
                            self.outcomes["won" if task is hedge else "lost"] += 1
                            hedge = None
                        return answer.value
                    if task is hedge:
                        self.outcomes["failed"] += 1
                        hedge = None
                    if not running or self._is_final(error):
                        raise error
                if done or hedge is not None:
                    continue
                if self._budget.take():
                    hedge = self._start(second)
                    running[hedge] = self._clock()
                elif not was_denied:
                    was_denied = True
                    self.outcomes["over_budget"] += 1
        finally:
            if hedge is not None:
                self.outcomes["cancelled"] += 1
            for task in running:
                self._cancel(task)

    def _start(self, call: Call[T]) -> asyncio.Task[Answer[T]]:
        return asyncio.get_running_loop().create_task(call())

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        """Held until it has ended, since the event loop does not hold tasks; what it raises is nobody's business."""
        self._losers.add(task)
        task.add_done_callback(self._forget)
        task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._losers.discard(task)
        if not task.cancelled():
            task.exception()
