"""Time of an eager pass as a function of its size, from a few measured points. Pure floats."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EagerCost:
    """Piecewise linear through (slots, seconds), flat below the first point, extended by the last slope above."""

    points: tuple[tuple[int, float], ...] = ((1, 1e-3), (1_001, 2e-3))
    """Ascending in slots. The default says only that a pass has a fixed part, so that small items run together."""

    def __post_init__(self) -> None:
        if not self.points or list(self.points) != sorted(set(self.points)):
            raise ValueError(f"points must be ascending and not empty: {self.points = }")

    def __call__(self, slots: int) -> float:
        points = self.points
        at = bisect_left(points, (slots, float("-inf")))
        if at == 0:
            return points[0][1]
        if at == len(points):
            if len(points) == 1:
                return points[0][1] * slots / points[0][0]
            at -= 1
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        # A noisy measurement must not make more work look cheaper.
        slope = max(0.0, (high_s - low_s) / (high - low))
        return low_s + slope * (slots - low)
