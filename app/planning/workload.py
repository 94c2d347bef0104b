"""What a trace asks of each stage. Pure: a list of requests in, sums and means out."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.planning.errors import PlanError
from deployments.lm_engine.trace import RecordedTrace, TracePicture, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Poisson arrivals of requests that are alike."""

    requests: int = 1000
    requests_per_s: float = 1.0
    images: int = 1
    slots: int = 144
    """Of each picture."""
    prompt_tokens: int = 128
    """Of text."""
    output_tokens: int = 128
    reuse: float = 0.0
    """Share of the pictures that came before, each of the earlier ones equally often."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("requests", 2), ("images", 0), ("slots", 1), ("prompt_tokens", 1), ("output_tokens", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.requests_per_s < math.inf:
            raise PlanError(f"rate is {self.requests_per_s}; it must be above 0")
        if not 0 <= self.reuse < 1:
            raise PlanError(f"reuse is {self.reuse}; it must be 0 or more and below 1")

    def make(self) -> list[TraceRequest]:
        rng = random.Random(self.seed)
        arrivals_s = itertools.accumulate(rng.expovariate(self.requests_per_s) for _ in range(self.requests))
        seen = 0

        def picture() -> TracePicture:
            nonlocal seen
            if seen and rng.random() < self.reuse:
                return TracePicture(rng.randrange(seen), self.slots)
            seen += 1
            return TracePicture(seen - 1, self.slots)

        return [
            TraceRequest(
                arrival_s=arrival_s,
                text_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                pictures=tuple(picture() for _ in range(self.images)),
            )
            for arrival_s in arrivals_s
        ]


def read_trace(path: Path) -> list[TraceRequest]:
    """A recorded trace in the simulator's format.

    Raises:
        PlanError: It cannot be read, a line is no request, or it holds fewer than two.
    """
    try:
        requests = list(RecordedTrace(path))
    except (OSError, ValueError) as error:
        raise PlanError(f"--trace {path}: {error}") from None
    if len(requests) < 2:
        raise PlanError(f"--trace {path}: a trace needs two requests at least; it has {len(requests)}")
    for request in requests:
        if not math.isfinite(request.arrival_s):
            raise PlanError(f"--trace {path}: arrival_s is {request.arrival_s}; it must be a finite number of seconds")
        for picture in request.pictures:
            if picture.num_slots < 1:
                raise PlanError(f"--trace {path}: picture {picture.picture_id} has {picture.num_slots} slots")
    return requests


def rate_of(requests: Sequence[TraceRequest]) -> float:
    """Requests per second; infinite if all come at once."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else math.inf


def at_rate(requests: Sequence[TraceRequest], requests_per_s: float) -> list[TraceRequest]:
    """The same requests, closer together or further apart; evenly spaced if they all came at once."""
    was = rate_of(requests)
    start_s = requests[0].arrival_s
    return [
        replace(
            request,
            arrival_s=index / requests_per_s
            if math.isinf(was)
            else (request.arrival_s - start_s) * was / requests_per_s,
        )
        for index, request in enumerate(requests)
    ]


@dataclass(frozen=True, slots=True)
class Caches:
    """Slots of embeddings and tokens of KV that all replicas of a split hold together."""

    embedding_slots: float
    kv_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDemand:
    """What one request needs that no cache has."""

    prompt_tokens: int
    new_tokens: int
    """To prefill."""
    cached_tokens: int
    output_tokens: int
    encode: tuple[int, ...]
    """Slots of each picture to encode."""
    decode: tuple[int, ...]
    """Slots of each picture to decode and resize: those that were never seen."""

    @property
    def pairs(self) -> float:
        """Of prompt tokens with those before them."""
        return self.new_tokens * (self.cached_tokens + self.new_tokens / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A trace behind given caches."""

    requests: tuple[RequestDemand, ...]
    requests_per_s: float
    duration_s: float
    burstiness: float
    """Squared coefficient of variation of the times between arrivals: 0 is a clock, 1 is Poisson."""

    def mean(self, values: Sequence[float]) -> float:
        return statistics.fmean(values) if values else 0.0


def demand_of(requests: Sequence[TraceRequest], caches: Caches) -> Demand:
    """Walk the trace once with caches of the given sizes, least recently used given up first."""
    embeddings, blocks = _Recent(caches.embedding_slots), _Recent(caches.kv_tokens)
    seen: set[int] = set()
    found = []
    for request in requests:
        prompt = request.prefix_tokens + request.text_tokens + sum(p.num_slots for p in request.pictures)
        cached = _cached_tokens(request, blocks)
        encode, decode, position = [], [], request.prefix_tokens
        for picture in request.pictures:
            position += picture.num_slots
            if picture.picture_id not in seen:
                seen.add(picture.picture_id)
                decode.append(picture.num_slots)
            if position > cached and not embeddings.touch(picture.picture_id, picture.num_slots):
                encode.append(picture.num_slots)
        found.append(
            RequestDemand(
                prompt_tokens=prompt,
                new_tokens=prompt - cached,
                cached_tokens=cached,
                output_tokens=request.output_tokens,
                encode=tuple(encode),
                decode=tuple(decode),
            )
        )
    gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(requests)]
    mean_s = statistics.fmean(gaps)
    return Demand(
        requests=tuple(found),
        requests_per_s=rate_of(requests),
        duration_s=requests[-1].arrival_s - requests[0].arrival_s,
        burstiness=statistics.pvariance(gaps) / mean_s**2 if mean_s > 0 else 1.0,
    )


class _Recent:
    """What fits, by last use."""

    def __init__(self, capacity: float) -> None:
        self._capacity, self._held = capacity, 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()

    def touch(self, key: Hashable, size: int) -> bool:
        """Whether it was there; it is afterwards, if it fits at all."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        if size <= self._capacity:
            self._sizes[key] = size
            self._held += size
            while self._held > self._capacity:
                self._held -= self._sizes.popitem(last=False)[1]
        return False


def _cached_tokens(request: TraceRequest, blocks: _Recent) -> int:
    """Tokens of the prompt's beginning (prefix, then picture by picture) that the KV cache has."""
    parts: list[tuple[Hashable, int]] = []
    if request.prefix_tokens:
        parts.append(((request.tenant, request.prefix_id), request.prefix_tokens))
    parts += [(picture.picture_id, picture.num_slots) for picture in request.pictures]
    cached, chain, unbroken = 0, hash((request.tenant, request.prefix_id)), True
    for key, size in parts:
        chain = hash((chain, key))
        unbroken = blocks.touch(chain, size) and unbroken
        if unbroken:
            cached += size
    return cached
