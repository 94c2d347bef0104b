"""The engine: schedule, run, sample, update. Synchronous; one thread calls everything. Knows no event loop and no RPC.

add ─▶ scheduler ─plan─▶ runner ─logits─▶ sampler ─tokens─▶ choices ─deltas─▶ caller
              └─────── encodes to start and cancel ─▶ `encodes`, whose results come back by `put_embedding`

With `overlap` a step is queued on the device before the tokens of the one before are read, so that the device never
waits for the host:

    device   │ step n        │ step n+1      │ step n+2
    host      ▲ queue n+1, read n ▲ queue n+2, read n+1
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from cache_service.identity import EmbeddingIdentity, EncoderFingerprint, embedding_identity
from deployments.errors import InternalError, InvalidRequestError, SightlineError
from deployments.lm_engine.choice import Choice
from deployments.lm_engine.detokenizer import make_detokenizer
from deployments.lm_engine.engine_stats import EngineCounters, EngineStats
from deployments.lm_engine.families.positions import PositionRule
from deployments.lm_engine.grammar import Grammar
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import EncodeStart, SampledToken, StepPlan
from deployments.lm_engine.request import Sequence, SequenceItem
from deployments.lm_engine.sampler import PendingSamples, Sample, Sampler, SamplingState
from deployments.lm_engine.scheduler import FinishDecision, Scheduler
from deployments.lm_engine.stats import SchedulerStats
from deployments.lm_engine.stop_checker import TokenStop
from deployments.lm_engine.tokenizer import TokenDecoder
from deployments.messages import FinishReason, GenerateRequest, SequenceDelta

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """Embeddings that one sequence wants now."""

    request_id: str
    namespace: str
    deadline_s: float | None
    starts: tuple[EncodeStart, ...]


class Encodes(Protocol):
    """Where the engine's wishes for embeddings go. Must return at once; called by the engine's thread."""

    def handle(self, cancelled: tuple[EmbeddingIdentity, ...], batches: tuple[EncodeBatch, ...]) -> None:
        """First cancel what is still in flight, then start: the same item may be in both."""


@dataclass(frozen=True, slots=True)
class Output:
    """A delta and the request it belongs to."""

    request_id: str
    delta: SequenceDelta


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: list[Output]
    idle: bool
    """Nothing was computed: everything waits for the encoder, an arrival or a deadline."""
    failed: bool = False
    """The step raised; what was in it has ended with an error."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that is queued on the device."""

    plan: StepPlan
    sampling: tuple[Choice, ...]
    samples: PendingSamples | None
    """One for each of `sampling`."""

    @property
    def must_be_read(self) -> bool:
        """Whether a next step of these sequences needs more of this one than its tokens' place on the device."""
        return any(choice.sampling.needs_last_token for choice in self.sampling)


