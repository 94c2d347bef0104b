"""Which replicas' metrics to show when some do not answer. Plain decisions; knows nothing of Ray or Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ShownPage(Generic[P]):
    replica: str
    page: P
    age_s: float
    """0 for a replica that has just answered."""


class LastPages(Generic[P]):
    """The last page of each replica of one deployment.

    A replica that is asked and stays silent shows its last page: a gap would look like a reset of its counters. One
    that is no longer asked has ended, and so do its series.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, P]] = {}

    def update(self, answers: Mapping[str, P], num_silent: int, now_s: float) -> list[ShownPage[P]]:
        """What to show now.

        Args:
            answers: Pages by replica.
            num_silent: Replicas that were asked and have not answered. Who they are is not known: of those known from
                before, the ones that answered last are meant.
            now_s: On any clock that does not go back.
        """
        missing = [replica for replica in self._known if replica not in answers]
        missing.sort(key=lambda replica: self._known[replica][0], reverse=True)
        kept = {replica: self._known[replica] for replica in missing[:num_silent]}
        self._known = {**kept, **{replica: (now_s, page) for replica, page in answers.items()}}
        return [ShownPage(replica, page, now_s - taken_s) for replica, (taken_s, page) in self._known.items()]
