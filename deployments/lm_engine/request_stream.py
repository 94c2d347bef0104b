"""One request's way out of the engine: deltas go in as steps make them and come out as fast as the reader reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from deployments.messages import GenerationStats, SequenceDelta


class RequestStream:
    """Used by the event loop only. What a slow reader has not taken yet is folded into one delta per choice, so the
    backlog is bounded by the request's own output and never by the number of steps.

    Args:
        num_choices: How many sequences must end before the stream does.
        trace_context: Travels with what is asked of others for this request.
    """

    def __init__(self, num_choices: int, trace_context: Mapping[str, str] | None = None) -> None:
        self.trace_context = trace_context or {}
        self._unfinished = set(range(num_choices))
        self._pending: dict[int, list[SequenceDelta]] = {}
        self._arrived = asyncio.Event()
        self.on_arrival: Callable[[], None] | None = None
        """Called for each delta instead of waking `read`."""
        self.stats: list[GenerationStats] = []
        """Of the choices that have ended."""
        self.is_open = False
        """A reader has taken the stream; there can be only one."""

    @property
    def is_finished(self) -> bool:
        """Every choice has ended, whether or not the reader has seen it."""
        return not self._unfinished

    @property
    def is_drained(self) -> bool:
        """Finished, and nothing left to read."""
        return not (self._unfinished or self._pending)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def push(self, delta: SequenceDelta) -> None:
        """Add a delta; those of a choice that has ended are dropped."""
        if delta.index not in self._unfinished:
            return
        self._pending.setdefault(delta.index, []).append(delta)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        if delta.stats is not None:
            self.stats.append(delta.stats)
        if self.on_arrival is None:
            self._arrived.set()
        else:
            self.on_arrival()

    def end(self, template: SequenceDelta) -> None:
        """End every unfinished choice with `template`'s reason and error."""
        for index in tuple(self._unfinished):
            self.push(SequenceDelta(index=index, finish_reason=template.finish_reason or "error", error=template.error))

    async def read(self) -> tuple[SequenceDelta, ...]:
        """`take`, once there is something."""
        await self._arrived.wait()
        self._arrived.clear()
        return self.take()

    def take(self) -> tuple[SequenceDelta, ...]:
        """Everything since the last call, one delta per choice, in order of choices."""
        pending, self._pending = self._pending, {}
        return tuple(fold(pending[index]) for index in sorted(pending))


def fold(deltas: Sequence[SequenceDelta]) -> SequenceDelta:
    """One delta that says what these say one after the other; all are of one choice."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return SequenceDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        stats=last.stats,
        error=last.error,
    )
