"""What a load run asks for, as data. Equal workloads give equal requests, byte for byte, whoever the server is."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Literal


@dataclass(frozen=True, slots=True, order=True)
class Size:
    width: int
    height: int

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1:
            raise ValueError(f"a picture of {self} has no pixels")

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def parse(cls, text: str) -> Size:
        """`1024x768`, or `336` for a square."""
        width, _, height = text.strip().partition("x")
        try:
            return cls(int(width), int(height or width))
        except ValueError:
            raise ValueError(f"size {text!r} is not WIDTHxHEIGHT in pixels, such as 1024x768") from None


@dataclass(frozen=True, slots=True)
class SizeMix:
    """Sizes and how often each comes; the shares need not sum up to 1."""

    sizes: tuple[Size, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.shares):
            raise ValueError(f"{len(self.sizes)} sizes with {len(self.shares)} shares are no mix")
        if min(self.shares) < 0 or sum(self.shares) <= 0:
            raise ValueError(f"the shares of sizes are {list(self.shares)}; none may be negative, and one must count")

    def draw(self, rng: random.Random) -> Size:
        return rng.choices(self.sizes, self.shares)[0]

    def __str__(self) -> str:
        if len(set(self.shares)) == 1:
            return ",".join(map(str, self.sizes))
        return ",".join(f"{size}:{share:g}" for size, share in zip(self.sizes, self.shares, strict=True))

    @classmethod
    def parse(cls, text: str) -> SizeMix:
        """`1024x1024`, `224x224,336x336` (equal shares), `224x224:0.3,1024x1024:0.1`.

        Raises:
            ValueError: A size or share cannot be read, or only some sizes have a share.
        """
        sizes, shares = [], []
        entries = [entry for entry in text.split(",") if entry.strip()]
        weighted = sum(":" in entry for entry in entries)
        if weighted not in (0, len(entries)):
            raise ValueError(f"sizes {text!r}: give every size a share, or none")
        for entry in entries:
            size, _, share = entry.partition(":")
            sizes.append(Size.parse(size))
            try:
                shares.append(float(share) if weighted else 1.0)
            except ValueError:
                raise ValueError(f"sizes {text!r}: {share!r} is no number") from None
        return cls(tuple(sizes), tuple(shares))


@dataclass(frozen=True, slots=True)
class Popularity:
    """How often each picture of a pool is asked for, from the most popular on.

    `zipf`: proportional to 1 / rank^exponent; 0 is uniform. `pareto`: the rank is a Pareto variate rounded down, and
    those beyond the pool fall on its last picture.
    """

    kind: Literal["zipf", "pareto"] = "zipf"
    exponent: float = 1.0

    def __post_init__(self) -> None:
        low = 0.0 if self.kind == "zipf" else 1e-9
        if self.kind not in ("zipf", "pareto") or not low <= self.exponent < float("inf"):
            raise ValueError(f"popularity {self} is neither zipf:S with S of 0 or more nor pareto:S with S above 0")

    def __str__(self) -> str:
        return f"{self.kind}:{self.exponent:g}"

    def shares(self, pool: int) -> list[float]:
        """Of each picture; they sum up to 1."""
        if self.kind == "pareto":
            beyond = [rank**-self.exponent for rank in range(1, pool + 1)]
            return [here - after for here, after in zip(beyond, [*beyond[1:], 0.0], strict=True)]
        weights = [rank**-self.exponent for rank in range(1, pool + 1)]
        return [weight / sum(weights) for weight in weights]

    @classmethod
    def parse(cls, text: str) -> Popularity:
        kind, _, exponent = text.partition(":")
        try:
            return cls(kind, float(exponent or 1.0))  # type: ignore[arg-type]
        except ValueError:
            raise ValueError(
                f"popularity {text!r} is neither zipf:S with S of 0 or more nor pareto:S with S above 0"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str = "custom"
    requests: int = 100
    concurrency: int = 16
    """Requests in flight at once (closed loop); with a rate, the most that may be (0: any number)."""
    rate_per_s: float | None = None
    """Open loop: requests begin at the instants of a Poisson process of this rate."""
    images: int = 1
    """Pictures of one request."""
    sizes: SizeMix = SizeMix((Size(1024, 1024),), (1.0,))
    pool: int = 0
    """Distinct pictures to draw from; 0 makes every one new."""
    popularity: Popularity = field(default_factory=Popularity)
    text_characters: int = 128
    text_tokens: int = 0
    """If above 0, the text has so many tokens of a tokenizer instead."""
    out_tokens: int = 128
    """Exactly so many are asked for: `min_tokens` and `ignore_eos` go along."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("requests", 1), ("concurrency", 1 if self.rate_per_s is None else 0), ("images", 0), ("pool", 0),
            ("text_characters", 1), ("text_tokens", 0), ("out_tokens", 1), ("seed", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise ValueError(f"rate_per_s is {self.rate_per_s}; it must be above 0")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"sizes": str(self.sizes), "popularity": str(self.popularity)}

    def arrivals_s(self) -> list[float] | None:
        """Seconds from the start at which each request begins; None in a closed loop."""
        if self.rate_per_s is None:
            return None
        rng = random.Random(f"arrivals {self.seed}")
        return list(accumulate(rng.expovariate(self.rate_per_s) for _ in range(self.requests)))


def _named(**workloads: Workload) -> Mapping[str, Workload]:
    return workloads


_SQUARE = {side: SizeMix((Size(side, side),), (1.0,)) for side in (224, 336, 1024)}

NAMED: Mapping[str, Workload] = _named(
    A=Workload(name="A", requests=192, concurrency=32, out_tokens=128, seed=2),
    A1=Workload(name="A1", requests=12, concurrency=1, out_tokens=64, seed=3),
    B=Workload(name="B", requests=192, concurrency=32, images=4, sizes=_SQUARE[336], out_tokens=64, seed=4),
    C=Workload(
        name="C", requests=192, concurrency=32, pool=8, popularity=Popularity("pareto", 1.1), out_tokens=128, seed=5
    ),
    D=Workload(name="D", requests=384, concurrency=64, sizes=_SQUARE[224], out_tokens=16, seed=6),
    IMG8=Workload(name="IMG8", requests=192, concurrency=32, images=8, sizes=_SQUARE[336], out_tokens=64, seed=7),
)
"""The workloads that this server and another one are compared on."""


def parse_counts(text: str, least: int = 0) -> list[int]:
    """`1,2,4` as ascending whole numbers, each once."""
    try:
        counts = sorted({int(entry) for entry in text.split(",") if entry.strip()})
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers, such as 1,2,4") from None
    if not counts or counts[0] < least:
        raise ValueError(f"{text!r} must name whole numbers of at least {least}")
    return counts


def shard(items: Sequence[Any], index: int, count: int) -> Sequence[Any]:
    """The part of one of `count` processes: every request belongs to exactly one."""
    return items[index::count]
