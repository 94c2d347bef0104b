"""A function that never falls, through measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear, flat below the first point, extended by the last slope above."""

    points: tuple[tuple[float, float], ...]
    """Ascending in the first, not falling in the second; one at least."""

    def __call__(self, x: float) -> float:
        points = self.points
        at = bisect_left(points, (x, float("-inf")))
        if at == 0 or len(points) == 1:
            return points[0][1]
        at = min(at, len(points) - 1)
        (low, low_y), (high, high_y) = points[at - 1], points[at]
        return low_y + (high_y - low_y) / (high - low) * (x - low)


def fit_rising(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve nearest to the points (least squares) that never falls: neighbours that contradict it share a mean."""
    ordered = sorted(points)
    pools: list[list[float]] = []  # [mean, number of points]
    for _, y in ordered:
        pools.append([y, 1.0])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, count = pools.pop()
            before, many = pools[-1]
            pools[-1] = [(before * many + mean * count) / (many + count), many + count]
    means = [mean for mean, count in pools for _ in range(int(count))]
    return Curve(tuple((x, y) for (x, _), y in zip(ordered, means, strict=True)))
