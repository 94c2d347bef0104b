"""Decode workers whose pixels are counted on their way in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deployments.messages import Modality
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.workers import DecodeWorkers
from deployments.work_meter import WorkMeter


class MeteredWorkers:
    """Implements DecodeWorkers. The unit is a source pixel; patches made again count the pixels that they cover."""

    def __init__(self, workers: DecodeWorkers, meter: WorkMeter) -> None:
        self._workers, self._meter = workers, meter
        self.stats = workers.stats

    async def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection:
        # Reads a header: no pixels.
        return await self._workers.inspect(modality, data, options)

    async def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia:
        width, height = inspection.size
        with self._meter.doing(width * height * inspection.num_frames):
            return await self._workers.process(modality, data, inspection, options)

    async def remake(self, modality: Modality, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        frames = max(1, len(processing.get("frame_indices", ())))
        with self._meter.doing(processing["resized_width"] * processing["resized_height"] * frames):
            return await self._workers.remake(modality, data, processing)

    async def close(self) -> None:
        await self._workers.close()
