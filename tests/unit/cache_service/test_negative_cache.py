import pytest

from cache_service.negative_cache import NegativeCache, NegativeResult

BAD = NegativeResult("invalid_image", "the data is no picture")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_verdict_is_remembered_for_its_time_within_its_namespace() -> None:
    clock = Clock()
    cache = NegativeCache(ttl_s=30, clock=clock)
    assert cache.put("a", b"k", BAD)
    assert cache.get("a", b"k") == BAD
    assert cache.get("b", b"k") is None
    clock.now = 29.9
    assert cache.get("a", b"k") == BAD
    clock.now = 30
    assert cache.get("a", b"k") is None
    assert cache.stats().entries == 0
    assert (cache.stats().hits, cache.stats().misses) == (2, 2)


def test_forget_and_replace() -> None:
    cache = NegativeCache()
    cache.put("a", b"k", BAD)
    cache.put("a", b"k", NegativeResult("other", "x"))
    found = cache.get("a", b"k")
    assert found is not None
    assert found.code == "other"
    cache.forget("a", b"k")
    cache.forget("a", b"k")
    assert cache.get("a", b"k") is None


def test_it_is_bounded() -> None:
    cache = NegativeCache(10_000)
    for number in range(1000):
        cache.put("a", b"%d" % number, BAD)
    assert cache.stats().bytes <= 10_000
    assert cache.get("a", b"999") == BAD


def test_zero_ttl_remembers_nothing() -> None:
    cache = NegativeCache(ttl_s=0)
    assert not cache.put("a", b"k", BAD)
    assert cache.get("a", b"k") is None
    with pytest.raises(ValueError):
        NegativeCache(ttl_s=-1)
