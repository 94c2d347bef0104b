"""Where media are decoded: off the event loop, a bounded number at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from deployments.messages import Modality
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.processor import MediaProcessor

T = TypeVar("T")


@dataclass(slots=True)
class DecodeStats:
    jobs: int = 0
    crashes: int = 0
    """Processes that died in a job, whatever ended them."""
    hangs: int = 0
    """Processes that were killed since they gave no answer in time."""


class DecodeWorkers(Protocol):
    """MediaProcessor's methods, awaited. Cancelling a call drops it if it has not begun."""

    stats: DecodeStats

    async def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection: ...

    async def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia: ...

    async def remake(self, modality: Modality, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray: ...

    async def close(self) -> None:
        """Stop; calls under way end with an error or their result."""


class ThreadWorkers:
    """Threads of this process: decoders and resizers release the interpreter lock while they work."""

    def __init__(self, processor: MediaProcessor, num_threads: int = 0) -> None:
        self._processor = processor
        self.stats = DecodeStats()
        self._executor = ThreadPoolExecutor(
            num_threads or os.cpu_count() or 1, thread_name_prefix="decode", initializer=one_torch_thread
        )

    async def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection:
        return await self._run(self._processor.inspect, modality, data, options)

    async def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia:
        return await self._run(self._processor.process, modality, data, inspection, options)

    async def remake(self, modality: Modality, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        return await self._run(self._processor.remake, modality, data, processing)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, method: Callable[..., T], *args: Any) -> T:
        self.stats.jobs += 1
        return await asyncio.get_running_loop().run_in_executor(self._executor, method, *args)


def one_torch_thread() -> None:
    """The pool is the parallelism; a second level inside each resize would only add contention."""
    import torch

    torch.set_num_threads(1)
