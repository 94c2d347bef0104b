"""Embeddings from host memory to the device, beside the engine's steps.

    object store ──copy──▶ page-locked memory of the pool ──copy stream──▶ device tensor ──▶ engine's thread

Both copies run in threads of their own, so that neither the event loop nor a step waits for megabytes, and the memory
goes back to the pool once the second copy has ended. On the CPU the same path runs with ordinary memory.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from deployments.lm_engine.embed_pool import EmbedPool, Lease

NUM_THREADS = 2
"""One fills memory while the other waits for its copy on the device."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class EmbedUploader:
    """Args:
    pool: Of the host memory, which is allocated here.
    dtype: Of the tensors on the device.
    """

    def __init__(self, pool: EmbedPool, device: torch.device, dtype: torch.dtype) -> None:
        self._pool, self._device, self._dtype = pool, device, dtype
        on_cuda = device.type == "cuda"
        self._memory = torch.empty(pool.num_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="embed-upload")

    @property
    def pool(self) -> EmbedPool:
        return self._pool

    async def upload(self, rows: np.ndarray | torch.Tensor, dtype: str) -> torch.Tensor:
        """Rows on the device, in the model's precision, in memory of their own; waits while the pool has no room.

        Args:
            rows: [num_slots, width]; as an array bfloat16 is viewed as uint16. A tensor on a device, of an encoder that
                shares it, stays as it is.
            dtype: What the values are.
        """
        if isinstance(rows, torch.Tensor):
            if rows.device.type == self._device.type == "cpu":
                return rows.to(self._dtype)
            if rows.is_cuda:
                return rows
            rows = rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()
        kind, loop = _DTYPES[dtype], asyncio.get_running_loop()
        lease = await self._pool.take(rows.nbytes)
        self._pool.claim(lease)
        copying = loop.run_in_executor(self._threads, self._copy, lease, rows, kind)
        try:
            return await asyncio.shield(copying)
        finally:
            # A thread can't be stopped: whoever is cancelled leaves the memory to the copy until that has ended.
            if copying.done():
                self._pool.release(lease)
            else:
                copying.add_done_callback(lambda future: self._end_late(lease, future))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end_late(self, lease: Lease, copying: asyncio.Future[torch.Tensor]) -> None:
        self._pool.release(lease)
        if not copying.cancelled():
            copying.exception()  # nobody waits for it any more

    def _copy(self, lease: Lease, rows: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Runs in a thread; returns when both copies have ended."""
        staged = self._memory[lease.offset : lease.offset + lease.num_bytes]
        np.copyto(staged.numpy().view(rows.dtype).reshape(rows.shape), rows)
        typed = staged.view(dtype).view(rows.shape)
        if self._stream is None:
            return typed.to(self._dtype, copy=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # On the copy stream the allocation waits for no step; the runner tells the allocator who reads it later.
            there = typed.to(self._device, non_blocking=True).to(self._dtype)
            ended = torch.cuda.Event(blocking=True)
            ended.record()
        ended.synchronize()
        return there


def pool_bytes(option_bytes: int, *, max_item_slots: int, width: int, itemsize: int) -> int:
    """Size of the pool: the option, or room for four worst-case items, at least 64 MiB.

    Args:
        option_bytes: `embed_pool_bytes`; 0 chooses.
        itemsize: Bytes of a value as the encoder sends it.

    Raises:
        ValueError: The worst-case item does not fit; names option, value and what is needed.
    """
    needed = max_item_slots * width * itemsize
    if not option_bytes:
        return max(4 * needed, 64 << 20)
    if option_bytes < needed:
        raise ValueError(
            f"embed_pool_bytes is {option_bytes}, but the largest item's embeddings have {needed} bytes: "
            f"{max_item_slots} slots of {width} values; raise it, or lower mm_processor_kwargs.max_pixels"
        )
    return option_bytes
