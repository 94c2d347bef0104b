"""Activation memory of one forward pass: bytes as a linear function of patches and of the longest attention run.

Peak memory follows input patches, not output slots: a pass of many patches holds several rows of MLP width each. The
longest run matters for attention that builds a mask or scores. Coefficients come from measured passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    patches: int
    longest_patches: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryModel:
    fixed_bytes: float
    bytes_per_patch: float
    bytes_per_longest_patch: float = 0.0

    def predict_bytes(self, patches: int, longest_patches: int) -> int:
        return int(self.fixed_bytes + self.bytes_per_patch * patches + self.bytes_per_longest_patch * longest_patches)


def fit_memory_model(points: Sequence[MemoryPoint]) -> MemoryModel:
    """Least squares with coefficients of at least 0, raised so that no measured point lies above the prediction.

    Raises:
        ValueError: Fewer than two points.
    """
    if len(points) < 2:
        raise ValueError(f"a memory model needs two measured points at least: {len(points) = }")
    columns = np.array([(1.0, p.patches, p.longest_patches) for p in points])
    peaks = np.array([p.peak_bytes for p in points], dtype=float)
    active = [0, 1, 2] if len({p.longest_patches == p.patches for p in points}) > 1 else [0, 1]
    solution = np.zeros(3)
    while active:
        found, *_ = np.linalg.lstsq(columns[:, active], peaks, rcond=None)
        if (found >= 0).all():
            solution[active] = found
            break
        active = [column for column, value in zip(active, found, strict=True) if value >= 0]
    solution[0] += max(0.0, float((peaks - columns @ solution).max()))
    return MemoryModel(*(float(value) for value in solution))
