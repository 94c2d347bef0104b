"""One picture from encoded bytes to patches, in one go. Blocks; knows nothing about requests, caches or event loops.

bytes ──decode──▶ RGB ──digest──▶ content       RGB ──resize──▶ ──patchify──▶ uint8 patches
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from cache_service.identity import ContentDigest, EffectiveProcessing, content_digest
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode import DecodedImage, ImageDecoder
from deployments.preprocessor.families.base import Family, Layout
from deployments.preprocessor.resize import PixelLimits, make_resizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedPicture:
    content: ContentDigest
    size: tuple[int, int]
    """(width, height) as decoded."""
    layout: Layout
    patches: np.ndarray
    """uint8 [layout.num_patches, ...], as the family orders them."""
    decode_s: float
    preprocess_s: float


class PictureProcessor:
    """Holds no state between calls; safe to share among threads."""

    def __init__(self, config: PreprocessorConfig, family: Family) -> None:
        self._decoder = ImageDecoder(max_pixels=config.max_image_pixels, background=config.background)
        self._resizer = make_resizer(config.resample)
        self.family = family

    @property
    def decode_settings(self) -> str:
        return self._decoder.settings

    def probe(self, data: bytes) -> tuple[int, int]:
        """(width, height) from the header. Raises MediaError."""
        return self._decoder.probe(data)

    def process(self, data: bytes, limits: PixelLimits) -> ProcessedPicture:
        """Everything about a picture seen for the first time. Raises MediaError."""
        start = time.perf_counter()
        image = self._decoder.decode(data)
        decoded = time.perf_counter()
        content = content_digest(image.mode, image.size, image.pixels.data.cast("B"))
        layout = self.family.layout(*image.size, limits)
        patches = self._patches(image, layout.resized_height, layout.resized_width)
        return ProcessedPicture(
            content=content,
            size=image.size,
            layout=layout,
            patches=patches,
            decode_s=decoded - start,
            preprocess_s=time.perf_counter() - decoded,
        )

    def remake(self, data: bytes, height: int, width: int) -> np.ndarray:
        """Patches of a picture whose resized size is known. Raises MediaError."""
        return self._patches(self._decoder.decode(data), height, width)

    def _patches(self, image: DecodedImage, height: int, width: int) -> np.ndarray:
        return self.family.patchify(self._resizer(image.pixels, height, width)[None])

    def effective(self, layout: Layout) -> EffectiveProcessing:
        """What enters the item's identity."""
        g = self.family.geometry
        return EffectiveProcessing(
            resized_height=layout.resized_height,
            resized_width=layout.resized_width,
            patch_size=g.patch_size,
            merge_size=g.merge_size,
            temporal_patch_size=g.temporal_patch_size,
            resample=self._resizer.name,
            image_mean=g.image_mean,
            image_std=g.image_std,
            rescale_factor=g.rescale_factor,
            processor_revision=self.family.revision,
        )
