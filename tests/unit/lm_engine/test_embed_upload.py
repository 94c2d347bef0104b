"""Rows get to the device whole and the pool gets its memory back, whatever happens to who waits for them."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from deployments.lm_engine.embed_pool import ALIGNMENT, EmbedPool
from deployments.lm_engine.embed_upload import EmbedUploader, pool_bytes
from tests.parity.rig import until

CPU = torch.device("cpu")


def bf16_as_uint16(rows: torch.Tensor) -> np.ndarray:
    array = rows.bfloat16().view(torch.uint16).numpy().copy()
    array.flags.writeable = False  # as the object store's are
    return array


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_bfloat16_rows_arrive_in_the_model_s_precision(dtype: torch.dtype) -> None:
    rows = torch.arange(6.0).view(2, 3)
    uploader = EmbedUploader(EmbedPool(4096), CPU, dtype)
    tensor = await uploader.upload(bf16_as_uint16(rows), "bfloat16")
    assert tensor.dtype == dtype
    assert torch.equal(tensor.float(), rows)


async def test_float16_and_strided_rows_arrive() -> None:
    array = np.arange(24, dtype=np.float16).reshape(4, 6)[::2, ::3]
    tensor = await EmbedUploader(EmbedPool(4096), CPU, torch.float32).upload(array, "float16")
    assert tensor.tolist() == array.tolist()


async def test_tensors_have_memory_of_their_own() -> None:
    """The next item comes through the same memory."""
    uploader = EmbedUploader(EmbedPool(ALIGNMENT), CPU, torch.float32)
    first = await uploader.upload(np.full((4, 8), 1, np.float32), "float32")
    second = await uploader.upload(np.full((4, 8), 2, np.float32), "float32")
    assert first.unique().tolist() == [1]
    assert second.unique().tolist() == [2]
    assert uploader.pool.stats().used_bytes == 0


async def test_a_tensor_of_an_encoder_in_this_process_takes_no_memory() -> None:
    uploader = EmbedUploader(EmbedPool(ALIGNMENT), CPU, torch.float32)
    rows = torch.arange(2000.0).view(2, 1000)
    assert (await uploader.upload(rows, "float32")) is rows


async def test_many_at_once_pass_through_a_pool_that_holds_two() -> None:
    uploader = EmbedUploader(EmbedPool(2 * 64 * 1024), CPU, torch.float32)
    arrays = [np.full((128, 128), i, np.float32) for i in range(40)]
    tensors = await asyncio.gather(*(uploader.upload(array, "float32") for array in arrays))
    assert [tensor.unique().tolist() for tensor in tensors] == [[i] for i in range(40)]
    uploader.pool.check_integrity()
    assert uploader.pool.stats().used_bytes == 0


class HeldBack(EmbedUploader):
    """Copies once allowed to."""

    def __init__(self, pool: EmbedPool) -> None:
        super().__init__(pool, CPU, torch.float32)
        self.started, self.allowed = threading.Event(), threading.Event()

    def _copy(self, *arguments: object) -> torch.Tensor:
        self.started.set()
        assert self.allowed.wait(20)
        return super()._copy(*arguments)  # type: ignore[arg-type]


async def test_who_is_cancelled_leaves_the_memory_to_the_copy_until_it_has_ended() -> None:
    uploader = HeldBack(EmbedPool(ALIGNMENT))
    asked = asyncio.create_task(uploader.upload(np.ones((2, 8), np.float32), "float32"))
    await until(uploader.started.is_set)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert uploader.pool.stats().used_bytes == ALIGNMENT, "another one's rows would be overwritten"
    uploader.allowed.set()
    await until(lambda: uploader.pool.stats().used_bytes == 0)


async def test_a_copy_that_fails_gives_the_memory_back() -> None:
    uploader = EmbedUploader(EmbedPool(ALIGNMENT), CPU, torch.float32)
    with pytest.raises(KeyError):
        await uploader.upload(np.ones((2, 8), np.float32), "float8")
    with pytest.raises(RuntimeError):  # 3 bytes are no float32
        async with asyncio.timeout(20):
            await uploader.upload(np.ones(3, np.uint8), "float32")
    await until(lambda: uploader.pool.stats().used_bytes == 0)


# -- its size ----------------------------------------------------------------------------------------------------------
def test_the_pool_holds_four_of_the_largest_item_unless_told_otherwise() -> None:
    largest = {"max_item_slots": 16384, "width": 3584, "itemsize": 2}
    assert pool_bytes(0, **largest) == 4 * 16384 * 3584 * 2
    assert pool_bytes(0, max_item_slots=4, width=8, itemsize=4) == 64 << 20
    assert pool_bytes(16384 * 3584 * 2, **largest) == 16384 * 3584 * 2


def test_a_pool_that_could_not_hold_the_largest_item_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embed_pool_bytes is 1000, but .* 1024 bytes: 4 slots of 128 values"):
        pool_bytes(1000, max_item_slots=4, width=128, itemsize=2)