class Engine:
    """Args:
    make_scheduler: Makes an empty scheduler; called again if a fault has left the present one inconsistent.
    encodes: Told which encodes to start and to cancel.
    fingerprint: Of the encoder whose embeddings this engine pulls; part of every embedding's and KV block's key.
    eos_token_ids: Tokens that end a text.
    overlap: Prepare a step while the one before is computed. A sequence that ends then has one row computed in vain.
    clock: Unix time in seconds.
    """

    def __init__(
        self,
        *,
        make_scheduler: Callable[[], Scheduler],
        runner: ModelRunner,
        sampler: Sampler,
        encodes: Encodes,
        decoder: TokenDecoder,
        position_rule: PositionRule,
        fingerprint: EncoderFingerprint,
        eos_token_ids: tuple[int, ...],
        overlap: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._runner, self._sampler, self._encodes = runner, sampler, encodes
        self._decoder, self._position_rule, self._fingerprint = decoder, position_rule, fingerprint
        self._eos_token_ids = eos_token_ids
        self._overlap, self._clock = overlap, clock
        self._in_flight: _InFlight | None = None
        self._choices: dict[str, Choice] = {}
        """All that have not ended, by sequence id."""
        self._by_request: dict[str, set[str]] = {}
        self._counters = EngineCounters()

    # -- requests come and go ------------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def validate(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError for options that this model cannot honour. Reads nothing that changes."""
        vocab_size = self._runner.vocab_size
        ids = request.prompt_token_ids
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequestError(f"prompt token ids must be in [0, {vocab_size})", param="prompt")
        for token_id, _ in request.sampling.logit_bias:
            if not 0 <= token_id < vocab_size:
                message = f"logit_bias names token {token_id}; token ids are in [0, {vocab_size})"
                raise InvalidRequestError(message, param="logit_bias")

    def add(self, request: GenerateRequest, grammars: tuple[Grammar, ...] = ()) -> None:
        """Queue all choices of a request.

        Args:
            grammars: One fresh grammar per choice if `request.sampling.grammar` is set.

        Raises:
            InvalidRequestError: It can never run, or its id is in use.
            OverloadedError, RateLimitError: There is no room in the queue now.
        """
        if request.request_id in self._by_request:
            raise InvalidRequestError("a request with this id is running already", param="request_id")
        self.validate(request)
        self._scheduler.check_admission(request)
        for choice in self._make_choices(request, grammars):
            self._scheduler.add(choice.sequence)
            self._choices[choice.sequence.sequence_id] = choice
            self._by_request.setdefault(request.request_id, set()).add(choice.sequence.sequence_id)

    def abort(self, request_id: str) -> None:
        """End a request without a further delta; unknown ids are ignored."""
        for sequence_id in tuple(self._by_request.get(request_id, ())):
            self._scheduler.abort(sequence_id)
            self._forget(self._choices[sequence_id], "abort")

    # -- one step ------------------------------------------------------------------------------------------------------
    def step(self) -> StepResult:
        """Advance everything that can advance by one step. A fault in it ends the sequences of the step alone."""
        outputs, touched = list[Output](), list[StepPlan]()
        before = self._in_flight
        try:
            plan = self._scheduler.schedule()
            touched.append(plan)
            self._request_encodes(plan)
            queued = self._queue(plan)
            if before is not None:
                touched.append(before.plan)
                self._in_flight = None
                self._read(before, outputs)
            self._scheduler.advance(plan)
            if self._overlap and not queued.must_be_read:
                self._in_flight = queued
            else:
                self._read(queued, outputs)
            outputs += self._end_late(self._scheduler.take_ended())
        except Exception as exc:
            _LOG.exception("a step failed")
            self._recover(touched, exc, outputs)
            return StepResult(outputs, idle=False, failed=True)
        self._counters.steps += 1
        return StepResult(outputs, idle=not plan.chunks and before is None)

    def _queue(self, plan: StepPlan) -> _InFlight:
        """Queue a step and its sampling on the device."""
        previous = self._in_flight.samples if self._in_flight is not None else None
        logits = self._runner.run(plan, None if previous is None else previous.tokens)
        sampling = tuple(self._choices[chunk.sequence_id] for chunk in plan.chunks if chunk.samples)
        if not sampling:
            return _InFlight(plan, (), None)
        return _InFlight(plan, sampling, self._sampler.draw([choice.sampling for choice in sampling], logits))

    def _read(self, step: _InFlight, outputs: list[Output]) -> None:
        """Wait for a step that has been advanced, and enter its tokens."""
        samples = [] if step.samples is None else step.samples.wait()
        tokens, finished = self._advance(zip(step.sampling, samples, strict=True), outputs)
        outputs += self._end_late(self._scheduler.resolve(step.plan, tokens, finished))

    def _request_encodes(self, plan: StepPlan) -> None:
        """Ask for the plan's embeddings, all of one sequence in one request."""
        if not (plan.encode or plan.evicted_embeds):
            return
        starts: dict[str, list[EncodeStart]] = {}
        for start in plan.encode:
            starts.setdefault(start.sequence_id, []).append(start)
        batches = []
        for sequence_id, group in starts.items():
            choice = self._choices[sequence_id]
            choice.timeline.note_encode_start(self._clock())
            sequence = choice.sequence
            batches.append(EncodeBatch(sequence.request_id, sequence.namespace, sequence.deadline_s, tuple(group)))
        self._encodes.handle(plan.evicted_embeds, tuple(batches))

    def _advance(
        self, samples: Iterable[tuple[Choice, Sample | SightlineError]], outputs: list[Output]
    ) -> tuple[list[SampledToken], dict[str, FinishDecision]]:
        """Append the sampled tokens' deltas to `outputs`; returns the tokens, and which sequences end with theirs."""
        now_s = self._clock()
        tokens: list[SampledToken] = []
        finished: dict[str, FinishDecision] = {}
        for choice, sample in samples:
            sequence_id = choice.sequence.sequence_id
            if self._choices.get(sequence_id) is not choice:
                continue  # it has ended since
            try:
                if isinstance(sample, SightlineError):
                    raise sample
                delta = choice.advance(sample, now_s)
            except Exception as exc:  # one sequence's grammar or text is no one else's trouble
                outputs.append(self._fail(choice, exc))
                continue
            self._observe(choice)
            outputs.append(Output(choice.sequence.request_id, delta))
            tokens.append(SampledToken(sequence_id, sample.token_id))
            if delta.finish_reason is not None:
                finished[sequence_id] = (delta.finish_reason, delta.stop_reason)
                self._forget(choice, delta.finish_reason)
        return tokens, finished

    def _end_late(self, ended: Iterable[Sequence]) -> list[Output]:
        """Last deltas of sequences that the scheduler ended, by a deadline for example."""
        return [
            self._last_output(self._choices[sequence.sequence_id], sequence.finish_reason or "error", sequence.error)
            for sequence in ended
            if sequence.sequence_id in self._choices
        ]

    # -- the encoder answers -------------------------------------------------------------------------------------------
    def put_embedding(self, identity: EmbeddingIdentity, embeddings: torch.Tensor, requester: str) -> None:
        """Take an embedding [num_slots, embed_width]; dropped if nobody wants it any more.

        Args:
            requester: Sequence the encode was started for.
        """
        if requester in self._choices:
            self._choices[requester].timeline.note_encoded(self._clock())
        was_resident = self._runner.has_embedding(identity)
        if not was_resident:
            self._runner.put_embedding(identity, embeddings)
        if not self._scheduler.on_embedding_ready(identity) and not was_resident:
            self._runner.drop_embeddings((identity,))

    def fail_embedding(self, start: EncodeStart, error: SightlineError) -> list[Output]:
        """An encode came to nothing; ends the sequences that cannot go on without it."""
        return self._end_late(self._scheduler.on_embedding_failed(start.identity, error, start.ticket))

    # -- operators -----------------------------------------------------------------------------------------------------
    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""
        return self._scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Totals, and the observations since the last call."""
        return self._counters.take(self._scheduler.stats(), self._runner.embed_bytes)

    def scheduler_stats(self) -> SchedulerStats:
        """The scheduler's part of `stats`; reading it takes nothing away."""
        return self._scheduler.stats()

    def count_encode_retry(self) -> None:
        self._counters.encode_retries += 1

    def settle(self) -> list[Output]:
        """Called when work has run out, or after a fault outside a step. Starts over if the books do not balance."""
        if not self.has_work:
            self._in_flight = None  # all that it was for have been aborted
        try:
            self.check_integrity()
        except AssertionError as exc:
            _LOG.exception("the engine is not sound; all requests end")
            self._counters.step_faults += 1
            return self.fail_all(InternalError(f"the engine was not sound: {exc}"))
        return []

    def check_integrity(self) -> None:
        """Raise AssertionError unless scheduler and choices agree."""
        self._scheduler.check_integrity()
        listed = {sequence_id for ids in self._by_request.values() for sequence_id in ids}
        assert listed == self._choices.keys(), "requests and choices disagree"
        assert bool(self._choices) <= self._scheduler.has_work, "choices without work"

    # -- faults --------------------------------------------------------------------------------------------------------
    def fail_all(self, error: SightlineError) -> list[Output]:
        """End every request; the scheduler starts empty."""
        choices = tuple(self._choices.values())
        outputs = [self._last_output(choice, "error", error) for choice in choices]
        wanted = {item.identity for choice in choices for item in choice.sequence.items}
        self._encodes.handle(tuple(wanted), ())
        self._runner.clear_embeddings()
        self._scheduler, self._in_flight = self._make_scheduler(), None
        return outputs

    def _recover(self, plans: Iterable[StepPlan], cause: Exception, outputs: list[Output]) -> None:
        """End what was in the steps that a fault has touched; start over if what is left is not sound."""
        self._counters.step_faults += 1
        error = cause if isinstance(cause, SightlineError) else InternalError(f"a step failed: {cause!r}")
        try:
            chunks = [chunk for plan in plans for chunk in plan.chunks]
            assert chunks, "the scheduler itself failed"
            for chunk in chunks:
                choice = self._choices.get(chunk.sequence_id)
                if choice is not None:
                    outputs.append(self._fail(choice, error))
                else:  # its last delta was made before the fault
                    self._scheduler.abort(chunk.sequence_id)
            self.check_integrity()
        except Exception:
            _LOG.exception("the scheduler is not sound after a fault; all requests end")
            outputs += self.fail_all(error)

    def _fail(self, choice: Choice, cause: Exception) -> Output:
        error = cause if isinstance(cause, SightlineError) else InternalError(f"a sequence failed: {cause!r}")
        self._scheduler.fail(choice.sequence.sequence_id, error)
        return self._last_output(choice, "error", error)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _make_choices(self, request: GenerateRequest, grammars: tuple[Grammar, ...]) -> list[Choice]:
        positions = self._position_rule.positions(len(request.prompt_token_ids), request.items)
        items = tuple(
            SequenceItem(embedding_identity(item.identity, self._fingerprint), item) for item in request.items
        )
        params, now_s = request.sampling, self._clock()
        choices = []
        for index in range(params.n):
            sequence = Sequence(
                sequence_id=request.request_id if index == 0 else f"{request.request_id}#{index}",
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                positions=positions,
                max_tokens=params.max_tokens,
                index=index,
                items=items,
                arrival_s=now_s,
                priority=request.priority,
                namespace=request.namespace,
                cache_salt=request.cache_salt,
                deadline_s=request.deadline_s,
            )
            token_stop = TokenStop(params, self._eos_token_ids)
            sampling = SamplingState(
                params,
                request.prompt_token_ids,
                banned_ids=[token_id for token_id in token_stop.banned_ids if token_id < self._runner.vocab_size],
                grammar=grammars[index] if grammars else None,
                choice=index,
                device=self._runner.device,
            )
            detokenizer = make_detokenizer(self._decoder, skip_special_tokens=params.skip_special_tokens)
            choices.append(Choice(sequence, sampling, token_stop, detokenizer, self._decoder))
        return choices

    def _observe(self, choice: Choice) -> None:
        timeline = choice.timeline
        self._counters.generated_tokens += 1
        if timeline.inter_token_s is None:
            sequence = choice.sequence
            self._counters.observe_first_token(timeline.time_to_first_token_s)
            self._counters.prompt_tokens_cached += sequence.num_cached_tokens
            self._counters.prompt_tokens_computed += sequence.num_prompt_tokens - sequence.num_cached_tokens
        else:
            self._counters.observe_inter_token(timeline.inter_token_s)

    def _last_output(self, choice: Choice, reason: FinishReason, error: SightlineError | None) -> Output:
        delta = choice.end(reason, self._clock(), error)
        self._forget(choice, reason)
        return Output(choice.sequence.request_id, delta)

    def _forget(self, choice: Choice, reason: FinishReason) -> None:
        sequence = choice.sequence
        stages = choice.timeline.stage_seconds(sequence.first_scheduled_s, self._clock())
        self._counters.observe_end(reason, stages)
        del self._choices[sequence.sequence_id]
        siblings = self._by_request[sequence.request_id]
        siblings.discard(sequence.sequence_id)
        if not siblings:
            del self._by_request[sequence.request_id]
