"""Hit rates of routing by identity against random and least-loaded routing, with Zipf pictures and a replica more.

    python -m tests.bench.bench_routing [--seed 0] [--out tests/bench/results]

A simulation of the deciders alone: requests arrive at random, name a picture by Zipf's law and occupy a replica for a
random time; each replica keeps its last pictures (LRU). Halfway a replica joins with an empty memory. 3 encoder and 4
LM engine replicas, as a cluster of that size would have. Writes routing.json:

- `hit_rate`           over the half before the replica joins, its first tenth (cold caches) left out;
- `hit_rate_just_after`, `hit_rate_after`  over the first tenth after it joined, and over the rest;
- `peak_to_mean`       most calls at one replica over the mean, at the 99th percentile of all arrivals.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from deployments.routing import Placer, session_id

REQUESTS = 120_000
CALLS_AT_ONCE = 24.0
"""Mean calls under way at one replica."""

Choose = Callable[[str, list[str], Counter[str]], str]
"""(picture, replicas, calls under way) -> replica."""


@dataclass(frozen=True)
class Stage:
    name: str
    replicas: int
    pictures: int
    zipf: float
    cached_per_replica: int


STAGES = (
    Stage("vision_encoder", replicas=3, pictures=20_000, zipf=1.0, cached_per_replica=1_000),
    Stage("lm_engine", replicas=4, pictures=20_000, zipf=1.0, cached_per_replica=250),
)


@dataclass
class Result:
    stage: str
    routing: str
    hit_rate: float
    hit_rate_just_after: float
    hit_rate_after: float
    peak_to_mean: float


def simulate(stage: Stage, routing: str, choose: Choose, seed: int) -> Result:
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, stage.pictures + 1) ** stage.zipf
    pictures = rng.choice(stage.pictures, REQUESTS, p=weights / weights.sum())
    arrivals = np.cumsum(rng.exponential(1 / (CALLS_AT_ONCE * stage.replicas), REQUESTS))
    seconds = rng.exponential(1.0, REQUESTS)
    replicas = [f"replica-{i}" for i in range(stage.replicas)]
    caches: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in replicas}
    calls: Counter[str] = Counter()
    ends: list[tuple[float, str]] = []
    hits = np.zeros(REQUESTS, dtype=bool)
    peaks = np.zeros(REQUESTS)
    for i, (at, picture) in enumerate(zip(arrivals.tolist(), pictures.tolist(), strict=True)):
        if i == REQUESTS // 2:
            replicas.append("replica-new")
            caches["replica-new"] = OrderedDict()
        while ends and ends[0][0] <= at:
            calls[heapq.heappop(ends)[1]] -= 1
        name = choose(f"picture-{picture}", replicas, calls)
        calls[name] += 1
        heapq.heappush(ends, (at + float(seconds[i]), name))
        cache = caches[name]
        hits[i] = picture in cache
        cache[picture] = None
        cache.move_to_end(picture)
        if len(cache) > stage.cached_per_replica:
            cache.popitem(last=False)
        peaks[i] = max(calls.values()) * len(replicas) / sum(calls.values())
    half, tenth = REQUESTS // 2, REQUESTS // 20
    warm = peaks[tenth:]
    return Result(
        stage=stage.name,
        routing=routing,
        hit_rate=round(float(hits[tenth:half].mean()), 4),
        hit_rate_just_after=round(float(hits[half : half + tenth].mean()), 4),
        hit_rate_after=round(float(hits[half + tenth :].mean()), 4),
        peak_to_mean=round(float(np.percentile(warm, 99)), 2),
    )


def randomly(seed: int) -> Choose:
    rng = np.random.default_rng(seed + 1)
    return lambda _, replicas, __: replicas[int(rng.integers(len(replicas)))]


def two_choices(seed: int) -> Choose:
    """Serve's default: the less loaded of two replicas."""
    rng = np.random.default_rng(seed + 2)

    def choose(_: str, replicas: list[str], calls: Counter[str]) -> str:
        first, second = rng.choice(len(replicas), 2, replace=False)
        return min(replicas[first], replicas[second], key=lambda name: calls[name])

    return choose


def modulo(picture: str, replicas: list[str], _: Counter[str]) -> str:
    """A hash without a ring: almost every key moves when the number of replicas changes."""
    return replicas[int(picture.removeprefix("picture-")) * 2_654_435_761 % 2**32 % len(replicas)]


def by_identity(bound: float) -> Choose:
    placer = Placer(bound=bound, min_bound=8)

    def choose(picture: str, replicas: list[str], calls: Counter[str]) -> str:
        placer.set_replicas(replicas)
        return placer.rank(session_id(picture), lambda replica: calls[replica])[0]

    return choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    results: list[Result] = []
    for stage in STAGES:
        ways: dict[str, Choose] = {
            "random": randomly(args.seed),
            "two choices (Serve's default)": two_choices(args.seed),
            "hash modulo replicas": modulo,
            "identity, no bound": by_identity(1e9),
            "identity, bound 1.25": by_identity(1.25),
        }
        for name, choose in ways.items():
            results.append(simulate(stage, name, choose, args.seed))
            print(json.dumps(asdict(results[-1])))
    args.out.mkdir(parents=True, exist_ok=True)
    page = {
        "setting": {"requests": REQUESTS, "calls_at_once": CALLS_AT_ONCE, "seed": args.seed},
        "stages": [asdict(stage) for stage in STAGES],
        "results": [asdict(result) for result in results],
    }
    (args.out / "routing.json").write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
