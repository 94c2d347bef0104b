"""What follows from a grid alone: patch positions, window order, segment lengths, interpolation taps. NumPy only.

A grid is (t, h, w) in patches. Patches come in merge-block order: the m x m patches that become one slot lie side by
side, slots run over a frame row by row, frames follow each other.

    patch rows   | slot 0: 4 patches | slot 1: 4 patches | ...          (merge 2)
    window order  slots regrouped so that each attention window is a contiguous run; a frame stays contiguous
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

CACHED_GRIDS = 512
"""Distinct grids whose arrays are kept: real traffic repeats sizes."""


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """`order[i]` is the slot that stands at place i; `reverse[s]` is the place of slot s."""

    order: Int32
    reverse: Int32
    lengths: Int32
    """Slots per window, in order."""


def slots_of(grid: Grid, merge: int) -> int:
    return grid[0] * (grid[1] // merge) * (grid[2] // merge)


@lru_cache(CACHED_GRIDS)
def patch_positions(grid: Grid, merge: int) -> Int32:
    """(row, column) of every patch inside its frame, [t*h*w, 2], in merge-block order. Read-only."""
    t, h, w = grid
    rows, columns = np.meshgrid(np.arange(h, dtype=np.int32), np.arange(w, dtype=np.int32), indexing="ij")
    frame = np.stack((_blocks(rows, merge), _blocks(columns, merge)), axis=-1)
    return _frozen(np.tile(frame, (t, 1)))


def _blocks(plane: np.ndarray, merge: int) -> np.ndarray:
    h, w = plane.shape
    return plane.reshape(h // merge, merge, w // merge, merge).swapaxes(1, 2).reshape(-1)


@lru_cache(CACHED_GRIDS)
def window_order(grid: Grid, merge: int, window_slots: int) -> WindowOrder:
    """Order of slots that makes each window_slots x window_slots window of a frame contiguous.

    Windows at the right and lower border hold fewer slots; none is empty.
    """
    t, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    across = -(-columns // window_slots)
    windows = across * -(-rows // window_slots)
    row_window = (np.arange(rows) // window_slots)[:, None] * across
    frame = (row_window + np.arange(columns)[None, :] // window_slots).reshape(-1)
    window_of_slot = (np.arange(t)[:, None] * windows + frame[None, :]).reshape(-1)
    order = np.argsort(window_of_slot, kind="stable").astype(np.int32)
    reverse = np.empty_like(order)
    reverse[order] = np.arange(order.size, dtype=np.int32)
    lengths = np.bincount(window_of_slot, minlength=t * windows).astype(np.int32)
    return WindowOrder(_frozen(order), _frozen(reverse), _frozen(lengths))


@lru_cache(CACHED_GRIDS)
def window_positions(grid: Grid, merge: int, window_slots: int) -> Int32:
    """`patch_positions` regrouped by window. Read-only."""
    order = window_order(grid, merge, window_slots).order
    unit = merge * merge
    return _frozen(patch_positions(grid, merge).reshape(-1, unit, 2)[order].reshape(-1, 2))


@dataclass(frozen=True, slots=True)
class Taps:
    """Bilinear reads of a square table: four row numbers and weights per patch, [patches, 4]."""

    index: Int32
    weight: Float32


@lru_cache(CACHED_GRIDS)
def bilinear_taps(grid: Grid, merge: int, side: int) -> Taps:
    """Resample a side x side table to h x w with aligned corners, in merge-block order, repeated for every frame."""
    t, h, w = grid
    row_low, row_high, row_part = _axis_taps(h, side)
    column_low, column_high, column_part = _axis_taps(w, side)
    index, weight = [], []
    for row, row_weight in ((row_low, 1 - row_part), (row_high, row_part)):
        for column, column_weight in ((column_low, 1 - column_part), (column_high, column_part)):
            index.append(_blocks(row[:, None] * side + column[None, :], merge))
            weight.append(_blocks(row_weight[:, None] * column_weight[None, :], merge))
    return Taps(
        _frozen(np.tile(np.stack(index, axis=-1), (t, 1)).astype(np.int32)),
        _frozen(np.tile(np.stack(weight, axis=-1), (t, 1)).astype(np.float32)),
    )


def _axis_taps(size: int, side: int) -> tuple[Int32, Int32, Float32]:
    source = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source).astype(np.int32)
    high = np.minimum(low + 1, side - 1).astype(np.int32)
    return low, high, source - low.astype(np.float32)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
