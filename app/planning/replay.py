"""A trace through a split: the scheduler, the routing and the encoder's packing are the real ones, time is simulated.

    arrival ─▶ preprocessor ─▶ engine: schedule ─▶ step on a GPU ─▶ tokens
                                  │ encode                ▲
                                  └─▶ encoder: cache, round, passes on a GPU

`deployments/lm_engine/simulator.py` is the simpler relative of this for studies of the scheduler alone: its encoders do
one item at a time and are nobody's neighbours. Here a GPU is a thing: what runs on it at once shares its time evenly,
and each takes as much longer (see estimate.py for what that leaves out).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from app.planning.estimate import PREPROCESSOR_CPUS, Latency
from app.planning.splits import EngineOptions, Memory, Split
from app.planning.stage_times import StageTimes
from cache_service.identity import EmbeddingIdentity
from cache_service.lru import ByteLRU
from deployments.errors import SightlineError
from deployments.lm_engine.config import EngineConfig, ModelLimits, SchedulerConfig
from deployments.lm_engine.plan import EncodeStart, SampledToken, StepPlan
from deployments.lm_engine.request import Sequence as EngineSequence
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.simulator import PATCHES_PER_SLOT, make_sequence
from deployments.lm_engine.trace import TraceRequest
from deployments.messages import GenerateRequest, SamplingParams
from deployments.routing import Placer, item_key, prompt_key, session_id
from deployments.vision_encoder.packing import Load

CACHE_BYTES = 2 << 30
"""Embeddings that an encoder keeps: the default of `vision_encoder.cache_bytes`."""
_DONE_S = 1e-12


@dataclass(slots=True, kw_only=True)
class Played:
    """What a replay found."""

    requests: int = 0
    finished: int = 0
    refused: int = 0
    duration_s: float = 0.0
    """From the first arrival to the last token."""
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    engine_busy_s: float = 0.0
    """GPU seconds of steps, over all engines."""
    encoder_busy_s: float = 0.0
    """GPU seconds of passes, over all encoders."""
    encoded_items: int = 0
    preemptions: int = 0

    @property
    def requests_per_s(self) -> float:
        return self.finished / self.duration_s if self.duration_s else 0.0

    def latency(self) -> Latency:
        return Latency(
            ttft_p50_s=_percentile(self.ttft_s, 50),
            ttft_p95_s=_percentile(self.ttft_s, 95),
            tpot_p50_s=_percentile(self.tpot_s, 50),
            tpot_p95_s=_percentile(self.tpot_s, 95),
        )


class Clock:
    """Simulated time and what is to happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + max(0.0, delay_s), next(self._serial), event))

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True)
class _Job:
    left_s: float
    done: Callable[[], None]


