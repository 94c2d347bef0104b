"""Runs the real scheduler on a trace without a model, so that policies and sizes are compared in seconds.

    python -m deployments.lm_engine.simulator --num-requests 2000 --requests-per-s 20 --replicas 2
    python -m deployments.lm_engine.simulator --trace requests.jsonl --encoders 4 --route affinity

What is real: admission, queue, KV blocks, prefix cache, embedding slots, every decision of every step. What is
modelled: how long a step and an encode take, each as a straight line. Time is simulated: an event queue holds arrivals,
step ends and encode ends. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np

from cache_service.identity import EmbeddingIdentity, ItemIdentity
from deployments.errors import SightlineError
from deployments.lm_engine.config import EngineConfig, ModelLimits, SchedulerConfig
from deployments.lm_engine.plan import EncodeStart, SampledToken, StepPlan
from deployments.lm_engine.request import Sequence, SequenceItem
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.trace import RecordedTrace, SyntheticTrace, TraceRequest
from deployments.messages import GenerateRequest, MediaItem, SamplingParams

PATCHES_PER_SLOT = 4
_PLACEHOLDER = 0

Route = Literal["round_robin", "least_loaded", "affinity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Durations as straight lines. The defaults are a rough guess at a 7B model on one large GPU, not measured."""

    step_base_s: float = 0.008
    """Reading the weights once."""
    step_token_s: float = 0.00004
    """Arithmetic of one token."""
    step_context_token_s: float = 0.00000002
    """Reading one position of the KV cache."""
    encode_base_s: float = 0.003
    encode_patch_s: float = 0.000004

    def step_s(self, plan: StepPlan) -> float:
        context = sum(chunk.start for chunk in plan.chunks)
        return self.step_base_s + self.step_token_s * plan.num_tokens + self.step_context_token_s * context

    def encode_s(self, item: MediaItem) -> float:
        return self.encode_base_s + self.encode_patch_s * item.num_patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a request must meet to count as good."""

    first_token_s: float = 2.0
    per_token_s: float = 0.1


@dataclass(slots=True, kw_only=True)
class Report:
    """What a simulation found; times in simulated seconds."""

    num_requests: int = 0
    num_finished: int = 0
    num_good: int = 0
    """Finished within the goal."""
    num_expired: int = 0
    num_rejected: int = 0
    duration_s: float = 0.0
    """From the first arrival to the last event."""
    queue_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    steps: int = 0
    busy_s: float = 0.0
    """Sum of step times over all replicas."""
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    embed_hits: int = 0
    encode_starts: int = 0
    stalled_steps: int = 0
    denials: Counter[str] = field(default_factory=Counter)

    def summary(self, *, max_num_batched_tokens: int, num_replicas: int) -> dict[str, float | dict[str, int]]:
        """Flat figures for people and programs; rates are per simulated second."""
        duration_s = max(self.duration_s, 1e-9)
        return {
            "requests": self.num_requests,
            "finished": self.num_finished,
            "rejected": self.num_rejected,
            "expired": self.num_expired,
            "duration_s": round(self.duration_s, 2),
            "requests_per_s": round(self.num_finished / duration_s, 2),
            "goodput_per_s": round(self.num_good / duration_s, 2),
            "output_tokens_per_s": round(self.generated_tokens / duration_s, 1),
            "queue_s_p50": _quantile(self.queue_s, 50),
            "queue_s_p99": _quantile(self.queue_s, 99),
            "first_token_s_p50": _quantile(self.first_token_s, 50),
            "first_token_s_p99": _quantile(self.first_token_s, 99),
            "per_token_s_p50": _quantile(self.per_token_s, 50),
            "per_token_s_p99": _quantile(self.per_token_s, 99),
            "busy_share": round(self.busy_s / (duration_s * num_replicas), 3),
            "step_utilisation": round(self.scheduled_tokens / max(1, self.steps) / max_num_batched_tokens, 3),
            "prefix_hit_rate": round(self.prefix_hit_tokens / max(1, self.prefix_query_tokens), 3),
            "embed_hit_rate": round(self.embed_hits / max(1, self.embed_hits + self.encode_starts), 3),
            "encodes": self.encode_starts,
            "preemptions": self.preemptions,
            "stalled_steps": self.stalled_steps,
            "denials": dict(sorted(self.denials.items())),
        }


class NoPositions:
    """A model would want rotary positions; nobody looks at these."""

    _empty = np.zeros((1, 0), np.int32)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self._empty


class Replica:
    """One scheduler, the step it is in, and who waits for their first token."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.scheduler = Scheduler(config, clock)
        self.plan: StepPlan | None = None
        """The step under way; None while idle."""
        self.in_flight: dict[EmbeddingIdentity, int] = {}
        """Ticket of the encode that is awaited for each item."""
        self.awaiting_first: set[str] = set()

    @property
    def load(self) -> int:
        stats = self.scheduler.stats()
        return stats.running + stats.waiting


