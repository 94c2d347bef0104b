"""Where pictures are decoded: off the event loop, a bounded number at once."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from deployments.preprocessor.picture import PictureProcessor, ProcessedPicture
from deployments.preprocessor.resize import PixelLimits


class DecodeWorkers(Protocol):
    """Runs a PictureProcessor's methods. Cancelling a call drops it if it has not begun."""

    async def probe(self, data: bytes) -> tuple[int, int]: ...

    async def process(self, data: bytes, limits: PixelLimits) -> ProcessedPicture: ...

    async def remake(self, data: bytes, height: int, width: int) -> np.ndarray: ...

    async def close(self) -> None:
        """Stop; calls under way end with an error or their result."""


class ThreadWorkers:
    """Threads of this process: decoders and resizers release the interpreter lock while they work."""

    def __init__(self, processor: PictureProcessor, num_threads: int = 0) -> None:
        self._processor = processor
        self._executor = ThreadPoolExecutor(
            num_threads or os.cpu_count() or 1, thread_name_prefix="decode", initializer=_one_torch_thread
        )

    async def probe(self, data: bytes) -> tuple[int, int]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._processor.probe, data)

    async def process(self, data: bytes, limits: PixelLimits) -> ProcessedPicture:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._processor.process, data, limits)

    async def remake(self, data: bytes, height: int, width: int) -> np.ndarray:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._processor.remake, data, height, width)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _one_torch_thread() -> None:
    """The pool is the parallelism; a second level inside each resize would only add contention."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
