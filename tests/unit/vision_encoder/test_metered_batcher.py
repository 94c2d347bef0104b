"""Patches of the encoder's queue."""

from __future__ import annotations

import asyncio

import numpy as np

from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.encoder import Rows
from deployments.vision_encoder.metered_batcher import MeteredBatcher
from deployments.vision_encoder.packing import Load
from deployments.work_meter import WorkMeter


class HeldBatcher:
    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def submit(self, item: VisionItem, load: Load) -> Rows:
        await self.released.wait()
        return np.zeros((1, 1), np.float32)

    async def close(self) -> None:
        self.released.set()


async def test_patches_count_while_they_wait_and_are_encoded() -> None:
    meter = WorkMeter()
    batcher = MeteredBatcher(HeldBatcher(), meter)
    item = VisionItem("image", (1, 2, 2), np.zeros((4, 1), np.uint8))
    calls = [asyncio.ensure_future(batcher.submit(item, Load(patches=n))) for n in (100, 20, 3)]
    await asyncio.sleep(0)
    assert meter.read().queued == 123
    calls[1].cancel()
    await asyncio.sleep(0)
    assert meter.read().queued == 103
    await batcher.close()
    await asyncio.gather(*calls, return_exceptions=True)
    assert meter.read().queued == 0
