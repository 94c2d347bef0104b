"""Choices of one request (n > 1): the first computes the prompt, the others wait and find it in the prefix cache."""

from __future__ import annotations

from deployments.lm_engine.request import Sequence


class Siblings:
    def __init__(self) -> None:
        self._leaders: dict[str, Sequence] = {}
        """By request id: the choice whose prompt the others wait for."""
        self._followers: dict[str, list[Sequence]] = {}

    @property
    def any_waiting(self) -> bool:
        return bool(self._followers)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for its leader."""
        return sequence in self._followers.get(sequence.request_id, ())

    def __len__(self) -> int:
        """Requests that are known here; 0 once all their choices have left."""
        return len(self._leaders.keys() | self._followers.keys())

    def join(self, sequence: Sequence) -> bool:
        """Enter a sequence; True if it has to wait for another choice of its request."""
        if sequence.request_id in self._leaders:
            self._followers.setdefault(sequence.request_id, []).append(sequence)
            return True
        self._leaders[sequence.request_id] = sequence
        return False

    def release(self, sequence: Sequence) -> list[Sequence]:
        """The sequence's prompt is computed: those that waited for it, now free to run."""
        if self._leaders.get(sequence.request_id) is not sequence:
            return []
        return self._followers.pop(sequence.request_id, [])

    def take_followers(self, request_id: str) -> list[Sequence]:
        """Those that wait in a request that is about to end as a whole."""
        return self._followers.pop(request_id, [])

    def leave(self, sequence: Sequence) -> Sequence | None:
        """A sequence has ended; the one to take its place if others waited for it."""
        followers = self._followers.get(sequence.request_id, [])
        if sequence in followers:
            followers.remove(sequence)
        successor = None
        if self._leaders.get(sequence.request_id) is sequence:
            del self._leaders[sequence.request_id]
            if followers:
                successor = self._leaders[sequence.request_id] = followers.pop(0)
        if not followers:
            self._followers.pop(sequence.request_id, None)
        return successor
