"""Requests for the simulator, recorded or made up: when they come, how long they are, which pictures they bring."""

from __future__ import annotations

import bisect
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TracePicture:
    """Equal ids are equal pictures."""

    picture_id: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Its prompt is a shared prefix, its pictures, then text of its own."""

    arrival_s: float
    text_tokens: int
    output_tokens: int
    pictures: tuple[TracePicture, ...] = ()
    prefix_id: int = 0
    """Requests with equal ids share their first `prefix_tokens` tokens."""
    prefix_tokens: int = 0
    tenant: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if self.text_tokens < 1 or self.output_tokens < 1 or self.prefix_tokens < 0:
            raise ValueError(f"a request needs text and output tokens: {self.text_tokens = }, {self.output_tokens = }")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTrace:
    """Poisson arrivals; picture popularity by Zipf's law; log-normal-like lengths. Equal seeds give equal traces."""

    num_requests: int = 1000
    requests_per_s: float = 10.0
    num_pictures: int = 1000
    """Different pictures in circulation."""
    zipf_exponent: float = 1.0
    """0: all pictures equally often; 1: the classic law."""
    max_pictures: int = 2
    """A request brings 0 to this many, evenly."""
    min_slots: int = 64
    max_slots: int = 2048
    """A picture's size, evenly on a log scale."""
    mean_text_tokens: int = 100
    mean_output_tokens: int = 150
    prefix_tokens: int = 64
    num_prefixes: int = 4
    num_tenants: int = 1
    seed: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(self.seed)
        weights = list(itertools.accumulate((rank + 1.0) ** -self.zipf_exponent for rank in range(self.num_pictures)))
        sizes = [self._log_uniform(rng) for _ in range(self.num_pictures)]
        arrival_s = 0.0
        for _ in range(self.num_requests):
            arrival_s += rng.expovariate(self.requests_per_s)
            ids = [
                bisect.bisect_left(weights, rng.random() * weights[-1])
                for _ in range(rng.randint(0, self.max_pictures))
            ]
            yield TraceRequest(
                arrival_s=arrival_s,
                text_tokens=1 + int(rng.expovariate(1.0 / self.mean_text_tokens)),
                output_tokens=1 + int(rng.expovariate(1.0 / self.mean_output_tokens)),
                pictures=tuple(TracePicture(number, sizes[number]) for number in ids),
                prefix_id=rng.randrange(self.num_prefixes),
                prefix_tokens=self.prefix_tokens,
                tenant=f"tenant{rng.randrange(self.num_tenants)}" if self.num_tenants > 1 else "",
            )

    def _log_uniform(self, rng: random.Random) -> int:
        return round(self.min_slots * (self.max_slots / self.min_slots) ** rng.random())


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A JSONL file with one TraceRequest a line, in order of arrival; `pictures` is a list of [id, slots]."""

    path: Path
    requests: tuple[TraceRequest, ...] = field(init=False)

    def __post_init__(self) -> None:
        requests = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                requests.append(self._parse(line, number))
        object.__setattr__(self, "requests", tuple(sorted(requests, key=lambda request: request.arrival_s)))

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @staticmethod
    def _parse(line: str, number: int) -> TraceRequest:
        try:
            fields = json.loads(line)
            pictures = tuple(TracePicture(int(pic), int(slots)) for pic, slots in fields.pop("pictures", ()))
            return TraceRequest(pictures=pictures, **fields)
        except (ValueError, TypeError, AttributeError) as exc:
            raise ValueError(f"line {number} of the trace is no request: {exc}") from exc


def write_trace(requests: Iterable[TraceRequest], path: Path) -> None:
    """Write a trace that RecordedTrace reads."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            fields = asdict(request)
            fields["pictures"] = [[picture["picture_id"], picture["num_slots"]] for picture in fields["pictures"]]
            file.write(json.dumps(fields) + "\n")