class Gpu:
    """Time that is shared evenly by what runs at once: nothing is lost, nothing is gained."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: list[_Job] = []
        self._since_s = 0.0
        self._version = 0

    def run(self, seconds: float, done: Callable[[], None]) -> None:
        """Call `done` once so much of the GPU's time was spent on this."""
        self._settle()
        self._jobs.append(_Job(seconds, done))
        self._expect()

    def _settle(self) -> None:
        """Give the jobs what passed since the last look."""
        if self._jobs:
            share_s = (self._clock.now_s - self._since_s) / len(self._jobs)
            for job in self._jobs:
                job.left_s -= share_s
        self._since_s = self._clock.now_s

    def _expect(self) -> None:
        self._version += 1
        if self._jobs:
            version = self._version
            left_s = min(job.left_s for job in self._jobs) * len(self._jobs)
            self._clock.after(left_s, lambda: self._due(version))

    def _due(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        least_s = min(job.left_s for job in self._jobs) + _DONE_S
        done = [job for job in self._jobs if job.left_s <= least_s]
        self._jobs = [job for job in self._jobs if job.left_s > least_s]
        self._expect()
        for job in done:
            job.done()


class Cores:
    """CPU cores that take what waits, first come first served."""

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock, self._idle = clock, number
        self._queue: deque[_Job] = deque()

    def run(self, seconds: float, done: Callable[[], None]) -> None:
        self._queue.append(_Job(seconds, done))
        self._start()

    def _start(self) -> None:
        while self._idle and self._queue:
            self._idle -= 1
            job = self._queue.popleft()
            self._clock.after(job.left_s, lambda job=job: self._end(job))  # type: ignore[misc]

    def _end(self, job: _Job) -> None:
        self._idle += 1
        self._start()
        job.done()


@dataclass(slots=True)
class _Waiting:
    identity: EmbeddingIdentity
    load: Load


class Encoder:
    """A vision encoder: memory cache, one flight for equal items, rounds, passes."""

    def __init__(self, name: str, gpu: Gpu, times: StageTimes, played: Played) -> None:
        self.name, self.load = name, 0
        """Items that wait or run."""
        self._gpu, self._times, self._played = gpu, times, played
        self._memory: ByteLRU[EmbeddingIdentity, bool] = ByteLRU(CACHE_BYTES)
        self._flights: dict[EmbeddingIdentity, list[Callable[[], None]]] = {}
        self._queue: deque[_Waiting] = deque()
        self._busy = False

    def encode(self, identity: EmbeddingIdentity, slots: int, done: Callable[[], None]) -> None:
        if self._memory.get(identity):
            done()
            return
        joined = identity in self._flights
        self._flights.setdefault(identity, []).append(done)
        if not joined:
            self.load += 1
            self._queue.append(_Waiting(identity, self._times.load_of(slots)))

    def start(self) -> None:
        """Begin a round if there is something to do: after all items of a call are here."""
        if not self._busy and self._queue:
            self._busy = True
            waiting = self._take_round()
            batches = self._times.passes([item.load for item in waiting])
            self._run_passes(deque([[waiting[i] for i in batch.indices] for batch in batches]))

    def _take_round(self) -> list[_Waiting]:
        limit, total = self._times.rules.limit, Load()
        taken: list[_Waiting] = []
        while self._queue:
            total = total + self._queue[0].load
            if taken and limit.shortage(total, len(taken) + 1) is not None:
                break
            taken.append(self._queue.popleft())
        return taken

    def _run_passes(self, passes: deque[list[_Waiting]]) -> None:
        if not passes:
            self._busy = False
            self.start()
            return
        items = passes.popleft()
        seconds = self._times.pass_s(sum((item.load for item in items), Load()), len(items))
        self._played.encoder_busy_s += seconds
        self._played.encoded_items += len(items)

        def done() -> None:
            row_bytes = self._times.shape.tower.row_bytes
            for item in items:
                self._memory.put(item.identity, True, item.load.slots * row_bytes)
                self.load -= 1
                for call in self._flights.pop(item.identity):
                    call()
            self._run_passes(passes)

        self._gpu.run(seconds, done)


class Engine:
    """An LM engine replica around the real scheduler."""

    def __init__(self, name: str, replay: Replay, gpu: Gpu, config: SchedulerConfig) -> None:
        self.name = name
        self._replay, self._gpu = replay, gpu
        self._clock, self._times, self._played = replay.clock, replay.times, replay.played
        self.scheduler = Scheduler(config, replay.clock)
        self._plan: StepPlan | None = None
        self._in_flight: dict[EmbeddingIdentity, int] = {}
        self._arrived_s: dict[str, float] = {}
        """At the server, before the preprocessor."""
        self._first_s: dict[str, float] = {}
        self.num_requests = 0
        """That are here now."""

    def add(self, sequence: EngineSequence, request: GenerateRequest, arrived_s: float) -> None:
        try:
            self.scheduler.check_admission(request)
        except SightlineError:
            self._played.refused += 1
            self._replay.ended()
            return
        self.scheduler.add(sequence)
        self.num_requests += 1
        self._arrived_s[sequence.sequence_id] = arrived_s
        if self._plan is None:
            self._begin_step()

    def ready(self, start: EncodeStart) -> None:
        if self._in_flight.get(start.identity) != start.ticket:
            return  # given up in the meantime
        del self._in_flight[start.identity]
        self.scheduler.on_embedding_ready(start.identity)
        if self._plan is None and self.scheduler.has_work:
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self.scheduler.schedule()
        for identity in plan.evicted_embeds:
            self._in_flight.pop(identity, None)
        for start in plan.encode:
            self._in_flight[start.identity] = start.ticket
        if plan.encode:
            self._replay.encode(self, plan.encode)
        if not plan.chunks:
            self._end_sequences(self.scheduler.update(plan, (), {}))
            return
        self._plan = plan
        seconds = self._step_s(plan)
        self._played.engine_busy_s += seconds
        self._gpu.run(seconds, lambda: self._end_step(plan))

    def _step_s(self, plan: StepPlan) -> float:
        context = pairs = 0.0
        for chunk in plan.chunks:
            tokens = chunk.num_tokens
            if tokens == 1:
                context += chunk.start
            else:
                pairs += tokens * (chunk.start + tokens / 2)
        return self._times.step_s(plan.num_tokens, context, pairs)

    def _end_step(self, plan: StepPlan) -> None:
        sampled = [SampledToken(chunk.sequence_id, 1) for chunk in plan.chunks if chunk.samples]
        for token in sampled:
            self._first_s.setdefault(token.sequence_id, self._clock.now_s)
        self._end_sequences(self.scheduler.update(plan, sampled, {}))
        self._plan = None
        if self.scheduler.has_work:
            self._begin_step()

    def _end_sequences(self, ended: Iterable[EngineSequence]) -> None:
        for sequence in ended:
            self.num_requests -= 1
            arrived_s = self._arrived_s.pop(sequence.sequence_id)
            first_s = self._first_s.pop(sequence.sequence_id, None)
            if sequence.error is not None or first_s is None:
                self._played.refused += 1
            else:
                self._played.finished += 1
                # The answer's way back to the client costs half a call.
                self._played.ttft_s.append(first_s - arrived_s + self._times.call_s / 2)
                if sequence.num_output_tokens > 1:
                    self._played.tpot_s.append((self._clock.now_s - first_s) / (sequence.num_output_tokens - 1))
            self._replay.ended()


class Replay:
    """Args:
    preprocessors: Replicas, of PREPROCESSOR_CPUS cores each.
    on_end: Called once for each request that has ended.
    """

    def __init__(
        self,
        split: Split,
        times: StageTimes,
        options: EngineOptions,
        memory: Memory,
        requests: Sequence[TraceRequest],
        *,
        megapixels_per_slot: float,
        preprocessors: int,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.clock, self.times, self.played = Clock(), times, Played(requests=len(requests))
        self._requests, self._on_end = requests, on_end
        self._megapixels_per_slot = megapixels_per_slot
        self._colocated = split.colocated
        config = _scheduler_config(options, memory, requests)
        gpus = [Gpu(self.clock) for _ in range(split.gpus)]
        self._engines = {
            f"engine{i}": Engine(f"engine{i}", self, gpu, config) for i, gpu in enumerate(gpus[: split.engines])
        }
        own = gpus[split.engines :] or gpus
        self._encoders = {f"encoder{i}": Encoder(f"encoder{i}", gpu, times, self.played) for i, gpu in enumerate(own)}
        # As app/builder.py sets the routers up.
        self._engine_placer, self._encoder_placer = Placer(min_bound=16), Placer(min_bound=8)
        self._engine_placer.set_replicas(self._engines)
        self._encoder_placer.set_replicas(self._encoders)
        self._cores = Cores(self.clock, preprocessors * PREPROCESSOR_CPUS)
        self._seen: set[int] = set()

    def run(self) -> Played:
        start_s = self._requests[0].arrival_s
        for serial, request in enumerate(self._requests):
            self.clock.after(request.arrival_s - start_s, self._arrival(request, serial))
        self.clock.run()
        self.played.duration_s = self.clock.now_s
        for engine in self._engines.values():
            engine.scheduler.check_integrity()
            self.played.preemptions += engine.scheduler.stats().preemptions
        if self.played.finished + self.played.refused != self.played.requests:
            raise RuntimeError(f"the replay of {self.played.requests} requests left some behind: {self.played}")
        return self.played

    def ended(self) -> None:
        self._on_end()

    # -- preprocessor --------------------------------------------------------------------------------------------------
    def _arrival(self, request: TraceRequest, serial: int) -> Callable[[], None]:
        return lambda: self._prepare(request, serial)

    def _prepare(self, request: TraceRequest, serial: int) -> None:
        arrived_s = self.clock.now_s
        new = []
        for picture in request.pictures:
            if picture.picture_id not in self._seen:
                self._seen.add(picture.picture_id)
                new.append(self.times.picture_cpu_s(picture.num_slots * self._megapixels_per_slot))
        left = len(new)

        def read() -> None:
            for cpu_s in new:
                self._cores.run(cpu_s, decoded)
            if not new:
                prepared()

        def decoded() -> None:
            nonlocal left
            left -= 1
            if not left:
                prepared()

        def prepared() -> None:
            # The way back to the ingress, and on to the engine; an answer's way to the client is counted there.
            self.clock.after(self.times.call_s, lambda: self._submit(request, serial, arrived_s))

        arrive_s = self.times.receive_s + self.times.call_s / 2
        self.clock.after(arrive_s, lambda: self._cores.run(self.times.request_cpu_s(), read))

    def _submit(self, request: TraceRequest, serial: int, arrived_s: float) -> None:
        sequence = make_sequence(request, serial)
        message = GenerateRequest(
            request_id=sequence.request_id,
            prompt_token_ids=tuple(sequence.prompt_token_ids),
            sampling=SamplingParams(max_tokens=sequence.max_tokens),
            items=tuple(item.media for item in sequence.items),
            namespace=sequence.namespace,
        )
        # The scheduler's clock is that of the engine; the client's began with the ingress.
        sequence.arrival_s = self.clock.now_s
        session = session_id(prompt_key(message))
        (name, *_) = self._engine_placer.rank(session, lambda name: self._engines[name].num_requests)
        self._engines[name].add(sequence, message, arrived_s)

    # -- encoder -------------------------------------------------------------------------------------------------------
    def encode(self, engine: Engine, starts: Sequence[EncodeStart]) -> None:
        calls: dict[str, list[EncodeStart]] = {}
        pending = {name: encoder.load for name, encoder in self._encoders.items()}
        for start in starts:
            name = self._encoder_of(engine, start, pending)
            pending[name] += 1
            calls.setdefault(name, []).append(start)
        for name, call in calls.items():
            slots = sum(start.item.num_slots for start in call)
            delay_s = self.times.patches_transfer_s(slots) + (0.0 if self._colocated else self.times.call_s / 2)
            self.clock.after(delay_s, self._call(engine, self._encoders[name], call))

    def _encoder_of(self, engine: Engine, start: EncodeStart, pending: dict[str, int]) -> str:
        if self._colocated:
            return engine.name.replace("engine", "encoder")
        (name, *_) = self._encoder_placer.rank(session_id(item_key(start.item)), lambda name: pending[name])
        return name

    def _call(self, engine: Engine, encoder: Encoder, starts: Sequence[EncodeStart]) -> Callable[[], None]:
        def begin() -> None:
            for start in starts:
                encoder.encode(start.identity, start.item.num_slots, self._answer(engine, start))
            encoder.start()

        return begin

    def _answer(self, engine: Engine, start: EncodeStart) -> Callable[[], None]:
        delay_s = 0.0
        if not self._colocated:
            delay_s = self.times.call_s / 2 + self.times.rows_transfer_s(start.item.num_slots)
        return lambda: self.clock.after(delay_s, lambda: engine.ready(start))


def _scheduler_config(options: EngineOptions, memory: Memory, requests: Sequence[TraceRequest]) -> SchedulerConfig:
    worst = max((picture.num_slots for request in requests for picture in request.pictures), default=0)
    return EngineConfig(
        model="planned",
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_prefill_tokens_while_decoding=options.max_prefill_tokens_while_decoding,
        block_size=options.block_size,
        encoder_cache_slots=options.encoder_cache_slots,
        # An overload shows as waiting, not as refusals.
        max_queued_requests=0,
        max_queue_s=0.0,
        request_timeout_s=0.0,
    ).resolve(
        ModelLimits(
            max_model_len=options.max_model_len,
            num_blocks=memory.kv_tokens // options.block_size,
            max_item_slots=worst,
            max_item_patches=PATCHES_PER_SLOT * worst,
        )
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
