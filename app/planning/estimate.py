"""What a split can carry and how long requests take in it, by arithmetic. `replay.py` is the check.

The LM engine is seen as cycles: in the mean step `y` requests arrive, so it computes `y * d` decodes (d steps a
request) and the prompts of `y` requests, and takes T(y); its rate is y / T(y), up to the seats, KV tokens and step
tokens that y may take. How many prompts a step gets is Poisson: one of 300 tokens in every tenth step costs more than
30 in each.

**Colocated**: encoder and LM engine share one GPU's time. The model conserves work: what a pass takes is added to the
cycle, T(y) + y * e, and a pass takes longer by the share of time in which steps run beside it. Two streams of a real
GPU overlap better than that where one waits for memory and the other computes, and get in each other's way in caches;
neither is modelled, nor that the engine's stream has priority.

An encoder of its own takes all that waits in one round, behind the round under way; waits are those of such a queue
with the trace's burstiness. Above the capacity of a stage the backlog grows for as long as the trace lasts.

Not modelled at all: the ingress (its CPU work for each streamed token) and the network.

Against the replay: capacities within 15%; up to 60% of the capacity TPOT p50 within 15% and p95 25%, TTFT p50 within
25% and p95 40%. Where embedding slots bound, first tokens wait longer than estimated, two to three times as long.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from app.planning.splits import EngineOptions, Memory, Split
from app.planning.stage_times import StageTimes
from app.planning.workload import Demand, RequestDemand
from deployments.vision_encoder.packing import Load

_SAMPLE = 256
"""Requests of a trace whose times are worked out one by one."""
_P95_DEVIATIONS = 1.645
_POISSON_MOST = 12.0
"""Mean above which the number of prompts in a step is taken as its mean."""
_SLOTS_BIND = 0.9
"""Share of the other stages' capacity below which embedding slots are what bounds."""
PREPROCESSOR_CPUS = 2
"""Of a replica: so many pictures of a request are decoded side by side."""
TARGET_CPU_USE = 0.7
"""What a preprocessor's cores may be busy for, as its autoscaling policy has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Over the requests of a trace: 50th and 95th percentile."""

    ttft_p50_s: float
    """From the arrival at the server to the first token."""
    ttft_p95_s: float
    tpot_p50_s: float
    """Time of each further token of a request, on average over the request."""
    tpot_p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """Share of what each stage can do."""

    encoder: float
    """Of the encoders' GPUs; colocated: of the GPUs' time, part of `engine`."""
    engine: float
    bottleneck: Literal["encoder", "LM engine", "GPU time", "embedding slots"]
    """What bounds the rate first; GPU time is that of colocated replicas, embedding slots are
    `lm_engine.encoder_cache_slots`."""


@dataclass(frozen=True, slots=True)
class _Mean:
    """The mean request of a demand."""

    decode_steps: float
    new_tokens: float
    pairs: float
    context_tokens: float
    """Of a decode."""
    encode_share: float
    """Of the requests that bring something to encode."""
    item: Load
    """Of one of their pictures."""
    items: float
    """Pictures of one of these."""

    @classmethod
    def of(cls, demand: Demand, times: StageTimes) -> _Mean:
        requests = demand.requests
        steps = [request.output_tokens - 1 for request in requests]
        held = [
            step * (request.prompt_tokens + request.output_tokens / 2)
            for step, request in zip(steps, requests, strict=True)
        ]
        encoding = [request.encode for request in requests if request.encode]
        loads = [times.load_of(slots) for encode in encoding for slots in encode]
        total, count = sum(loads, Load()), max(1, len(loads))
        item = Load(
            round(total.slots / count), round(total.patches / count), 0, 1, total.longest_patches,
            round(total.pairs / count),
        )  # fmt: skip
        return cls(
            decode_steps=statistics.fmean(steps),
            new_tokens=statistics.fmean(request.new_tokens for request in requests),
            pairs=statistics.fmean(request.pairs for request in requests),
            context_tokens=sum(held) / sum(steps) if sum(steps) else 0.0,
            encode_share=len(encoding) / len(requests),
            item=item,
            items=len(loads) / max(1, len(encoding)),
        )


