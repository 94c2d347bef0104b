"""One generated sequence as the host sees it: tokens, items, and how far it has come. Knows nothing about text.

token_ids            prompt ............ | output ......
num_computed_tokens  -------------^               positions whose KV is in the cache
items                   [  0  ]   [ 1 ] [ 2 ]      first_item=1 (0 is computed), held_end=2 (1 is held)
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np

from cache_service.identity import BlockKey, EmbeddingIdentity
from deployments.errors import SightlineError
from deployments.messages import FinishReason, MediaItem

Rank = tuple[float, float, int]
"""Order among sequences, lowest first: priority, arrival, serial number."""


class SequenceStatus(IntEnum):
    """Ordered: from FINISHED on nothing is held and nothing will change."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3
    ABORTED = 4
    FAILED = 5


class PositionProvider(Protocol):
    """Rotary positions of a sequence; made by the model family, which knows the items' grids."""

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int32 [axes, stop - start] positions of tokens [start, stop), which may reach into the output."""


@dataclass(frozen=True, slots=True)
class SequenceItem:
    """A picture or video in the prompt, under the identity of its embedding."""

    identity: EmbeddingIdentity
    media: MediaItem
    offset: int = field(init=False)
    """First placeholder position; copied from `media`, since the scheduler reads it in every step."""
    end: int = field(init=False)
    """One past the last placeholder position."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", self.media.offset)
        object.__setattr__(self, "end", self.media.offset + self.media.num_slots)

    @property
    def num_slots(self) -> int:
        return self.media.num_slots

    @property
    def num_patches(self) -> int:
        return self.media.num_patches


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Host state of one choice of a request. Made by the engine, changed by the scheduler alone."""

    # Who it is: filled by the engine, never changed.
    sequence_id: str
    """The request's id, or `id#k` for choice k > 0."""
    request_id: str
    prompt_token_ids: Tokens[int]
    positions: PositionProvider
    max_tokens: int
    """Output tokens after which it ends with `length`."""
    index: int = 0
    """Which of the request's n choices."""
    items: tuple[SequenceItem, ...] = ()
    """In prompt order, spans disjoint."""
    arrival_s: float = 0.0
    """When the request came in, on the scheduler's clock."""
    priority: int = 0
    """Lower runs earlier."""
    namespace: str = ""
    """Tenant: enters KV keys and owns a share of the queue."""
    cache_salt: str = ""
    adapter: str = ""
    deadline_s: float | None = None
    """Time on the scheduler's clock after which nobody wants the answer."""

    # How far it is: filled by the scheduler.
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    """Prompt, then output. The last one may still be on its way from the device: then it is `pending_token(row)`."""
    token_limit: int = field(init=False)
    """Tokens, prompt and output, that it has at most."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the sequence first ran."""
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    """When it left the queue for the first time."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: SightlineError | None = None
    rank: Rank = (0.0, 0.0, 0)
    expected_cached_tokens: int | None = None
    """What the prefix cache held of it when it was first near the head of the queue; an estimate."""

    # What it holds: filled by kv_manager.py and encode_budget.py.
    block_ids: list[int] = field(default_factory=list)
    num_committed_blocks: int = 0
    """Leading blocks whose keys are known to the prefix cache."""
    cacheable: bool = True
    """False if its blocks were computed before the prefix cache was reset."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Keys of its leading full blocks, as far as they were needed; they outlive a preemption."""
    first_item: int = 0
    """Index of the first item not wholly computed."""
    held_end: int = 0
    """Items [first_item, held_end) hold their embedding."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.token_limit = len(self.token_ids) + self.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far; computing all of them yields the next."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status >= SequenceStatus.FINISHED
