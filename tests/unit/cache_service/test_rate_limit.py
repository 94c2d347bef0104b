import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.rate_limit import Denial, RateLimiter, TokenBucket
from cache_service.tenants import Tenant, TenantLimits


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    st.floats(0.1, 100),
    st.floats(1, 50),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=40),
)
def test_never_more_than_burst_plus_rate(rate: float, burst: float, steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock=clock)
    taken = 0.0
    for wait_s, tokens in steps:
        clock.now += wait_s
        retry_s = bucket.try_take(tokens)
        if retry_s == 0:
            taken += tokens
        assert taken <= burst + rate * clock.now + 1e-6
        if 0 < retry_s < math.inf:  # what it says is true: then, and not before
            assert retry_s == pytest.approx((tokens - bucket.tokens) / rate)
            clock.now += retry_s + 1e-6
            assert bucket.try_take(tokens) == 0
            taken += tokens


def test_more_than_the_burst_never_fits() -> None:
    assert TokenBucket(1, 2, clock=Clock()).try_take(3) == math.inf


def test_a_clock_that_steps_back_gives_nothing() -> None:
    clock = Clock()
    bucket = TokenBucket(1, 1, clock=clock)
    assert bucket.try_take() == 0
    clock.now -= 100
    assert bucket.try_take() > 0


def test_rate_and_burst_of_a_tenant() -> None:
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    tenant = Tenant(name="a", limits=TenantLimits(requests_per_minute=60, burst_requests=2))
    for _ in range(2):
        assert limiter.admit(tenant).admitted
    denied = limiter.admit(tenant)
    assert (denied.denied, denied.limit, denied.retry_after_s) == (Denial.RATE, 60, pytest.approx(1.0))
    assert limiter.admit(Tenant(name="b", limits=tenant.limits)).admitted
    clock.now += 1
    assert limiter.admit(tenant).admitted
    assert limiter.stats.denied_by_rate == 1


def test_concurrency_is_given_back_and_a_denial_takes_no_token() -> None:
    limiter = RateLimiter(clock=Clock())
    tenant = Tenant(name="a", limits=TenantLimits(max_concurrent_requests=1, requests_per_minute=60, burst_requests=2))
    assert limiter.admit(tenant).admitted
    assert limiter.admit(tenant).denied is Denial.CONCURRENCY
    limiter.release(tenant)
    assert limiter.running(tenant) == 0
    assert limiter.admit(tenant).admitted
    assert limiter.stats.denied_by_concurrency == 1


def test_release_without_admit_is_refused() -> None:
    with pytest.raises(ValueError, match="without a matching admit"):
        RateLimiter().release(Tenant(name="a"))


def test_tenants_are_counted_apart() -> None:
    limiter = RateLimiter(clock=Clock())
    tenants = [Tenant(name=f"t{number}", limits=TenantLimits(max_concurrent_requests=1)) for number in range(3)]
    for tenant in tenants:
        assert limiter.admit(tenant).admitted
        assert limiter.admit(tenant).denied is Denial.CONCURRENCY
    for tenant in tenants:
        limiter.release(tenant)
        assert limiter.running(tenant) == 0
