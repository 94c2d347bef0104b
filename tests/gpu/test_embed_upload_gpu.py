"""Embeddings through page-locked memory to a CUDA device, while its streams are busy. Skipped without one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from deployments.lm_engine.embed_pool import EmbedPool
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.embed_upload import EmbedUploader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, WIDTH = 1369, 3584
BYTES = ROWS * WIDTH * 2


def rows_of(value: int) -> np.ndarray:
    return torch.full((ROWS, WIDTH), value, dtype=torch.bfloat16).view(torch.uint16).numpy()


async def test_memory_that_holds_two_carries_many_whole() -> None:
    """Memory given back too early would be overwritten by the next item before the device has read it."""
    uploader = EmbedUploader(EmbedPool(2 * (BYTES + 256)), torch.device("cuda"), torch.bfloat16)
    assert uploader._memory.is_pinned()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):  # steps that keep the device busy meanwhile
        matrix @ matrix
    tensors = await asyncio.gather(*(uploader.upload(rows_of(i), "bfloat16") for i in range(40)))
    for i, tensor in enumerate(tensors):
        assert tensor.is_cuda
        assert bool((tensor == i).all()), f"item {i} holds {tensor.unique()[:4].tolist()}"
    uploader.pool.check_integrity()
    assert uploader.pool.stats().used_bytes == 0


async def test_other_precisions_are_converted_on_the_device() -> None:
    uploader = EmbedUploader(EmbedPool(1 << 20), torch.device("cuda"), torch.bfloat16)
    tensor = await uploader.upload(np.arange(12, dtype=np.float32).reshape(3, 4), "float32")
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == np.arange(12).reshape(3, 4).tolist()


async def test_a_tensor_that_is_on_the_device_stays_there() -> None:
    uploader = EmbedUploader(EmbedPool(1 << 20), torch.device("cuda"), torch.bfloat16)
    rows = torch.ones(3, 4, device="cuda", dtype=torch.bfloat16)
    assert await uploader.upload(rows, "bfloat16") is rows
    assert uploader.pool.stats().used_bytes == 0


async def test_memory_of_dropped_items_is_not_given_away_while_a_step_reads_it() -> None:
    """What the copy stream allocates is read by the engine's stream: the allocator must know."""
    uploader = EmbedUploader(EmbedPool(2 * (BYTES + 256)), torch.device("cuda"), torch.bfloat16)
    store, matrix = EmbedStore(), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sums = []
    for i in range(12):
        tensor = await uploader.upload(rows_of(i), "bfloat16")
        tensor.record_stream(torch.cuda.current_stream())  # as ModelRunner.put_embedding does
        store.put(b"item", tensor)  # type: ignore[arg-type]
        del tensor
        for _ in range(10):
            matrix @ matrix
        sums.append(store.rows(b"item", 0, ROWS).float().mean())  # type: ignore[arg-type]
        store.drop((b"item",))  # type: ignore[arg-type]
    assert [round(float(value), 3) for value in sums] == [float(i) for i in range(12)]
