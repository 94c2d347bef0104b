"""What a load run asks for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.load.workload import NAMED, Popularity, Size, SizeMix, Workload, parse_counts, shard


def test_sizes_with_and_without_shares() -> None:
    assert SizeMix.parse("1024x768") == SizeMix((Size(1024, 768),), (1.0,))
    assert SizeMix.parse("224, 336x336").sizes == (Size(224, 224), Size(336, 336))
    mix = SizeMix.parse("224x224:0.3,336x336:0.3,1024x1024:0.1")
    assert mix.shares == (0.3, 0.3, 0.1)
    assert str(mix) == "224x224:0.3,336x336:0.3,1024x1024:0.1"


@pytest.mark.parametrize(
    "text", ["", "x", "0x5", "-3", "1024xx1024", "224x224:0.5,336x336", "224x224:much", "224x224:-1", "224x224:0"]
)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        SizeMix.parse(text)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_mix_is_read_back_as_written(entries: list[tuple[int, int, int]]) -> None:
    mix = SizeMix(tuple(Size(w, h) for w, h, _ in entries), tuple(float(share) for _, _, share in entries))
    again = SizeMix.parse(str(mix))
    assert again.sizes == mix.sizes
    assert [share / sum(again.shares) for share in again.shares] == [share / sum(mix.shares) for share in mix.shares]


def test_sizes_come_by_their_shares() -> None:
    rng = random.Random(0)
    mix = SizeMix.parse("224:3,1024:1")
    counts = Counter(mix.draw(rng).width for _ in range(4000))
    assert 2850 < counts[224] < 3150


@given(st.sampled_from(["zipf", "pareto"]), st.floats(0.1, 3), st.integers(1, 50))
def test_shares_sum_up_to_one(kind: str, exponent: float, pool: int) -> None:
    shares = Popularity(kind, exponent).shares(pool)  # type: ignore[arg-type]
    assert sum(shares) == pytest.approx(1)
    assert all(share > 0 for share in shares)
    heads = shares if kind == "zipf" else shares[:-1]  # the last of a Pareto pool stands for all beyond it
    assert heads == sorted(heads, reverse=True)


def test_zipf_is_inverse_to_the_rank_and_zero_is_uniform() -> None:
    shares = Popularity.parse("zipf:2").shares(4)
    assert [shares[0] / share for share in shares] == pytest.approx([1, 4, 9, 16])
    assert Popularity.parse("zipf:0").shares(4) == [0.25] * 4


def test_pareto_shares_are_those_of_the_variate() -> None:
    rng = random.Random(1)
    ranks = Counter(min(int(rng.paretovariate(1.1)), 8) for _ in range(20_000))
    for rank, share in enumerate(Popularity.parse("pareto:1.1").shares(8), start=1):
        assert ranks[rank] / 20_000 == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize("text", ["zipf:-1", "pareto:0", "pareto:inf", "normal:1", "zipf:x"])
def test_bad_popularity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="popularity"):
        Popularity.parse(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("requests", 0), ("concurrency", 0), ("images", -1), ("pool", -1), ("out_tokens", 0), ("text_characters", 0),
        ("rate_per_s", 0.0), ("rate_per_s", float("inf")),
    ],
)  # fmt: skip
def test_an_impossible_workload_names_what_is_off(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Workload(**{name: value})  # type: ignore[arg-type]


def test_arrivals_are_a_poisson_process_and_the_same_every_time() -> None:
    workload = Workload(requests=4000, rate_per_s=20, concurrency=0, seed=3)
    arrivals = workload.arrivals_s()
    assert arrivals is not None
    assert arrivals == workload.arrivals_s()
    assert arrivals == sorted(arrivals)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.06)
    # Exponential gaps spread as widely as their mean is long; a regular beat would not.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert Workload().arrivals_s() is None


def test_named_workloads() -> None:
    facts = {
        name: (w.images, str(w.sizes), w.concurrency, w.requests, w.out_tokens, w.pool) for name, w in NAMED.items()
    }
    assert facts == {
        "A": (1, "1024x1024", 32, 192, 128, 0),
        "A1": (1, "1024x1024", 1, 12, 64, 0),
        "B": (4, "336x336", 32, 192, 64, 0),
        "C": (1, "1024x1024", 32, 192, 128, 8),
        "D": (1, "224x224", 64, 384, 16, 0),
        "IMG8": (8, "336x336", 32, 192, 64, 0),
    }
    assert all(name == w.name and w.text_characters == 128 for name, w in NAMED.items())


def test_counts() -> None:
    assert parse_counts("4,1,2,2") == [1, 2, 4]
    for bad in ("", "a", "1,-2"):
        with pytest.raises(ValueError):
            parse_counts(bad)
    with pytest.raises(ValueError, match="at least 1"):
        parse_counts("0,1", least=1)


@given(st.lists(st.integers()), st.integers(1, 7))
def test_every_request_belongs_to_exactly_one_process(items: list[int], count: int) -> None:
    assert sorted(x for index in range(count) for x in shard(items, index, count)) == sorted(items)
