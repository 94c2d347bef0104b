"""A batcher whose patches are counted on their way in and out."""

from __future__ import annotations

from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.encoder import Rows
from deployments.vision_encoder.packing import Load
from deployments.vision_encoder.service import Batcher
from deployments.work_meter import WorkMeter


class MeteredBatcher:
    """Implements service.Batcher."""

    def __init__(self, batcher: Batcher, meter: WorkMeter) -> None:
        self._batcher, self._meter = batcher, meter

    async def submit(self, item: VisionItem, load: Load) -> Rows:
        with self._meter.doing(load.patches):
            return await self._batcher.submit(item, load)

    async def close(self) -> None:
        await self._batcher.close()
