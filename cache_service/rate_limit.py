"""How often a tenant may call, and how many calls it may have at once. Pure: the clock is injected.

The token bucket is the classic one (a bucket fills at a rate up to a burst, a call takes a token), computed on demand
and so without timers. One process counts alone: with several ingress replicas each enforces the limit on its share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from cache_service.tenants import Tenant


class TokenBucket:
    """Args:
    rate_per_s: Tokens added each second.
    burst: Most tokens the bucket holds; it starts full.
    clock: Monotonic seconds.
    """

    def __init__(self, rate_per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not (math.isfinite(rate_per_s) and rate_per_s > 0 and math.isfinite(burst) and burst >= 1):
            raise ValueError(f"rate_per_s must be above 0 and burst 1 or more: {rate_per_s = }, {burst = }")
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._updated_s = clock()

    def try_take(self, tokens: float = 1.0) -> float:
        """Take `tokens` and return 0.0; or take none and return the seconds after which they will be there.

        More than the burst never fits: the answer is then infinity.
        """
        self._refill()
        if tokens <= self._tokens:
            self._tokens -= tokens
            return 0.0
        return math.inf if tokens > self._burst else (tokens - self._tokens) / self._rate_per_s

    @property
    def tokens(self) -> float:
        self._refill()
        return self._tokens

    def _refill(self) -> None:
        now = self._clock()
        elapsed_s = max(0.0, now - self._updated_s)
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s)
        self._updated_s = now


class Denial(Enum):
    RATE = "requests_per_minute"
    CONCURRENCY = "max_concurrent_requests"


@dataclass(frozen=True, slots=True)
class Admission:
    denied: Denial | None = None
    limit: float = 0.0
    """The limit that was met, in its own unit."""
    retry_after_s: float = 0.0
    """When to try again; 0 if admitted. For concurrency it is a guess: nobody knows when a call ends."""

    @property
    def admitted(self) -> bool:
        return self.denied is None


@dataclass(slots=True)
class RateLimiterStats:
    admitted: int = 0
    denied_by_rate: int = 0
    denied_by_concurrency: int = 0


@dataclass(slots=True)
class _Usage:
    bucket: TokenBucket | None
    running: int = 0


class RateLimiter:
    """Admits calls by tenant. Every admitted call is ended with `release`.

    Keeps one small entry per tenant name seen, which are as many as the operator has written down.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}
        self.stats = RateLimiterStats()

    def admit(self, tenant: Tenant) -> Admission:
        """Count one call in, unless a limit forbids it. A denied call takes nothing."""
        limits = tenant.limits
        usage = self._usage_of(tenant)
        if limits.max_concurrent_requests is not None and usage.running >= limits.max_concurrent_requests:
            self.stats.denied_by_concurrency += 1
            return Admission(Denial.CONCURRENCY, limits.max_concurrent_requests, retry_after_s=1.0)
        if usage.bucket is not None:
            wait_s = usage.bucket.try_take()
            if wait_s > 0:
                self.stats.denied_by_rate += 1
                return Admission(Denial.RATE, limits.requests_per_minute or 0.0, retry_after_s=wait_s)
        usage.running += 1
        self.stats.admitted += 1
        return Admission()

    def release(self, tenant: Tenant) -> None:
        """End one admitted call."""
        usage = self._usage.get(tenant.name)
        if usage is None or usage.running == 0:
            raise ValueError("release without a matching admit")
        usage.running -= 1

    def running(self, tenant: Tenant) -> int:
        usage = self._usage.get(tenant.name)
        return 0 if usage is None else usage.running

    def _usage_of(self, tenant: Tenant) -> _Usage:
        usage = self._usage.get(tenant.name)
        if usage is None:
            usage = self._usage[tenant.name] = _Usage(self._new_bucket(tenant))
        return usage

    def _new_bucket(self, tenant: Tenant) -> TokenBucket | None:
        per_minute = tenant.limits.requests_per_minute
        if per_minute is None:
            return None
        burst = tenant.limits.burst_requests or max(1.0, per_minute / 60.0)
        return TokenBucket(per_minute / 60.0, burst, clock=self._clock)
