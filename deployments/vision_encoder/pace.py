"""How much of a device's time an encoder takes from a language model that decodes on the same one. Pure floats.

    passes   |##1##|            |##2##|            |#3#|  |4|5|
             |<- length / share ->|<- length / share ->|    nothing decodes: one behind the other

While sequences are decoded, passes are short, and behind one comes a gap that makes its length the given share of both
together. So over any time T the encoder computes at most share * T and one pass. No item waits for ever: a gap is
bounded by the pass before it, and a pass takes one item at least.
"""

from __future__ import annotations

from collections.abc import Sequence


class Pace:
    """Args:
    share: Of the time that the encoder may compute while sequences are decoded, above 0 and at most 1.
    pass_s: Predicted seconds that one pass may then take; an item that alone takes longer is a pass of its own.
    """

    def __init__(self, share: float, pass_s: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; it must be above 0 and at most 1")
        if pass_s <= 0:
            raise ValueError(f"pass_s is {pass_s}; it must be above 0")
        self.share, self._pass_s = share, pass_s
        self._free_s = float("-inf")
        """When the gap behind the last pass ends, on the caller's clock."""

    def wait_s(self, now_s: float, is_decoding: bool) -> float:
        """Seconds until the next pass may begin; 0 while nothing decodes."""
        return max(0.0, self._free_s - now_s) if is_decoding else 0.0

    def take(self, predicted_s: Sequence[float], is_decoding: bool) -> int:
        """How many items, from the front, the next pass takes: at least one of those that there are.

        Args:
            predicted_s: Seconds of each.
        """
        if not is_decoding:
            return len(predicted_s)
        total = 0.0
        for count, seconds in enumerate(predicted_s):
            total += seconds
            if count and total > self._pass_s:
                return count
        return len(predicted_s)

    def spend(self, began_s: float, ended_s: float, is_decoding: bool) -> None:
        """Note a pass. One that ran while nothing was decoded took nothing away and is followed by no gap."""
        if is_decoding:
            self._free_s = began_s + (ended_s - began_s) / self.share
