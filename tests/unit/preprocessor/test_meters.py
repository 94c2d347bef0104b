"""Pixels and CPU time of the preprocessor."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from deployments.errors import MediaError
from deployments.messages import Modality
from deployments.preprocessor.cpu_meter import CpuMeter, process_cpu_seconds
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.metered_workers import MeteredWorkers
from deployments.preprocessor.resize import PixelLimits
from deployments.preprocessor.workers import DecodeStats
from deployments.work_meter import WorkMeter

OPTIONS = MediaOptions(image_limits=PixelLimits(1, 100), frame_limits=PixelLimits(1, 100), fps=1.0)


class HeldWorkers:
    """Work lasts until `released` is set, and then fails."""

    def __init__(self) -> None:
        self.stats = DecodeStats()
        self.released = asyncio.Event()

    async def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection:
        return Inspection(size=(4, 2))

    async def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia:
        await self.released.wait()
        raise MediaError("bad", code="invalid_image")

    async def remake(self, modality: Modality, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        await self.released.wait()
        return np.zeros((1, 1), np.uint8)

    async def close(self) -> None:
        self.released.set()


async def test_source_pixels_count_from_the_call_to_its_end_whatever_that_is() -> None:
    inner, meter = HeldWorkers(), WorkMeter()
    workers = MeteredWorkers(inner, meter)
    await workers.inspect("image", b"", OPTIONS)
    assert meter.read().queued == 0
    video = Inspection(size=(40, 20), frame_indices=(0, 5, 10))
    processing = {"resized_height": 7, "resized_width": 3}
    calls = [
        asyncio.ensure_future(workers.process("image", b"", Inspection(size=(400, 200)), OPTIONS)),
        asyncio.ensure_future(workers.process("video", b"", video, OPTIONS)),
        asyncio.ensure_future(workers.remake("image", b"", processing)),
    ]
    await asyncio.sleep(0)
    assert meter.read().queued == 400 * 200 + 3 * 40 * 20 + 7 * 3
    calls[0].cancel()
    await workers.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], MediaError)
    assert meter.read().queued == 0
    assert workers.stats is inner.stats


def test_cpu_load_is_a_share_of_the_cores_since_the_last_reading() -> None:
    cpu_s, now = iter([10.0, 13.0, 13.0, 12.0]), iter([0.0, 2.0, 4.0, 6.0])
    meter = CpuMeter(2, lambda: next(cpu_s), lambda: next(now))
    assert meter.read() == pytest.approx(0.75)
    assert meter.read() == 0.0
    assert meter.read() == 0.0  # a worker process ended and took its seconds with it


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="child processes are counted on Linux alone")
def test_worker_processes_count() -> None:
    script = "x = sum(i * i for i in range(3_000_000)); print(x, flush=True); input()"
    before_s = process_cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        spent_s = process_cpu_seconds() - before_s
        child.communicate(b"\n")
    assert spent_s > 0.05
