"""What a model family decides about pixels and placeholders. One function gives sizes to everyone who asks.

picture w x h ──layout──▶ Layout: resized size, grid, patches, slots     (admission, prompt expansion, budgets)
resized pixels ──patchify──▶ uint8 patches, exactly layout.num_patches rows                           (encoder)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deployments.messages import Modality
from deployments.preprocessor.resize import PixelLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What becomes of one picture or video."""

    resized_height: int
    resized_width: int
    grid: tuple[int, int, int]
    """Patches along time, height and width, before spatial merging."""
    num_slots: int
    """Placeholder tokens = rows of encoder output."""

    @property
    def num_patches(self) -> int:
        time, height, width = self.grid
        return time * height * width


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of placeholder tokens that stands for a picture, a video, or one temporal step of a video."""

    num_slots: int
    before: str = ""
    """Text of the prompt in front of the run; the names of special tokens count as such."""
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGeometry:
    """How a family cuts pictures, as its checkpoint says."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float = 1 / 255

    @property
    def cell(self) -> int:
        """Side in pixels of the square that becomes one slot."""
        return self.patch_size * self.merge_size


class Family(Protocol):
    """A model family's view of media. Stateless apart from what the checkpoint's configuration says."""

    @property
    def revision(self) -> str:
        """Changes whenever layout or patches change for the same picture; part of every cache key."""

    @property
    def geometry(self) -> PatchGeometry: ...

    @property
    def limits(self) -> PixelLimits:
        """The checkpoint's bounds on the resized area."""

    @property
    def frame_limits(self) -> PixelLimits:
        """The same for one frame of a video."""

    def placeholder_id(self, modality: Modality) -> int:
        """Token that stands for one slot of this modality."""

    def layout(self, width: int, height: int, limits: PixelLimits, num_frames: int = 1) -> Layout:
        """Size after resizing, grid and slots. Raises MediaError for shapes the family cannot take."""

    def spans(self, layout: Layout, frame_seconds: Sequence[float] = ()) -> tuple[Span, ...]:
        """How an item stands in the prompt: as one span, or as one for each temporal step of its grid.

        Each span becomes an item of its own, with its share of the patches, frames and grid.

        Args:
            frame_seconds: Times of a video's frames; empty for pictures.
        """

    def patchify(self, frames: np.ndarray, modality: Modality) -> np.ndarray:
        """Resized frames, uint8 [T, H, W, 3], as uint8 patches in the encoder's order.

        Picture (T = 1): [num_patches, 3 * patch * patch], the temporal copy left out.
        Video: [num_patches, 3 * temporal_patch * patch * patch]; T is padded with the last frame.
        """
