"""Decides what each step computes. Knows no tensors, no text, no encoder; all time comes from the injected clock.

One idea: every sequence has computed and known tokens, and a step hands out a budget of tokens to close the gaps. A
decode is a gap of one, a prefill a longer one, a preempted sequence one that was closed before.

    1 running sequences: decodes first, so that they never wait behind a prefill, then prefills, each by rank
    2 waiting sequences: preempted ones, then tenants by turns, while tokens, seats, KV blocks and slots last
    3 encodes ahead: for sequences still waiting, in slots nobody holds

Nobody starves: ranks age (config), a younger sequence never keeps what an older one is denied (blocks: preemption;
slots: encode_budget.py), and whoever is denied blocks in the queue lets nobody pass.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping

from cache_service.identity import EmbeddingIdentity
from deployments.errors import DeadlineError, InternalError, InvalidRequestError, OverloadedError, SightlineError
from deployments.lm_engine.admission import QueueState, ServiceRate, find_denial, find_misfit, retry_after_s
from deployments.lm_engine.config import SchedulerConfig
from deployments.lm_engine.deadlines import Deadlines
from deployments.lm_engine.embed_cache import EmbedCache
from deployments.lm_engine.encode_budget import EncodeBudget
from deployments.lm_engine.kv_manager import KVManager
from deployments.lm_engine.plan import SampledToken, SequenceChunk, StepPlan, pending_token
from deployments.lm_engine.queue import WaitingQueue
from deployments.lm_engine.request import Rank, Sequence, SequenceStatus
from deployments.lm_engine.siblings import Siblings
from deployments.lm_engine.stats import DenialCounter, SchedulerStats
from deployments.messages import FinishReason, GenerateRequest

MAX_OVERTAKEN = 32
"""Waiting sequences that one step looks past because their next item is denied."""
AHEAD_WINDOW = 32
"""Waiting sequences for which encodes are started ahead."""

FinishDecision = tuple[FinishReason, int | str | None]
"""Why a sequence ends, and the stop string or token id that ended it."""

_RUNNING = SequenceStatus.RUNNING


class _Step:
    """What one step has given away so far."""

    __slots__ = ("blocks_denied", "preempted", "promised_blocks", "scheduled", "tokens_left")

    def __init__(self, num_tokens: int) -> None:
        self.tokens_left = num_tokens
        self.scheduled: dict[Sequence, int] = {}
        self.preempted: list[str] = []
        self.promised_blocks = 0
        """Blocks that running prefills still lack for the tokens they know."""
        self.blocks_denied = False

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduled[sequence] = num_tokens
        self.tokens_left -= num_tokens

    def take_back(self, sequence: Sequence) -> None:
        self.tokens_left += self.scheduled.pop(sequence, 0)


class Scheduler:
    """Host side of one LM engine. Not thread-safe: one loop calls everything.

        scheduler.check_admission(request); scheduler.add(sequence)
        plan = scheduler.schedule()
        ... drop plan.evicted_embeds, start plan.encode, run plan.chunks, sample, decide what stops ...
        for sequence in scheduler.update(plan, sampled, finished): ...

    `update` is `advance` and then `resolve`. They may come apart, so that a step is prepared while the one before is
    still being computed: schedule n+1, resolve n, advance n+1. A sampled token is then `pending_token` in between. Of
    what step n+1 computes for a sequence that turns out to have ended with step n nothing is kept; the blocks and
    slots that it frees are safe to give away, since the device runs steps in their order.

    `schedule` and `advance` alternate; a plan that was never advanced counts as not run. A plan without chunks while
    `has_work` means that everything waits for the encoder: wait for a result, an arrival or a deadline, don't spin.

    Args:
        config: All limits.
        clock: Seconds; the time scale of `arrival_s` and `deadline_s` (Unix time in production).
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self._clock = clock
        self._denials = DenialCounter()
        self._kv = KVManager(config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching)
        self._embeds = EmbedCache(config.encoder_cache_slots)
        self._encodes = EncodeBudget(
            self._embeds,
            max_slots_per_step=config.max_encoder_slots_per_step,
            max_patches_per_step=config.max_encoder_patches_per_step,
            denials=self._denials,
        )
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        """Sorted by rank."""
        self._sequences: dict[str, Sequence] = {}
        """All that have not finished, by id."""
        self._siblings = Siblings()
        self._deadlines = Deadlines(self._sequences)
        self._goes_first: Sequence | None = None
        """Denied an item that must not be split; in the next step it comes before the decodes."""
        self._ended: list[Sequence] = []
        """Ended by a deadline since the last update."""
        self._service_rate = ServiceRate()
        self._num_added = 0
        self._num_pending = 0
        """Tokens that are drawn but not resolved."""
        self._stalled_since_s: float | None = None
        # Totals for SchedulerStats.
        self._steps = 0
        self._scheduled_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._expired = 0
        self._stalled_steps = 0

    # -- requests come and go ------------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to tell: sequences, endings by deadline, or evictions, which may mean
        that an encode is to be cancelled."""
        return bool(self._sequences or self._ended or self._embeds.has_evicted)

    def check_admission(self, request: GenerateRequest) -> None:
        """Raise, and count, why `request` cannot be admitted (see admission.py); changes nothing else."""
        denial = find_denial(request, self.config, self._queue_state(request.namespace))
        if denial is not None:
            self._denials.rejected(denial.budget)
            raise denial.error

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Choices of one request come in order of their index.

        Raises:
            ValueError: The id is in use.
            InvalidRequestError: The sequence could never run; `check_admission` would have said so.
        """
        if sequence.sequence_id in self._sequences:
            raise ValueError(f"sequence id {sequence.sequence_id!r} is in use")
        media = [item.media for item in sequence.items]
        misfit = find_misfit(sequence.num_prompt_tokens, sequence.max_tokens, media, self.config)
        if misfit is not None:
            self._denials.rejected(misfit.budget)
            raise misfit.error
        self._num_added += 1
        sequence.rank = self._rank(sequence)
        if sequence.deadline_s is None and self.config.request_timeout_s:
            sequence.deadline_s = sequence.arrival_s + self.config.request_timeout_s
        self._sequences[sequence.sequence_id] = sequence
        self._watch_deadlines(sequence)
        if not (self._kv.caches_prefixes and self._siblings.join(sequence)):
            self._waiting.push(sequence)

    def abort(self, sequence_id: str, reason: FinishReason = "abort") -> Sequence | None:
        """End a sequence now and free what it holds; None if it is unknown or has ended."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, SequenceStatus.ABORTED, reason)
        return sequence

    def fail(self, sequence_id: str, error: SightlineError) -> Sequence | None:
        """End a sequence now because of `error`; None if it is unknown or has ended."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, SequenceStatus.FAILED, "error", error=error)
        return sequence

    # -- one step ------------------------------------------------------------------------------------------------------
    def schedule(self) -> StepPlan:
        """Decide the next step. Blocks, slots and evictions are settled; progress counts only after `update`."""
        now = self._clock()
        self._end_expired(now)
        self._encodes.begin_step()
        step = _Step(self.config.max_num_batched_tokens)
        self._schedule_running(step)
        self._schedule_waiting(step, now)
        self._start_encodes_ahead()
        plan = StepPlan(
            chunks=self._chunks(step),
            encode=self._encodes.take_starts(),
            evicted_embeds=self._embeds.drain_evicted(),
            preempted=tuple(step.preempted),
        )
        self._steps += 1
        self._scheduled_tokens += sum(step.scheduled.values())
        self._watch_progress(plan, now)
        return plan

    def update(
        self, plan: StepPlan, sampled: Iterable[SampledToken], finished: Mapping[str, FinishDecision]
    ) -> list[Sequence]:
        """Enter what a step computed: `advance`, then `resolve`."""
        self.advance(plan)
        return self.resolve(plan, sampled, finished)

    def advance(self, plan: StepPlan) -> None:
        """Enter the progress of a step that is certain to be computed; its tokens need not be known yet.

        Args:
            plan: The answer of the last `schedule`. The step before it is resolved.
        """
        block_size = self.config.block_size
        sequences = self._sequences
        sampling_row = -1
        for chunk in plan.chunks:
            if chunk.samples:
                sampling_row += 1
            sequence = sequences.get(chunk.sequence_id)
            if sequence is None or sequence.status is not _RUNNING:
                continue
            start, stop = chunk.start, chunk.start + len(chunk.token_ids)
            sequence.num_computed_tokens = stop
            if sequence.first_item < len(sequence.items):
                self._encodes.release_computed(sequence)
            if stop // block_size > start // block_size:
                self._kv.commit(sequence)
            if self._siblings.any_waiting and stop >= sequence.num_prompt_tokens:
                for sibling in self._siblings.release(sequence):
                    self._waiting.push(sibling)
            if chunk.samples:
                sequence.token_ids.append(pending_token(sampling_row))
                self._num_pending += 1

    def resolve(
        self, plan: StepPlan, sampled: Iterable[SampledToken], finished: Mapping[str, FinishDecision]
    ) -> list[Sequence]:
        """Enter the tokens of a step that was advanced.

        Args:
            sampled: One token for each chunk with `samples`; those of sequences that have ended meanwhile are ignored.
            finished: Sequences that the stop checker ended with this token.

        Returns:
            The sequences that ended: by `finished`, by length, or by a deadline since the last call.
        """
        tokens = {token.sequence_id: token.token_id for token in sampled}
        ended = self.take_ended()
        self._num_pending = 0
        for row, chunk in enumerate(chunk for chunk in plan.chunks if chunk.samples):
            sequence = self._sequences.get(chunk.sequence_id)
            place = chunk.start + len(chunk.token_ids)
            # A sequence of the same id may have come after the one of this step had gone.
            if sequence is None or sequence.token_ids[place:] != [pending_token(row)]:
                continue
            if self._enter_token(sequence, tokens.get(chunk.sequence_id), finished):
                ended.append(sequence)
        return ended

    def take_ended(self) -> list[Sequence]:
        """Sequences that a deadline has ended since the last call, or since the last `resolve`."""
        ended, self._ended = self._ended, []
        return ended

    # -- the encoder answers -------------------------------------------------------------------------------------------
    def on_embedding_ready(self, identity: EmbeddingIdentity) -> bool:
        """An embedding has arrived. False: nobody reserved it any more, so drop it; else keep it until evicted."""
        return self._embeds.mark_ready(identity)

    def on_embedding_failed(
        self, identity: EmbeddingIdentity, error: SightlineError, ticket: int | None = None
    ) -> list[Sequence]:
        """An encode came to nothing. Returns the sequences that ended for it, with `error` in them.

        A bad item (InvalidRequestError) ends all that hold it. Any other error ends the request the encode was
        started for; others that hold the item ask for it again, with their own payload.

        Args:
            ticket: Of the `EncodeStart`; a stale one is ignored.
        """
        entry = self._embeds.get(identity)
        if entry is None or entry.ready or ticket not in (None, entry.ticket):
            return []
        holders = [sequence for sequence in self._running if self._encodes.holds(sequence, identity)]
        requester = self._sequences.get(entry.requester)
        guilty = list(holders) if isinstance(error, InvalidRequestError) else []
        if requester is not None and requester not in guilty:
            guilty.append(requester)
        requests = {sequence.request_id for sequence in guilty}
        guilty += [follower for request_id in requests for follower in self._siblings.take_followers(request_id)]
        for sequence in holders:
            self._encodes.release_from(sequence, identity)
        self._embeds.discard(identity)
        for sequence in guilty:
            self._end(sequence, SequenceStatus.FAILED, "error", error=error)
        return guilty

    # -- operators -----------------------------------------------------------------------------------------------------
    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""
        return self._kv.reset_prefix_cache(self._running)

    def stats(self) -> SchedulerStats:
        now = self._clock()
        pool, embeds = self._kv.pool, self._embeds
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            waiting_tokens=sum(
                _tokens_to_compute(s) for s in self._sequences.values() if s.sequence_id in self._waiting
            ),
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_keys,
            slots_total=embeds.num_slots,
            slots_held=embeds.held_slots,
            slots_ahead=embeds.ahead_slots,
            slots_idle=embeds.idle_slots,
            denials=self._denials.snapshot(),
            steps=self._steps,
            scheduled_tokens=self._scheduled_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            block_evictions=pool.num_evictions,
            embed_evictions=embeds.num_evictions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            embed_hits=self._encodes.num_hits,
            encode_starts=self._encodes.num_starts,
            expired=self._expired,
            stalled_steps=self._stalled_steps,
            stalled_s=0.0 if self._stalled_since_s is None else now - self._stalled_since_s,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block, slot and sequence is in exactly one place."""
        self._kv.pool.check_integrity()
        self._embeds.check_integrity()
        self._waiting.check_integrity()
        assert self._running == sorted(self._running, key=_rank), "running sequences are out of order"
        uses: dict[int, int] = {}
        holds: dict[EmbeddingIdentity, int] = {}
        for sequence in self._sequences.values():
            assert sequence.sequence_id in self._waiting or sequence.status is _RUNNING or sequence in self._siblings
            assert sequence.status is _RUNNING or not sequence.block_ids, "a waiting sequence holds blocks"
            assert sequence.status is _RUNNING or not sequence.held_end, "a waiting sequence holds embeddings"
            for block in sequence.block_ids:
                uses[block] = uses.get(block, 0) + 1
            for item in sequence.items[sequence.first_item : sequence.held_end]:
                holds[item.identity] = holds.get(item.identity, 0) + 1
        assert {s.sequence_id for s in self._running} == {
            s.sequence_id for s in self._sequences.values() if s.status is _RUNNING
        }, "running list and statuses disagree"
        pool = self._kv.pool
        assert all(pool.ref_count(block) == uses.get(block, 0) for block in range(pool.num_blocks)), "block leaked"
        assert self._embeds.holders() == holds, "embedding holds leaked"

    # -- running sequences ---------------------------------------------------------------------------------------------
    def _schedule_running(self, step: _Step) -> None:
        first, self._goes_first = self._goes_first, None
        if first is not None and first.status is _RUNNING:
            self._schedule_prefill(first, step)
        others = self._schedule_decodes(step)
        prefill_limit = self.config.max_prefill_tokens_while_decoding
        if prefill_limit and step.scheduled:
            step.tokens_left = min(step.tokens_left, prefill_limit)
        for sequence in others:
            if sequence.status is _RUNNING and sequence is not first:
                self._schedule_prefill(sequence, step)
        if step.preempted:
            self._running = [sequence for sequence in self._running if sequence.status is _RUNNING]

    def _schedule_decodes(self, step: _Step) -> list[Sequence]:
        """One token for each sequence that lacks only one; returns the others."""
        block_size = self.config.block_size
        scheduled = step.scheduled
        others = []
        for sequence in self._running:
            start = sequence.num_computed_tokens
            if len(sequence.token_ids) >= sequence.token_limit:
                continue  # it ends with the token that is on its way
            if len(sequence.token_ids) - start != 1 or sequence.first_item < len(sequence.items):
                others.append(sequence)
            elif step.tokens_left and sequence.status is _RUNNING:
                has_room = start < len(sequence.block_ids) * block_size
                if has_room or self._make_room(sequence, start + 1, step):
                    scheduled[sequence] = 1
                    step.tokens_left -= 1
        return others

    def _schedule_prefill(self, sequence: Sequence, step: _Step) -> None:
        if sequence.held_end < len(sequence.items):
            self._encodes.hold_items(sequence)
        num_tokens = self._chunk_tokens(sequence, step.tokens_left)
        if num_tokens and self._make_room(sequence, sequence.num_computed_tokens + num_tokens, step):
            step.give(sequence, num_tokens)
        if sequence.status is _RUNNING:
            step.promised_blocks += self._kv.missing_blocks(sequence, sequence.num_tokens)

    def _chunk_tokens(self, sequence: Sequence, tokens_left: int) -> int:
        """Tokens of the sequence's next chunk: what is left of the budget, up to the first missing embedding."""
        start = sequence.num_computed_tokens
        stop = sequence.num_tokens
        if sequence.first_item < len(sequence.items):
            stop = min(stop, self._encodes.ready_end(sequence))
        if stop - start > tokens_left:
            self._denials.deferred("step_tokens")
            stop = start + tokens_left
            if self.config.disable_chunked_mm_input:
                stop = self._before_split_item(sequence, start, stop)
        return max(0, stop - start)

    def _before_split_item(self, sequence: Sequence, start: int, stop: int) -> int:
        """`stop`, or an earlier position if an item would be split there."""
        for item in sequence.items[sequence.first_item :]:
            if item.offset < stop < item.end:
                if item.offset <= start and self._goes_first is None:
                    self._goes_first = sequence
                return max(start, item.offset)
        return stop

    def _make_room(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Blocks for positions [0, num_tokens), taken from younger sequences if need be.

        Without any younger one it keeps its blocks and waits: those that have the rest are older, and end. But it
        must not keep embeddings then: an older one may wait for their slots, having the blocks that this one lacks.
        """
        while not self._kv.can_allocate(sequence, num_tokens):
            victim = self._find_victim(sequence)
            if victim is None:
                self._denials.deferred("kv_blocks")
                step.blocks_denied = True
                if sequence.held_end > sequence.first_item:
                    self._preempt(sequence, step)
                return False
            self._preempt(victim, step)
        self._kv.allocate(sequence, num_tokens)
        return True

    def _find_victim(self, sequence: Sequence) -> Sequence | None:
        """The youngest running sequence that has blocks, if it is younger than `sequence`."""
        for candidate in reversed(self._running):
            if candidate is sequence:
                return None
            if candidate.block_ids and candidate.status is _RUNNING:
                return candidate
        return None

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take everything back; the sequence recomputes all its tokens later."""
        step.take_back(sequence)
        step.preempted.append(sequence.sequence_id)
        self._encodes.release_all(sequence)
        self._kv.free(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._preemptions += 1
        self._waiting.push(sequence)

    # -- waiting sequences ---------------------------------------------------------------------------------------------
    def _schedule_waiting(self, step: _Step, now: float) -> None:
        if step.preempted or step.blocks_denied:
            return  # what was just taken from one must not go to another
        passed_over: list[Sequence] = []
        while step.tokens_left and len(passed_over) < MAX_OVERTAKEN:
            if len(self._running) >= self.config.max_num_seqs:
                if len(self._waiting):
                    self._denials.deferred("sequences")
                break
            sequence = self._waiting.pop()
            if sequence is None:
                break
            if not self._admit(sequence, step, now):
                passed_over.append(sequence)
                if step.blocks_denied:
                    break
        self._waiting.restore(passed_over)

    def _admit(self, sequence: Sequence, step: _Step, now: float) -> bool:
        """Let a waiting sequence run if all its tokens have a place and the item it needs first can be held."""
        if sequence.items and not self._encodes.admits_items:
            return False
        prefix = self._kv.find_prefix(sequence)
        spare = step.promised_blocks + (self.config.watermark_blocks if self._running else 0)
        if not self._kv.can_allocate(sequence, sequence.num_tokens, prefix=prefix, spare=spare):
            self._denials.deferred("kv_blocks")
            step.blocks_denied = True
            return False
        num_cached_tokens = len(prefix) * self.config.block_size
        if sequence.items and not self._encodes.begin(sequence, num_cached_tokens):
            return False
        self._kv.adopt_prefix(sequence, prefix)
        if sequence.first_scheduled_s is None:
            self._enter_first_run(sequence, num_cached_tokens, now)
        sequence.status = _RUNNING
        insort(self._running, sequence, key=_rank)
        self._schedule_prefill(sequence, step)
        return True

    def _enter_first_run(self, sequence: Sequence, num_cached_tokens: int, now: float) -> None:
        sequence.first_scheduled_s = now
        sequence.num_cached_tokens = num_cached_tokens
        self._prefix_query_tokens += sequence.num_prompt_tokens
        self._prefix_hit_tokens += num_cached_tokens
        self._waiting.charge(sequence.namespace, prompt_tokens=sequence.num_prompt_tokens - num_cached_tokens)
        self._service_rate.record(now)

    def _start_encodes_ahead(self) -> None:
        if not self._waiting.num_with_items or not self._encodes.admits_items:
            return
        ahead = [sequence for sequence in self._waiting.peek(AHEAD_WINDOW) if sequence.items]
        for sequence in ahead:
            if sequence.expected_cached_tokens is None:
                sequence.expected_cached_tokens = len(self._kv.find_prefix(sequence)) * self.config.block_size
        self._encodes.start_ahead((sequence, sequence.expected_cached_tokens or 0) for sequence in ahead)

    # -- the plan ------------------------------------------------------------------------------------------------------
    def _chunks(self, step: _Step) -> tuple[SequenceChunk, ...]:
        chunks = []
        for sequence, num_tokens in step.scheduled.items():
            start = sequence.num_computed_tokens
            stop = start + num_tokens
            token_ids = sequence.token_ids
            chunks.append(
                SequenceChunk(
                    sequence.sequence_id,
                    start,
                    token_ids[start:stop],
                    sequence.positions.slice(start, stop),
                    sequence.block_ids,
                    stop == len(token_ids),
                    EncodeBudget.slices(sequence, start, stop) if sequence.first_item < len(sequence.items) else (),
                )
            )
        return tuple(chunks)

    def _watch_progress(self, plan: StepPlan, now: float) -> None:
        """Note steps that schedule nothing though work is queued; without an encode in flight that is a fault."""
        if plan.chunks or not self._sequences:
            self._stalled_since_s = None
            return
        if self._stalled_since_s is None:
            self._stalled_since_s = now
        if not (plan.encode or plan.preempted or self._num_pending or self._embeds.num_pending):
            self._stalled_steps += 1

    # -- the end of a sequence -----------------------------------------------------------------------------------------
    def _enter_token(self, sequence: Sequence, token_id: int | None, finished: Mapping[str, FinishDecision]) -> bool:
        """Put a sampled token in the place of the pending one; True if the sequence ends with it."""
        if token_id is None:
            sequence.token_ids.pop()
            error = InternalError("the step returned no token for a chunk that samples")
            self._end(sequence, SequenceStatus.FAILED, "error", error=error)
            return True
        sequence.token_ids[-1] = token_id
        self._generated_tokens += 1
        if sequence.sequence_id in finished:
            reason, stop_reason = finished[sequence.sequence_id]
            self._end(sequence, SequenceStatus.FINISHED, reason, stop_reason=stop_reason)
            return True
        if len(sequence.token_ids) >= sequence.token_limit:
            self._end(sequence, SequenceStatus.FINISHED, "length")
            return True
        return False

    def _end(
        self,
        sequence: Sequence,
        status: SequenceStatus,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: SightlineError | None = None,
    ) -> None:
        """Free all that a sequence holds and forget it."""
        del self._sequences[sequence.sequence_id]
        if sequence.status is _RUNNING:
            self._running.remove(sequence)
            self._encodes.release_all(sequence)
            self._kv.free(sequence)
        elif sequence.sequence_id in self._waiting:
            self._waiting.remove(sequence)
        if status is not SequenceStatus.FINISHED:
            self._encodes.cancel_pending(sequence, self._sequences)
        self._waiting.charge(sequence.namespace, output_tokens=sequence.num_output_tokens)
        sequence.status = status
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        successor = self._siblings.leave(sequence)
        if successor is not None:
            self._waiting.push(successor)

    # -- time ----------------------------------------------------------------------------------------------------------
    def _rank(self, sequence: Sequence) -> Rank:
        if self.config.scheduling_policy == "fcfs":
            return (0.0, sequence.arrival_s, self._num_added)
        if self.config.priority_aging_s:
            return (0.0, sequence.arrival_s + sequence.priority * self.config.priority_aging_s, self._num_added)
        return (float(sequence.priority), sequence.arrival_s, self._num_added)

    def _watch_deadlines(self, sequence: Sequence) -> None:
        if self.config.max_queue_s:
            self._deadlines.watch(sequence.arrival_s + self.config.max_queue_s, sequence)
        if sequence.deadline_s is not None:
            self._deadlines.watch(sequence.deadline_s, sequence)

    def _end_expired(self, now: float) -> None:
        for sequence in self._deadlines.due(now):
            if sequence.deadline_s is not None and sequence.deadline_s <= now:
                self._expire(sequence, DeadlineError("the request's deadline passed before it was finished"))
            elif sequence.first_scheduled_s is None:
                message = f"the request waited {now - sequence.arrival_s:.1f} s; the server lets none wait longer"
                retry_s = retry_after_s(len(self._waiting), self._service_rate.per_s(now))
                self._denials.rejected("queue")
                self._expire(sequence, OverloadedError(message, retry_after_s=retry_s))

    def _expire(self, sequence: Sequence, error: SightlineError) -> None:
        self._expired += 1
        self._end(sequence, SequenceStatus.FAILED, "error", error=error)
        self._ended.append(sequence)

    def _queue_state(self, namespace: str) -> QueueState:
        return QueueState(
            num_waiting=len(self._sequences) - len(self._running),
            num_waiting_of_tenant=self._waiting.num_of(namespace),
            num_tenants=self._waiting.num_tenants,
            served_per_s=self._service_rate.per_s(self._clock()),
        )


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _tokens_to_compute(sequence: Sequence) -> int:
    return max(0, sequence.num_tokens - max(sequence.num_computed_tokens, sequence.expected_cached_tokens or 0))
