"""Whatever happens, in whatever order: budgets hold, nothing leaks, everything ends with a reason.

The driver checks each plan (tokens, seats, encodes, resident embeddings, KV contents down to the position); the machine
here makes things happen and, at the end, lets the encoder answer and expects everything to finish.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.errors import InternalError, InvalidRequestError, MediaError, SightlineError
from deployments.lm_engine.plan import StepPlan
from deployments.lm_engine.request import SequenceStatus
from deployments.lm_engine.scheduler import Scheduler
from deployments.messages import GenerateRequest
from tests.unit.lm_engine.host_side import Clock, Driver, Part, config, request_of, sequence

MAX_EXAMPLES = int(os.environ.get("SIGHTLINE_SCHEDULER_EXAMPLES", "2000"))
WORST_ITEM_SLOTS = 6

texts = st.integers(1, 9).map(lambda length: list(range(1, length + 1)))
# Few pictures, so that they repeat; a picture's size follows from its number, as its content would fix it.
pictures = st.integers(0, 5).map(lambda number: (100 + number, number + 1))
prompts = st.lists(st.one_of(texts, pictures), min_size=1, max_size=5)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        tokens=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
        seats=st.sampled_from([1, 2, 4, 6]),
        block_size=st.sampled_from([1, 2, 4]),
        pool_tokens=st.integers(12, 64),
        slots=st.integers(WORST_ITEM_SLOTS, 16),
        slots_per_step=st.integers(WORST_ITEM_SLOTS, 12),
        patches_per_step=st.integers(4 * WORST_ITEM_SLOTS, 40),
        caching=st.booleans(),
        whole_items=st.booleans(),
        priorities=st.booleans(),
        prefill_limit=st.sampled_from([0, 0, 1, 4]),
        max_queue_s=st.sampled_from([0.0, 5.0]),
        overlap=st.booleans(),
    )
    def start(
        self,
        tokens: int,
        seats: int,
        block_size: int,
        pool_tokens: int,
        slots: int,
        slots_per_step: int,
        patches_per_step: int,
        caching: bool,
        whole_items: bool,
        priorities: bool,
        prefill_limit: int,
        max_queue_s: float,
        overlap: bool,
    ) -> None:
        self.clock = Clock()
        limits = config(
            max_num_batched_tokens=max(tokens, WORST_ITEM_SLOTS) if whole_items else tokens,
            max_num_seqs=seats,
            max_prefill_tokens_while_decoding=prefill_limit,
            max_model_len=64,
            block_size=block_size,
            num_blocks=max(1, pool_tokens // block_size),
            encoder_cache_slots=slots,
            max_encoder_slots_per_step=slots_per_step,
            max_encoder_patches_per_step=patches_per_step,
            enable_prefix_caching=caching,
            disable_chunked_mm_input=whole_items,
            scheduling_policy="priority" if priorities else "fcfs",
            max_queued_requests=12,
            max_queue_s=max_queue_s,
        )
        self.driver = Driver(Scheduler(limits, self.clock), overlap)
        self.scheduler = self.driver.scheduler
        self.count = 0
        self.ended_otherwise: list[str] = []

    # -- what callers do -----------------------------------------------------------------------------------------------
    @rule(
        parts=prompts,
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "", "t"]),
        timeout_s=st.sampled_from([None, None, None, 3.0]),
    )
    def arrive(
        self, parts: list[Part], max_tokens: int, n: int, priority: int, tenant: str, timeout_s: float | None
    ) -> None:
        self.count += 1
        name = f"r{self.count}"
        choices = [
            sequence(
                name if index == 0 else f"{name}#{index}",
                *parts,
                index=index,
                max_tokens=max_tokens,
                priority=priority,
                namespace=tenant,
                arrival_s=self.clock.now_s,
                deadline_s=None if timeout_s is None else self.clock.now_s + timeout_s,
            )
            for index in range(n)
        ]
        refusal = self._refusal(request_of(choices[0], n=n))
        if refusal is not None:
            assert refusal.message
            assert refusal.status == 400 or (refusal.status in (429, 503) and refusal.retry_after_s)
            return
        for choice in choices:
            self.driver.add(choice)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        live = [name for name, seq in self.driver.sequences.items() if not seq.is_finished]
        if live:
            name = data.draw(st.sampled_from(live))
            assert self.scheduler.abort(name) is self.driver.sequences[name]
            assert self.scheduler.abort(name) is None
            self.ended_otherwise.append(name)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    # -- what the engine does ------------------------------------------------------------------------------------------
    @rule(stop=st.integers(0, 5), leave_inside=st.booleans(), data=st.data())
    def step(self, stop: int, leave_inside: bool, data: st.DataObject) -> None:
        """A step in which the sequence at `stop` hits its stop token, and someone may leave while it runs."""
        self.driver.schedule()
        if leave_inside:
            self.leave(data)
        names = [chunk.sequence_id for chunk in self.driver.to_resolve.chunks if chunk.samples]
        self.driver.update(stop=names[stop : stop + 1])

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.schedule()
            self.driver.update()
            self.scheduler.check_integrity()

    @rule()
    def step_that_fails(self) -> None:
        """The plan is made but its results never come."""
        self.driver.schedule()
        self.driver.plan = StepPlan()

    # -- what the encoder does -----------------------------------------------------------------------------------------
    @precondition(lambda self: self.driver.in_flight)
    @rule(data=st.data())
    def encode_one(self, data: st.DataObject) -> None:
        self.driver.encoded(data.draw(st.sampled_from(sorted(self.driver.in_flight))))

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def encode_all(self) -> None:
        self.driver.encoded()

    @precondition(lambda self: self.driver.in_flight)
    @rule(bad_item=st.booleans(), data=st.data())
    def encode_fails(self, bad_item: bool, data: st.DataObject) -> None:
        start = self.driver.in_flight.pop(data.draw(st.sampled_from(sorted(self.driver.in_flight))))
        error = MediaError("the picture is broken") if bad_item else InternalError("the encoder died")
        failed = self.scheduler.on_embedding_failed(start.identity, error, start.ticket)
        for seq in failed:
            assert any(item.identity == start.identity for item in seq.items)
            assert seq.error is error
            if not bad_item:
                assert seq.request_id == start.sequence_id.split("#")[0]
        self.ended_otherwise += [seq.sequence_id for seq in failed]

    @precondition(lambda self: self.driver.cancelled)
    @rule(works=st.booleans())
    def late_answer(self, works: bool) -> None:
        """An encode that was given up answers all the same."""
        start = self.driver.cancelled.pop()
        if not works:
            error = InvalidRequestError("too late")
            assert self.scheduler.on_embedding_failed(start.identity, error, start.ticket) == []
        elif self.scheduler.on_embedding_ready(start.identity):
            self.driver.store.add(start.identity)

    def _refusal(self, request: GenerateRequest) -> SightlineError | None:
        try:
            self.scheduler.check_admission(request)
        except SightlineError as error:
            return error
        return None

    # -- what must hold ------------------------------------------------------------------------------------------------
    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver, scheduler = self.driver, self.scheduler
        live = [seq for seq in driver.sequences.values() if not seq.is_finished]
        # Alone, a sequence needs a step for each token and one for each encode; each preemption is for an older one's
        # progress, so the whole lot needs no more than all orders of the few there are.
        work = sum(seq.num_tokens + seq.max_tokens + 2 * len(seq.items) for seq in live)
        driver.run(max_steps=10 + work * (1 + len(live)))
        stats = scheduler.stats()
        assert stats.stalled_steps == 0
        assert (stats.running, stats.waiting) == (0, 0)
        assert (stats.blocks_used, stats.slots_held, stats.slots_ahead) == (0, 0, 0)
        # Only an encode whose item a given-up one has brought already may still be under way.
        assert driver.in_flight.keys() <= driver.store
        ended = [seq.sequence_id for seq in driver.ended] + self.ended_otherwise
        assert sorted(ended) == sorted(driver.sequences), "each sequence ends exactly once"
        for seq in driver.sequences.values():
            assert seq.finish_reason is not None
            assert (seq.error is not None) == (seq.finish_reason == "error")
            if seq.status == SequenceStatus.FINISHED:
                assert seq.finish_reason == ("stop" if seq.stop_reason is not None else "length")
                assert seq.finish_reason == "stop" or seq.num_output_tokens == seq.max_tokens


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=MAX_EXAMPLES,
    stateful_step_count=35,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
