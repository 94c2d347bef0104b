"""Time of a pass as a function of its load, from a few measured points. Pure floats.

    seconds = curve(slots) + pair_s * pairs

The curve holds what every slot costs and what a pass costs at all, launching by the host included; pairs (see
`packing.Load`) are the attention over whole frames, which one large picture has more of than small ones of equal slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.vision_encoder.packing import Load


@dataclass(frozen=True, slots=True)
class PassCost:
    """The curve is piecewise linear, flat below the first point, extended by the last slope above."""

    points: tuple[tuple[int, float], ...] = ((1, 1e-3), (1_001, 2e-3))
    """(slots, seconds without pairs), ascending in both. The default says only that a pass has a fixed part, so that
    small items run together."""
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        slots, seconds = [point[0] for point in self.points], [point[1] for point in self.points]
        if not slots or slots != sorted(set(slots)) or seconds != sorted(seconds):
            raise ValueError(f"points must be ascending and not empty: {self.points = }")
        if self.pair_s < 0:
            raise ValueError(f"pair_s is {self.pair_s}; it must not be negative")

    def __call__(self, load: Load) -> float:
        return self.curve_s(load.slots) + self.pair_s * load.pairs

    def curve_s(self, slots: int) -> float:
        points = self.points
        at = bisect_left(points, (slots, float("-inf")))
        if at == 0:
            return points[0][1]
        if at == len(points):
            if len(points) == 1:
                return points[0][1] * slots / points[0][0]
            at -= 1
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        return low_s + (high_s - low_s) / (high - low) * (slots - low)


def fit_pass_cost(measured: Sequence[tuple[Load, float]], pair_s: float) -> PassCost:
    """The cost that goes through measured (load, seconds), where noise does not contradict that more work takes longer.

    Where it does, the smaller load keeps the time of the larger: a pass is disturbed into taking longer, never shorter.

    Raises:
        ValueError: Nothing was measured.
    """
    points: dict[int, float] = {}
    least = float("inf")
    for load, seconds in sorted(measured, key=lambda pair: (pair[0].slots, pair[1]), reverse=True):
        least = min(least, max(0.0, seconds - pair_s * load.pairs))
        points[load.slots] = least
    return PassCost(tuple(sorted(points.items())), pair_s)


def fit_pair_seconds(one: tuple[Load, float], many: tuple[Load, float]) -> float:
    """Seconds of a pair, from two passes of equal slots: `one` long run and `many` short ones. 0 if noise hides it."""
    pairs = one[0].pairs - many[0].pairs
    return max(0.0, (one[1] - many[1]) / pairs) if pairs > 0 else 0.0
