"""Pictures and videos behind one set of methods, so that workers and the core need not tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from cache_service.identity import EffectiveProcessing
from deployments.messages import Modality
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode import ImageDecoder
from deployments.preprocessor.families.base import Family, Layout
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.picture import PictureProcessor
from deployments.preprocessor.resize import make_resizer
from deployments.preprocessor.video import VideoProcessor


class _ModalityProcessor(Protocol):
    def inspect(self, data: EncodedMedia, options: MediaOptions) -> Inspection: ...

    def layout(self, inspection: Inspection, options: MediaOptions) -> Layout: ...

    def process(self, data: EncodedMedia, inspection: Inspection, options: MediaOptions) -> ProcessedMedia: ...

    def remake(self, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray: ...


class MediaProcessor:
    """All pixel work of one model. Blocks; holds no state between calls; safe to share among threads."""

    def __init__(self, config: PreprocessorConfig, family: Family) -> None:
        decoder = ImageDecoder(max_pixels=config.max_image_pixels, background=config.background)
        resizer = make_resizer(config.resample)
        self._family = family
        self._resample = resizer.name
        self._decode_settings = decoder.settings
        self._by_modality: dict[Modality, _ModalityProcessor] = {
            "image": PictureProcessor(family, decoder, resizer),
            "video": VideoProcessor(config, family, decoder, resizer),
        }
        decoder.assert_guards()

    def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection:
        """What the header says. Raises MediaError."""
        return self._by_modality[modality].inspect(data, options)

    def layout(self, modality: Modality, inspection: Inspection, options: MediaOptions) -> Layout:
        """Cheap: arithmetic only."""
        return self._by_modality[modality].layout(inspection, options)

    def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia:
        """Decode, digest, resize and patchify an item. Raises MediaError."""
        return self._by_modality[modality].process(data, inspection, options)

    def remake(self, modality: Modality, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        """Patches of an item whose effective processing is known. Raises MediaError."""
        return self._by_modality[modality].remake(data, processing)

    def decode_settings(self, modality: Modality, options: MediaOptions) -> str:
        """Names whatever makes the same bytes decode to other content; part of the alias keys."""
        if modality == "image":
            return self._decode_settings
        return f"{self._decode_settings} video fps={options.fps} num_frames={options.num_frames}"

    def effective(self, layout: Layout, inspection: Inspection) -> EffectiveProcessing:
        """What enters the item's identity."""
        g = self._family.geometry
        return EffectiveProcessing(
            resized_height=layout.resized_height,
            resized_width=layout.resized_width,
            patch_size=g.patch_size,
            merge_size=g.merge_size,
            temporal_patch_size=g.temporal_patch_size,
            resample=self._resample,
            image_mean=g.image_mean,
            image_std=g.image_std,
            rescale_factor=g.rescale_factor,
            frame_indices=inspection.frame_indices,
            frame_seconds=inspection.frame_seconds,
            processor_revision=self._family.revision,
        )
