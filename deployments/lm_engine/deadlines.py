"""Which sequences have to be looked at because a time has come. Says nothing about what is to be done with them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from deployments.lm_engine.request import Sequence

_SLACK = 1024
"""Entries of ended sequences that are tolerated beyond those of living ones."""


class Deadlines:
    """Args:
    living: Sequences by id, as their owner keeps them; entries of others are forgotten.
    """

    def __init__(self, living: Mapping[str, Sequence]) -> None:
        self._living = living
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, when_s: float, sequence: Sequence) -> None:
        """Bring the sequence up at `when_s`, if it lives then. It may be watched for several times."""
        heapq.heappush(self._heap, (when_s, sequence.rank[2], sequence.sequence_id))
        if len(self._heap) > 4 * len(self._living) + _SLACK:
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> Iterator[Sequence]:
        """Living sequences whose time has come, each time once."""
        while self._heap and self._heap[0][0] <= now_s:
            sequence = self._find(heapq.heappop(self._heap))
            if sequence is not None:
                yield sequence

    def _find(self, entry: tuple[float, int, str]) -> Sequence | None:
        """The entry's sequence, told from a later one with its id by the serial number in the rank."""
        sequence = self._living.get(entry[2])
        return sequence if sequence is not None and sequence.rank[2] == entry[1] else None
