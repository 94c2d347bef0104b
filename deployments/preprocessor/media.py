"""What passes between the steps of processing one item: small values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_service.identity import ContentDigest
from deployments.preprocessor.families.base import Layout
from deployments.preprocessor.resize import PixelLimits

EncodedMedia = bytes | tuple[bytes, ...]
"""A file, or the pictures that are the frames of a video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """How the request wants its media processed, within the server's bounds."""

    image_limits: PixelLimits
    """Area of a picture after resizing."""
    frame_limits: PixelLimits
    """Area of one video frame after resizing, before the video's own bound is shared among its frames."""
    fps: float
    """Frames taken per second of video."""
    num_frames: int | None = None
    """Frames taken from a video, whatever its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What can be said of an item without decoding pixels."""

    size: tuple[int, int]
    """(width, height)."""
    frame_indices: tuple[int, ...] = ()
    """Frames that are taken; empty for pictures."""
    frame_seconds: tuple[float, ...] = ()
    """Their times in the video."""
    seconds_per_frame: float = 0.0
    """Mean distance of the taken frames."""

    @property
    def num_frames(self) -> int:
        return max(1, len(self.frame_indices))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedMedia:
    """A decoded item."""

    content: ContentDigest
    inspection: Inspection
    """As decoding found it; a damaged video may have fewer frames than its header promised."""
    layout: Layout
    patches: np.ndarray
    """uint8 [layout.num_patches, ...], as the family orders them."""
    decode_s: float
    preprocess_s: float
