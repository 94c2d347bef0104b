"""Factories for host-side tests: sequences and pictures by number, and a driver that plays encoder and model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_service.identity import EmbeddingIdentity, ItemIdentity
from deployments.lm_engine.config import SchedulerConfig
from deployments.lm_engine.plan import EncodeStart, SampledToken, SequenceChunk, StepPlan
from deployments.lm_engine.request import Sequence, SequenceItem
from deployments.lm_engine.scheduler import FinishDecision, Scheduler
from deployments.messages import GenerateRequest, MediaItem, SamplingParams

PLACEHOLDER = 999
EOS = 7


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class TextPositions:
    """One rotary axis, counting up."""

    def slice(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.int32)[None]


def config(**options: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 64,
        "encoder_cache_slots": 32,
        "max_encoder_slots_per_step": 32,
        "max_encoder_patches_per_step": 128,
    }
    return SchedulerConfig(**{**defaults, **options})


def identity_of(picture: int) -> EmbeddingIdentity:
    return EmbeddingIdentity(picture.to_bytes(32, "little"))


def picture(number: int, offset: int, num_slots: int) -> SequenceItem:
    media = MediaItem(
        modality="image",
        identity=ItemIdentity(bytes(identity_of(number))),
        grid=(1, 2, 2 * num_slots),
        offset=offset,
        num_slots=num_slots,
        num_patches=4 * num_slots,
        param=f"messages[0].content[{number}].image_url",
    )
    return SequenceItem(identity_of(number), media)


Part = list[int] | tuple[int, int]
"""Text tokens, or (picture number, slots)."""


def sequence(name: str, *parts: Part, **options: Any) -> Sequence:
    """A sequence of text and pictures: `sequence("a", [1, 2], (5, 4), [3])`."""
    tokens: list[int] = []
    items: list[SequenceItem] = []
    for part in parts:
        if isinstance(part, tuple):
            items.append(picture(part[0], len(tokens), part[1]))
            tokens += [PLACEHOLDER] * part[1]
        else:
            tokens += part
    defaults: dict[str, Any] = {"max_tokens": 4, "request_id": name.split("#")[0]}
    return Sequence(
        sequence_id=name,
        prompt_token_ids=tokens,
        positions=TextPositions(),
        items=tuple(items),
        **{**defaults, **options},
    )


def text(name: str, length: int, *, first: int = 1, **options: Any) -> Sequence:
    """A text sequence whose tokens count up from `first`."""
    return sequence(name, list(range(first, first + length)), **options)


def request_of(seq: Sequence, *, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=seq.request_id,
        prompt_token_ids=tuple(seq.prompt_token_ids),
        sampling=SamplingParams(max_tokens=seq.max_tokens, n=n),
        items=tuple(item.media for item in seq.items),
        namespace=seq.namespace,
    )


@dataclass
class Driver:
    """Runs a scheduler as an engine would, and checks each plan against what it may contain."""

    scheduler: Scheduler
    overlap: bool = False
    """Schedule a step before the tokens of the one before are known."""
    unresolved: StepPlan | None = None
    """The step whose tokens are not known yet."""
    store: set[EmbeddingIdentity] = field(default_factory=set)
    """Resident embeddings, as the device side would have them."""
    in_flight: dict[EmbeddingIdentity, EncodeStart] = field(default_factory=dict)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    plan: StepPlan = field(default_factory=StepPlan)
    cancelled: list[EncodeStart] = field(default_factory=list)
    """Encodes given up, whose answers may still come."""
    cache: dict[tuple[int, int], tuple[object, ...]] = field(default_factory=dict)
    """(block, offset) -> what the KV there depends on (see `_contents_of`)."""
    contents: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)

    def add(self, seq: Sequence) -> Sequence:
        self.scheduler.add(seq)
        self.sequences[seq.sequence_id] = seq
        return seq

    def schedule(self) -> StepPlan:
        self.plan = self.scheduler.schedule()
        for identity in self.plan.evicted_embeds:
            self.store.discard(identity)
            if identity in self.in_flight:
                self.cancelled.append(self.in_flight.pop(identity))
        for start in self.plan.encode:
            assert start.identity not in self.in_flight, "an item is encoded twice at a time"
            assert start.identity not in self.store, "a resident item is encoded again"
            self.in_flight[start.identity] = start
        self._check_budgets()
        self._run_chunks()
        return self.plan

    @property
    def to_resolve(self) -> StepPlan:
        """The step whose tokens the next `update` enters."""
        return (self.unresolved or StepPlan()) if self.overlap else self.plan

    def update(self, stop: Iterable[str] = ()) -> list[Sequence]:
        """Every sampling chunk of `to_resolve` gets token EOS; sequences in `stop` end with it."""
        plan, stop = self.to_resolve, set(stop)
        sampled = [SampledToken(chunk.sequence_id, EOS) for chunk in plan.chunks if chunk.samples]
        finished: dict[str, FinishDecision] = {
            token.sequence_id: ("stop", EOS) for token in sampled if token.sequence_id in stop
        }
        if self.overlap:
            ended = self.scheduler.resolve(plan, sampled, finished)
            self.scheduler.advance(self.plan)
            self.unresolved = self.plan
        else:
            ended = self.scheduler.update(plan, sampled, finished)
        self.ended += ended
        return ended

    def encoded(self, *identities: EmbeddingIdentity) -> None:
        """These encodes in flight (all if none is named) have finished."""
        for identity in identities or tuple(self.in_flight):
            del self.in_flight[identity]
            if self.scheduler.on_embedding_ready(identity):
                self.store.add(identity)

    def step(self, *, encode: bool = True) -> StepPlan:
        """One whole step; encodes finish right after it."""
        plan = self.schedule()
        self.update()
        if encode:
            self.encoded()
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing is left to do."""
        for count in range(max_steps):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.scheduler.stats()}")

    def _check_budgets(self) -> None:
        limits, plan = self.scheduler.config, self.plan
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.chunks) <= limits.max_num_seqs
        assert sum(s.item.num_slots for s in plan.encode) <= limits.max_encoder_slots_per_step
        assert sum(s.item.num_patches for s in plan.encode) <= limits.max_encoder_patches_per_step
        assert len({chunk.sequence_id for chunk in plan.chunks}) == len(plan.chunks)

    def _run_chunks(self) -> None:
        """What a model would do: read every earlier position, write the chunk's own; each must be what it should."""
        block_size = self.scheduler.config.block_size
        for chunk in self.plan.chunks:
            seq = self.sequences[chunk.sequence_id]
            stop = chunk.start + chunk.num_tokens
            assert chunk.num_tokens > 0
            assert list(chunk.token_ids) == seq.token_ids[chunk.start : stop]
            self._check_pending(chunk)
            assert chunk.positions.shape == (1, chunk.num_tokens)
            assert chunk.samples == (stop == seq.num_tokens)
            assert stop <= len(chunk.block_ids) * block_size, "a token has no place"
            rows = self._rows(chunk)
            contents = self._contents_of(seq)
            for position in range(stop):
                place = (chunk.block_ids[position // block_size], position % block_size)
                expected = contents[position]
                if position < chunk.start:
                    assert self.cache.get(place) == expected, f"position {position} holds another sequence's KV"
                else:
                    assert rows.get(position - chunk.start) == expected[2], "wrong row of an embedding"
                    self.cache[place] = expected

    def _check_pending(self, chunk: SequenceChunk) -> None:
        """Pending tokens point to the row where the step before drew this very sequence's token."""
        for token in chunk.token_ids:
            if token < 0:
                assert self.unresolved is not None, "a pending token though all are known"
                rows = [c.sequence_id for c in self.unresolved.chunks if c.samples]
                assert rows[-1 - token] == chunk.sequence_id, "another sequence's pending token"

    def _contents_of(self, seq: Sequence) -> list[tuple[object, ...]]:
        """For each position: (hash of all before and at it, token, embedding row), which its KV depends on."""
        contents = self.contents.setdefault(seq.sequence_id, [])
        rows = {}
        if len(contents) < seq.num_prompt_tokens:
            rows = {item.offset + i: (item.identity, i) for item in seq.items for i in range(item.num_slots)}
        chain = contents[-1][0] if contents else hash((seq.namespace, seq.cache_salt))
        for position in range(len(contents), seq.num_tokens):
            token, row = seq.token_ids[position], rows.get(position)
            token = EOS if token < 0 else token  # what it will turn out to be
            chain = hash((chain, token, row))
            contents.append((chain, token, row))
        return contents

    def _rows(self, chunk: SequenceChunk) -> dict[int, tuple[EmbeddingIdentity, int]]:
        rows = {}
        for part in chunk.embeds:
            assert part.identity in self.store, "a chunk reads an embedding that is not resident"
            for i in range(part.num_slots):
                rows[part.chunk_start + i] = (part.identity, part.item_start + i)
        return rows
