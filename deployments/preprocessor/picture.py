"""One picture from encoded bytes to patches, in one go. Blocks; knows nothing about requests, caches or event loops.

bytes ──decode──▶ RGB ──digest──▶ content       RGB ──resize──▶ ──patchify──▶ uint8 patches
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from cache_service.identity import content_digest
from deployments.errors import MediaError
from deployments.preprocessor.decode import DecodedImage, ImageDecoder
from deployments.preprocessor.families.base import Family, Layout
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.resize import Resizer


class PictureProcessor:
    """Holds no state between calls; safe to share among threads."""

    def __init__(self, family: Family, decoder: ImageDecoder, resizer: Resizer) -> None:
        self._family = family
        self._decoder = decoder
        self._resizer = resizer

    def inspect(self, data: EncodedMedia, options: MediaOptions) -> Inspection:
        """The size from the header. Raises MediaError."""
        return Inspection(size=self._decoder.probe(_one_file(data)))

    def layout(self, inspection: Inspection, options: MediaOptions) -> Layout:
        """Raises MediaError for shapes that the family cannot take."""
        return self._family.layout(*inspection.size, options.image_limits)

    def process(self, data: EncodedMedia, inspection: Inspection, options: MediaOptions) -> ProcessedMedia:
        """Everything about a picture seen for the first time. Raises MediaError."""
        start = time.perf_counter()
        image = self._decoder.decode(_one_file(data))
        decoded = time.perf_counter()
        content = content_digest(image.mode, image.size, image.pixels.data.cast("B"))
        found = Inspection(size=image.size)
        layout = self.layout(found, options)
        patches = self._patches(image, layout.resized_height, layout.resized_width)
        return ProcessedMedia(
            content=content,
            inspection=found,
            layout=layout,
            patches=patches,
            decode_s=decoded - start,
            preprocess_s=time.perf_counter() - decoded,
        )

    def remake(self, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        """Patches of a picture whose effective processing is known. Raises MediaError."""
        image = self._decoder.decode(_one_file(data))
        return self._patches(image, processing["resized_height"], processing["resized_width"])

    def _patches(self, image: DecodedImage, height: int, width: int) -> np.ndarray:
        return self._family.patchify(self._resizer(image.pixels, height, width)[None], "image")


def _one_file(data: EncodedMedia) -> bytes:
    if isinstance(data, bytes):
        return data
    raise MediaError("a picture is one file", code="invalid_image")
