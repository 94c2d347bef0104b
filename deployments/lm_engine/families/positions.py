"""Rotary positions of a sequence, computed on the host once per prompt. Knows no tensors and no model classes.

Text advances all axes by one. An item of grid (t, h, w) occupies t * h * w / merge² placeholders whose axes count
frames, rows and columns from the position where the item starts (M-RoPE, Qwen2-VL report, arXiv:2409.12191):

    tokens     T   T   I   I   I   I   I   I   T   T        one image, 2 rows x 3 columns after merging
    temporal   0   1   2   2   2   2   2   2   5   6
    height     0   1   2   2   2   3   3   3   5   6
    width      0   1   2   3   4   2   3   4   5   6
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from deployments.messages import MediaItem


class Positions(Protocol):
    """Rotary positions of one sequence, prompt and output alike."""

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int32 [axes, stop - start]; may run past the prompt. Read-only."""


class TextPositions:
    """One axis: a token's position is its index."""

    __slots__ = ()

    def slice(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.int32)[None]


class MRopePositions:
    """Three axes: temporal, height, width. Output tokens go on from the prompt's highest position.

    Args:
        prompt: int32 [3, prompt_tokens].
    """

    __slots__ = ("_delta", "_prompt")

    def __init__(self, prompt: np.ndarray) -> None:
        self._prompt = prompt
        self._delta = int(prompt.max()) + 1 - prompt.shape[1] if prompt.size else 0

    def slice(self, start: int, stop: int) -> np.ndarray:
        num_prompt = self._prompt.shape[1]
        if stop <= num_prompt:
            return self._prompt[:, start:stop]
        first_output = max(start, num_prompt)
        output = np.arange(first_output + self._delta, stop + self._delta, dtype=np.int32)
        tail = np.broadcast_to(output, (3, output.size))
        return tail if start >= num_prompt else np.concatenate([self._prompt[:, start:], tail], axis=1)


class MRopeRule:
    """How a family lays items out on the three axes; makes the positions of a prompt.

    Args:
        merge_size: Patches per side that one placeholder stands for.
        tokens_per_second: Temporal positions per second of video; None: one per frame of the grid.
    """

    axes = 3

    def __init__(self, merge_size: int, tokens_per_second: float | None = None) -> None:
        self._merge_size, self._tokens_per_second = merge_size, tokens_per_second

    def positions(self, num_prompt_tokens: int, items: Sequence[MediaItem]) -> MRopePositions:
        """Positions of a prompt whose placeholders are the spans of `items`, which must be in prompt order."""
        prompt = np.empty((3, num_prompt_tokens), np.int32)
        index = position = 0
        for item in items:
            text_tokens = item.offset - index
            prompt[:, index : item.offset] = np.arange(position, position + text_tokens)
            position += text_tokens
            prompt[:, item.offset : item.end] = self._grid_positions(item) + position
            position += self._advance(item)
            index = item.end
        prompt[:, index:] = np.arange(position, position + num_prompt_tokens - index)
        return MRopePositions(prompt)

    def _grid_positions(self, item: MediaItem) -> np.ndarray:
        frames, rows, columns = self._merged_grid(item)
        grid = np.indices((frames, rows, columns), np.int32).reshape(3, -1)
        if item.modality == "video" and self._tokens_per_second is not None:
            # Quantised only after multiplying, in float32, so that fractional steps add up as in training.
            step = np.float32(self._tokens_per_second) * np.float32(item.seconds_per_grid)
            grid[0] = (grid[0].astype(np.float32) * step).astype(np.int32)
        return grid

    def _advance(self, item: MediaItem) -> int:
        frames, rows, columns = self._merged_grid(item)
        # With timed videos transformers resumes text after the larger side, whatever the duration.
        return max(rows, columns) if self._tokens_per_second is not None else max(frames, rows, columns)

    def _merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        frames, height, width = item.grid
        return frames, height // self._merge_size, width // self._merge_size


class TextRule:
    """Positions of text decoders."""

    axes = 1

    def positions(self, num_prompt_tokens: int, items: Sequence[MediaItem]) -> TextPositions:
        return TextPositions()


PositionRule = MRopeRule | TextRule