class Estimate:
    """One split under one demand, at any rate.

    Args:
        megapixels_per_slot: Of a picture before it is resized; follows from the trace's source or a guess.
    """

    def __init__(
        self,
        split: Split,
        demand: Demand,
        times: StageTimes,
        options: EngineOptions,
        memory: Memory,
        megapixels_per_slot: float,
    ) -> None:
        self.split, self.demand = split, demand
        self._times, self._options, self._memory = times, options, memory
        self._megapixels_per_slot = megapixels_per_slot
        self._mean = _Mean.of(demand, times)
        stride = max(1, len(demand.requests) // _SAMPLE)
        self._sample = Counter(demand.requests[::stride])
        self._most = self._find_most()
        self._cycle = lru_cache(4096)(self._compute_cycle)
        self._best = self._find_best()
        self.engine_capacity_per_s = split.engines * self._best / self._cycle(self._best)
        self.encoder_capacity_per_s = self._find_encoder_capacity()
        """Requests per second of all encoders; infinite if nothing is to be encoded, or if they are colocated and have
        no bound but the engines'."""
        self.slots_capacity_per_s = self._find_slots_capacity()
        """Requests per second whose embeddings the engines can hold, from the encode's start to the last prefill;
        infinite where that does not bound."""

    @property
    def capacity_per_s(self) -> float:
        """Requests per second that no backlog grows at."""
        return min(self.encoder_capacity_per_s, self.engine_capacity_per_s, self.slots_capacity_per_s)

    def _bottleneck(self) -> Literal["encoder", "LM engine", "GPU time", "embedding slots"]:
        if self.slots_capacity_per_s == self.capacity_per_s:
            return "embedding slots"
        if self.split.colocated:
            return "GPU time"
        return "encoder" if self.encoder_capacity_per_s == self.capacity_per_s else "LM engine"

    def use(self, rate_per_s: float) -> StageUse:
        if self.split.colocated:
            each = rate_per_s * self._mean.encode_share / self.split.engines
            encoder = each * self._encode_each_s(self._arrivals(rate_per_s / self.split.engines))
        else:
            encoder = rate_per_s / self.encoder_capacity_per_s
        return StageUse(encoder=encoder, engine=rate_per_s / self.engine_capacity_per_s, bottleneck=self._bottleneck())

    def preprocess_cpu_s(self) -> float:
        """CPU seconds of a preprocessor for the mean request."""
        slots = sum(sum(request.decode) * count for request, count in self._sample.items())
        pictures_s = self._times.picture_cpu_s(slots * self._megapixels_per_slot)
        return self._times.request_cpu_s() + pictures_s / self._sample.total()

    def good_rate_per_s(self, meets: Callable[[Latency], bool], max_use: float) -> float:
        """The highest rate at which the times still meet what is asked for and no stage is busier than `max_use`."""
        low, high = 0.0, self.capacity_per_s * max_use
        if meets(self.latency(high)):
            return high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if meets(self.latency(middle)) else (low, middle)
        return low

    # -- times ---------------------------------------------------------------------------------------------------------
    def latency(self, rate_per_s: float) -> Latency:
        """At a rate; above the capacity, over as many requests as the demand has."""
        mean = self._mean
        each = rate_per_s / self.split.engines
        y = self._arrivals(each)
        running = y * mean.decode_steps
        per_request_s = (self._cycle(y) - self._decode_s(running)) / y if y else 0.0
        cycle_s = self._decode_s(running + 1) + y * per_request_s
        deviation_s = math.sqrt(y * self.demand.burstiness) * per_request_s
        crowd_s = self._crowd_s(y)
        # What a new request meets: nothing, or a step under way; longer steps are met more often.
        busy = 1 - math.exp(-(running + each * cycle_s))
        residual_s = busy * (cycle_s + deviation_s**2 / cycle_s) / 2
        encode = self._encode_wait(rate_per_s, busy)
        totals = [
            seconds
            for request, count in self._sample.items()
            for seconds in [
                self._own_s(request, running, encode.stretch)
                + residual_s
                + y * per_request_s
                + ((residual_s + encode.mean_s) if request.encode else 0.0)
            ]
            * count
        ]
        # A crowd makes all waits long at once, so they add up: the step under way when the request comes and, if it
        # encodes, when that is done, and the step that it is part of.
        steps = 2 + mean.encode_share
        tail_s = steps * crowd_s + math.hypot(
            steps * _P95_DEVIATIONS * deviation_s, mean.encode_share * (encode.p95_s - encode.mean_s)
        )
        overload = max(0.0, rate_per_s / self.capacity_per_s - 1)
        behind_s = overload * len(self.demand.requests) / rate_per_s
        prompts_s = math.sqrt(each * cycle_s * max(1.0, self.demand.burstiness) / max(1.0, mean.decode_steps))
        decodes = mean.decode_steps > 0
        return Latency(
            ttft_p50_s=_percentile(totals, 50) + 0.5 * behind_s,
            ttft_p95_s=_percentile(totals, 95) + tail_s + 0.95 * behind_s,
            tpot_p50_s=cycle_s if decodes else 0.0,
            tpot_p95_s=cycle_s + math.hypot(_P95_DEVIATIONS * prompts_s * per_request_s, crowd_s) if decodes else 0.0,
        )

    def _crowd_s(self, y: float) -> float:
        """How much longer a step is at the 95th percentile of sequences that run.

        Their number varies like that of a queue whose service slows down as it fills: by the mean (as Poisson does),
        divided by how much of a growth in numbers the rate gains. Near the capacity that is little, and crowds last.
        """
        if y <= 0:
            return 0.0
        more = y * 1.05
        gain = math.log(more / self._cycle(more) / (y / self._cycle(y))) / math.log(1.05)
        running = y * (self._mean.decode_steps + 1)
        deviation = math.sqrt(self.demand.burstiness / (max(gain, 0.02) * running))
        crowded = min(y * (1 + _P95_DEVIATIONS * deviation), max(y, self._most))
        return self._cycle(crowded) - self._cycle(y)

    def _own_s(self, request: RequestDemand, running: float, stretch: float) -> float:
        """What a request takes with nobody in its way but the sequences that run."""
        times = self._times
        pictures_s = [times.picture_cpu_s(slots * self._megapixels_per_slot) for slots in request.decode]
        seconds = times.receive_s + times.request_cpu_s()
        seconds += sum(pictures_s) / max(1, min(len(pictures_s), PREPROCESSOR_CPUS))
        seconds += 2 * times.call_s  # to the preprocessor and to the engine
        if request.encode:
            # The largest share of the pictures that one encoder gets: all of them if there is but one.
            share = request.encode[: math.ceil(len(request.encode) / self._encoders_each(len(request.encode)))]
            seconds += times.pictures_s(share) * stretch + times.patches_transfer_s(sum(share))
            if not self.split.colocated:
                seconds += times.call_s + times.rows_transfer_s(max(request.encode))
        room = self._prefill_room(running)
        for _ in range(math.ceil(request.new_tokens / room) - 1):
            seconds += times.step_s(running + room, running * self._mean.context_tokens, 0.0)
        rest = request.new_tokens - room * (math.ceil(request.new_tokens / room) - 1)
        return seconds + times.step_s(running + rest, running * self._mean.context_tokens, request.pairs)

    # -- LM engine -----------------------------------------------------------------------------------------------------
    def _prefill_room(self, running: float) -> float:
        """Prompt tokens that a step takes beside decodes."""
        options = self._options
        room = options.max_num_batched_tokens - min(running, options.max_num_seqs)
        limit = options.max_prefill_tokens_while_decoding
        return max(1.0, min(room, limit) if limit and running >= 1 else room)

    def _find_most(self) -> float:
        """Most requests that may arrive in a mean step."""
        mean, options = self._mean, self._options
        held = mean.decode_steps * mean.context_tokens + mean.new_tokens
        bounds = [
            options.max_num_seqs / (mean.decode_steps + 1),
            self._memory.kv_tokens / held,
            options.max_num_batched_tokens / (mean.decode_steps + mean.new_tokens),
        ]
        if options.max_prefill_tokens_while_decoding and mean.decode_steps:
            bounds.append(options.max_prefill_tokens_while_decoding / mean.new_tokens)
        return min(bounds)

    def _find_best(self) -> float:
        """Arrivals in a step at which the rate is highest."""
        return max((self._most * 1.1**-power for power in range(60)), key=lambda y: y / self._cycle(y))

    def _arrivals(self, rate_per_s: float) -> float:
        """Arrivals in a mean step at a rate; those of the highest rate if it is above that."""
        low, high = 0.0, self._best
        if rate_per_s >= high / self._cycle(high):
            return high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if middle / self._cycle(middle) < rate_per_s else (low, middle)
        return high

    def _decode_s(self, running: float) -> float:
        return self._times.step_s(running, running * self._mean.context_tokens, 0.0)

    def _compute_cycle(self, y: float) -> float:
        """Seconds of a mean step with `y` arrivals in it, encoding in the same process included."""
        mean = self._mean
        running = y * mean.decode_steps

        def step_s(prompts: float) -> float:
            return self._times.step_s(
                running + prompts * mean.new_tokens, running * mean.context_tokens, prompts * mean.pairs
            )

        if y > _POISSON_MOST:
            seconds = step_s(y)
        else:
            seconds, chance, prompts = 0.0, math.exp(-y), 0
            while prompts <= y + 6 * math.sqrt(y) + 4:
                seconds += chance * step_s(prompts)
                prompts += 1
                chance *= y / prompts
        return seconds + (y * mean.encode_share * self._encode_each_s(y) if self.split.colocated else 0.0)

    # -- vision encoder ------------------------------------------------------------------------------------------------
    def _encode_each_s(self, requests: float) -> float:
        """GPU seconds of one encoding request's pictures where those of so many requests run together."""
        together = max(1.0, requests * self._mean.encode_share)
        return self._times.round_s(self._mean.item, self._mean.items * together) / together

    def _encoders_each(self, items: float) -> float:
        """Encoders that a request's pictures are spread over."""
        return max(1.0, min(float(self.split.encoders), items))

    def _find_encoder_capacity(self) -> float:
        if self._mean.encode_share == 0 or self.split.colocated:
            return math.inf
        return self.split.encoders / (self._mean.encode_share * self._encode_each_s(256 / self._mean.encode_share))

    def _find_slots_capacity(self) -> float:
        """As many requests circulate as have room: each is held for a time, of which the busiest stage's share is
        waited for by those behind it (the asymptotic bound of a closed queueing network)."""
        mean, times = self._mean, self._times
        if mean.encode_share == 0:
            return math.inf
        items = mean.items / self._encoders_each(mean.items)
        held_s = times.round_s(mean.item, items) + times.patches_transfer_s(mean.item.slots * items)
        if not self.split.colocated:
            held_s += times.call_s + times.rows_transfer_s(mean.item.slots)
        running = self._best * mean.decode_steps
        held_s += times.step_s(mean.new_tokens + running, running * mean.context_tokens, mean.pairs)
        slots = self._options.encoder_cache_slots or self._options.max_num_batched_tokens
        together = max(1.0, slots / (mean.item.slots * mean.items))
        others = min(self.encoder_capacity_per_s, self.engine_capacity_per_s)
        busiest_s = self.split.engines / (others * mean.encode_share)
        found = self.split.engines * together / (held_s + (together - 1) * busiest_s) / mean.encode_share
        return found if found < _SLOTS_BIND * others else math.inf

    def _encode_wait(self, rate_per_s: float, engine_busy: float) -> _Wait:
        """Before and inside a round, beyond what the request's own pictures take."""
        if self._mean.encode_share == 0:
            return _Wait(0.0, 0.0, 1.0)
        stretch = 1 + engine_busy if self.split.colocated else 1.0
        parts = self._encoders_each(self._mean.items)
        each = rate_per_s * parts * self._mean.encode_share / (self.split.encoders or self.split.engines)

        def round_s(requests: float) -> float:
            return self._times.round_s(self._mean.item, self._mean.items / parts * requests) * stretch

        alone_s = seconds = round_s(1)
        for _ in range(60):
            before, seconds = seconds, min(round_s(max(1.0, each * seconds)), round_s(256))
            if seconds <= before * 1.0001:
                break
        together = each * seconds
        busy = min(1.0, together)
        deviation_s = math.sqrt(together * self.demand.burstiness) * (round_s(2) - alone_s)
        wait_s = busy * (seconds + deviation_s**2 / seconds) / 2
        wait_p95_s = (seconds + _P95_DEVIATIONS * deviation_s) * max(0.0, 1 - 0.05 / busy) if busy else 0.0
        others_s = seconds - alone_s
        return _Wait(wait_s + others_s, max(wait_p95_s, wait_s) + others_s, stretch)


@dataclass(frozen=True, slots=True)
class _Wait:
    mean_s: float
    p95_s: float
    stretch: float
    """How much longer a pass takes for what runs beside it."""


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