class Simulation:
    """Args:
    config: Limits of each replica.
    times: How long steps and encodes take.
    num_encoders: Encoders shared by all replicas, each doing one item at a time.
    route: How requests are spread; `affinity` sends a picture to the replica that saw it before.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        times: TimeModel,
        *,
        goal: Goal | None = None,
        num_replicas: int = 1,
        num_encoders: int = 1,
        route: Route = "round_robin",
        seed: int = 0,
    ) -> None:
        self._config, self._times, self._goal, self._route = config, times, goal or Goal(), route
        self._now_s = 0.0
        self._replicas = [Replica(config, self._clock) for _ in range(num_replicas)]
        self._encoder_free_s = [0.0] * num_encoders
        self._rng = random.Random(seed)
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._first_token_at_s: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}
        self.report = Report()

    def run(self, trace: Iterable[TraceRequest]) -> Report:
        """Play the trace to its end: every request has finished, expired or been refused."""
        arrivals = iter(trace)
        self._expect(arrivals)
        first_s = self._events[0][0] if self._events else 0.0
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        self.report.duration_s = self._now_s - first_s
        for replica in self._replicas:
            replica.scheduler.check_integrity()
            self._collect(replica.scheduler)
        return self.report

    def _clock(self) -> float:
        return self._now_s

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._serial), event))

    # -- arrivals ------------------------------------------------------------------------------------------------------
    def _expect(self, arrivals: Iterator[TraceRequest]) -> None:
        """Queue the next arrival; the one after it is read when it comes."""
        request = next(arrivals, None)
        if request is not None:
            self._at(request.arrival_s, lambda: self._arrive(request, arrivals))

    def _arrive(self, request: TraceRequest, arrivals: Iterator[TraceRequest]) -> None:
        self._expect(arrivals)
        serial = self.report.num_requests
        self.report.num_requests += 1
        sequence = make_sequence(request, serial)
        replica = self._choose(request)
        try:
            replica.scheduler.check_admission(_generate_request(sequence))
        except SightlineError:
            self.report.num_rejected += 1
            return
        replica.scheduler.add(sequence)
        replica.awaiting_first.add(sequence.sequence_id)
        if replica.plan is None:
            self._begin_step(replica)

    def _choose(self, request: TraceRequest) -> Replica:
        replicas = self._replicas
        if self._route == "affinity" and request.pictures:
            return replicas[hash(request.pictures[0].picture_id) % len(replicas)]
        if self._route == "round_robin":
            return replicas[(self.report.num_requests - 1) % len(replicas)]
        # The better of two at random: nearly as good as the best of all, and stable when loads are known late.
        return min(self._rng.choices(replicas, k=2), key=lambda replica: replica.load)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _begin_step(self, replica: Replica) -> None:
        plan = replica.scheduler.schedule()
        for identity in plan.evicted_embeds:
            replica.in_flight.pop(identity, None)
        for start in plan.encode:
            self._begin_encode(replica, start)
        if not plan.chunks:
            self._end_sequences(replica, replica.scheduler.update(plan, (), {}))
            if replica.scheduler.has_work and not replica.in_flight:
                # Only a deadline can be next; look again a little later.
                replica.plan = plan
                self._at(self._now_s + self._times.step_base_s, lambda: self._end_step(replica, plan))
            return
        replica.plan = plan
        duration_s = self._times.step_s(plan)
        self.report.busy_s += duration_s
        self.report.steps += 1
        self._at(self._now_s + duration_s, lambda: self._end_step(replica, plan))

    def _end_step(self, replica: Replica, plan: StepPlan) -> None:
        sampled = [SampledToken(chunk.sequence_id, 1) for chunk in plan.chunks if chunk.samples]
        if replica.awaiting_first:
            for token in sampled:
                if token.sequence_id in replica.awaiting_first:
                    replica.awaiting_first.remove(token.sequence_id)
                    self._first_token_at_s[token.sequence_id] = self._now_s
        self._end_sequences(replica, replica.scheduler.update(plan, sampled, {}))
        replica.plan = None
        if replica.scheduler.has_work:
            self._begin_step(replica)

    def _end_sequences(self, replica: Replica, ended: list[Sequence]) -> None:
        for sequence in ended:
            replica.awaiting_first.discard(sequence.sequence_id)
            first_s = self._first_token_at_s.pop(sequence.sequence_id, None)
            if sequence.error is not None or first_s is None or sequence.first_scheduled_s is None:
                self.report.num_expired += 1
                continue
            first_token_s = first_s - sequence.arrival_s
            per_token_s = (self._now_s - first_s) / max(1, sequence.num_output_tokens - 1)
            self.report.num_finished += 1
            self.report.queue_s.append(sequence.first_scheduled_s - sequence.arrival_s)
            self.report.first_token_s.append(first_token_s)
            self.report.per_token_s.append(per_token_s)
            good = first_token_s <= self._goal.first_token_s and per_token_s <= self._goal.per_token_s
            self.report.num_good += good

    # -- encodes -------------------------------------------------------------------------------------------------------
    def _begin_encode(self, replica: Replica, start: EncodeStart) -> None:
        """The encoder that is free first takes the item; it is not stopped by a cancellation."""
        replica.in_flight[start.identity] = start.ticket
        began_s = max(self._now_s, heapq.heappop(self._encoder_free_s))
        done_s = began_s + self._times.encode_s(start.item)
        heapq.heappush(self._encoder_free_s, done_s)
        self._at(done_s, lambda: self._end_encode(replica, start))

    def _end_encode(self, replica: Replica, start: EncodeStart) -> None:
        if replica.in_flight.get(start.identity) != start.ticket:
            return
        del replica.in_flight[start.identity]
        replica.scheduler.on_embedding_ready(start.identity)
        if replica.plan is None and replica.scheduler.has_work:
            self._begin_step(replica)

    # -- figures -------------------------------------------------------------------------------------------------------
    def _collect(self, scheduler: Scheduler) -> None:
        stats, report = scheduler.stats(), self.report
        report.scheduled_tokens += stats.scheduled_tokens
        report.generated_tokens += stats.generated_tokens
        report.preemptions += stats.preemptions
        report.prefix_query_tokens += stats.prefix_query_tokens
        report.prefix_hit_tokens += stats.prefix_hit_tokens
        report.embed_hits += stats.embed_hits
        report.encode_starts += stats.encode_starts
        report.stalled_steps += stats.stalled_steps
        for (budget, outcome), count in stats.denials.items():
            report.denials[f"{budget}.{outcome}"] += count


def make_sequence(request: TraceRequest, serial: int) -> Sequence:
    """The request as the engine would see it: shared prefix, pictures, text that no other request has."""
    tokens = [1 + request.prefix_id] * request.prefix_tokens
    items = []
    for picture in request.pictures:
        identity = EmbeddingIdentity(picture.picture_id.to_bytes(32, "little"))
        media = MediaItem(
            modality="image",
            identity=ItemIdentity(identity),
            grid=(1, 2, 2 * picture.num_slots),
            offset=len(tokens),
            num_slots=picture.num_slots,
            num_patches=PATCHES_PER_SLOT * picture.num_slots,
        )
        items.append(SequenceItem(identity, media))
        tokens += [_PLACEHOLDER] * picture.num_slots
    tokens += [1000 + serial] * request.text_tokens
    return Sequence(
        sequence_id=f"r{serial}",
        request_id=f"r{serial}",
        prompt_token_ids=tokens,
        positions=NoPositions(),
        items=tuple(items),
        max_tokens=request.output_tokens,
        arrival_s=request.arrival_s,
        priority=request.priority,
        namespace=request.tenant,
    )


def _generate_request(sequence: Sequence) -> GenerateRequest:
    return GenerateRequest(
        request_id=sequence.request_id,
        prompt_token_ids=tuple(sequence.prompt_token_ids),
        sampling=SamplingParams(max_tokens=sequence.max_tokens),
        items=tuple(item.media for item in sequence.items),
        namespace=sequence.namespace,
    )


def _quantile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return round(sum(values), 4)
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 4)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------
def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.lm_engine.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="JSONL of recorded requests instead of a synthetic trace")
    parser.add_argument("--replicas", type=int, default=1, help="LM engine replicas (default 1)")
    parser.add_argument("--encoders", type=int, default=1, help="encoders shared by all replicas (default 1)")
    parser.add_argument("--route", choices=("round_robin", "least_loaded", "affinity"), default="round_robin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    _add_options(parser.add_argument_group("synthetic trace"), SyntheticTrace(), skip=("seed",))
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=int, default=32768)
    engine.add_argument("--num-blocks", type=int, default=16384)
    engine.add_argument("--max-num-batched-tokens", type=int, default=8192)
    engine.add_argument("--max-num-seqs", type=int, default=256)
    engine.add_argument("--max-prefill-tokens-while-decoding", type=int, default=0)
    engine.add_argument("--block-size", type=int, default=16)
    engine.add_argument("--encoder-cache-slots", type=int, default=0)
    engine.add_argument("--max-queued-requests", type=int, default=0)
    engine.add_argument("--max-queue-s", type=float, default=0.0)
    engine.add_argument("--no-prefix-caching", action="store_true")
    engine.add_argument("--disable-chunked-mm-input", action="store_true")
    _add_options(parser.add_argument_group("time model"), TimeModel())
    _add_options(parser.add_argument_group("goal"), Goal(), prefix="goal_")
    return parser


def _add_options(
    group: argparse._ArgumentGroup,
    defaults: SyntheticTrace | TimeModel | Goal,
    *,
    prefix: str = "",
    skip: tuple[str, ...] = (),
) -> None:
    """One option for each field of a dataclass."""
    for name, value in asdict(defaults).items():
        if name not in skip:
            option = "--" + (prefix + name).replace("_", "-")
            group.add_argument(option, type=type(value), default=value, help=f"default {value}")


def simulate(args: argparse.Namespace) -> tuple[Report, SchedulerConfig]:
    """Build trace and engine from parsed options, and run."""
    options: Mapping[str, object] = vars(args)
    trace: Iterable[TraceRequest]
    if args.trace is not None:
        trace = RecordedTrace(args.trace).requests
    else:
        names = [f.name for f in fields(SyntheticTrace)]
        trace = list(SyntheticTrace(**{name: options[name] for name in names}))  # type: ignore[arg-type]
    worst = max((picture.num_slots for request in trace for picture in request.pictures), default=0)
    config = EngineConfig(
        model="simulated",
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_prefill_tokens_while_decoding=args.max_prefill_tokens_while_decoding,
        block_size=args.block_size,
        encoder_cache_slots=args.encoder_cache_slots,
        enable_prefix_caching=not args.no_prefix_caching,
        disable_chunked_mm_input=args.disable_chunked_mm_input,
        max_queued_requests=args.max_queued_requests,
        max_queue_s=args.max_queue_s,
        request_timeout_s=0.0,
    ).resolve(
        ModelLimits(
            max_model_len=args.max_model_len,
            num_blocks=args.num_blocks,
            max_item_slots=worst,
            max_item_patches=PATCHES_PER_SLOT * worst,
        )
    )
    simulation = Simulation(
        config,
        TimeModel(**{f.name: options[f.name] for f in fields(TimeModel)}),  # type: ignore[arg-type]
        goal=Goal(first_token_s=args.goal_first_token_s, per_token_s=args.goal_per_token_s),
        num_replicas=args.replicas,
        num_encoders=args.encoders,
        route=args.route,
        seed=args.seed,
    )
    return simulation.run(trace if args.no_progress else _with_progress(trace)), config


def _with_progress(trace: Iterable[TraceRequest]) -> Iterable[TraceRequest]:
    from tqdm import tqdm

    return tqdm(trace, total=len(trace) if isinstance(trace, Sized) else None, unit="request", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    began = time.perf_counter()
    report, config = simulate(args)
    summary = report.summary(max_num_batched_tokens=config.max_num_batched_tokens, num_replicas=args.replicas)
    summary["simulated_in_s"] = round(time.perf_counter() - began, 2)
    write = sys.stdout.write
    for name, value in summary.items():
        if isinstance(value, dict):
            for key, count in value.items():
                write(f"{name}.{key:<28} {count:>12}\n")
        else:
            write(f"{name:<36} {value:>12}\n")
    write(json.dumps({"simulation": summary, "replicas": args.replicas, "route": args.route}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
