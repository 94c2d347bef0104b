"""Real worker processes with processors that misbehave on purpose."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing.spawn
import os
import signal
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest

from deployments.errors import InternalError, MediaError, OverloadedError
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode_process import JobLimits
from deployments.preprocessor.isolation import ProcessWorkers, _without_main_module
from deployments.preprocessor.media import Inspection, MediaOptions
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.resize import PixelLimits
from tests.unit.preprocessor.misbehaving import Misbehaving, Unstartable
from tests.unit.preprocessor.pictures import clip, encoded, noise
from tests.unit.preprocessor.test_families import FAMILY

LIMITS = PixelLimits(1, 200_000)
OPTIONS = MediaOptions(image_limits=LIMITS, frame_limits=LIMITS, fps=2.0)


PRELOAD = ["tests.unit.preprocessor.misbehaving", "deployments.preprocessor.decode_process"]


@pytest.fixture
async def workers() -> AsyncIterator[ProcessWorkers]:
    limits = JobLimits(memory_bytes=8 << 30, cpu_s=1.0)
    pool = ProcessWorkers(Misbehaving, 2, limits=limits, timeout_s=4.0, preload=PRELOAD)
    yield pool
    await pool.close()


async def inspect(workers: ProcessWorkers, data: bytes) -> Inspection:
    return await workers.inspect("image", data, OPTIONS)


async def test_values_arrays_and_errors_cross(workers: ProcessWorkers) -> None:
    assert (await inspect(workers, b"four")).size[0] == 4
    array = await workers.remake("image", bytes(range(12)), {"rows": 3})
    assert np.array_equal(array, np.arange(12, dtype=np.uint8).reshape(3, 4))
    assert array.flags.writeable
    assert (await workers.inspect("video", (b"a", b"bc"), OPTIONS)).size[0] == 2
    with pytest.raises(MediaError, match="no"):
        await inspect(workers, b"refuse")
    with pytest.raises(InternalError, match="KeyError") as caught:
        await inspect(workers, b"bug")
    assert "secret" not in caught.value.message


async def test_crash_costs_one_request(workers: ProcessWorkers) -> None:
    others = [inspect(workers, b"fine") for _ in range(6)]
    crashed, *rest = await asyncio.gather(inspect(workers, b"crash"), *others, return_exceptions=True)
    assert isinstance(crashed, MediaError)
    assert crashed.code == "invalid_image"
    assert all(isinstance(result, Inspection) for result in rest)
    assert workers.stats.crashes == 2
    assert (await inspect(workers, b"after")).size[0] == 5


async def test_killed_idle_worker_costs_nothing(workers: ProcessWorkers) -> None:
    pids = {(await inspect(workers, b"x")).size[1] for _ in range(2)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    results = [await inspect(workers, b"x") for _ in range(4)]
    assert not pids & {result.size[1] for result in results}


async def test_hang_is_cut_off() -> None:
    limits = JobLimits(memory_bytes=8 << 30, cpu_s=30.0)
    pool = ProcessWorkers(Misbehaving, 1, limits=limits, timeout_s=0.3, preload=PRELOAD)
    with pytest.raises(MediaError, match="too long"):
        await inspect(pool, b"hang")
    assert pool.stats.hangs == 1
    assert (await inspect(pool, b"after")).size[0] == 5
    await pool.close()


async def test_cpu_time_is_limited() -> None:
    limits = JobLimits(memory_bytes=8 << 30, cpu_s=0.1)
    pool = ProcessWorkers(Misbehaving, 1, limits=limits, timeout_s=60.0, preload=PRELOAD)
    with pytest.raises(MediaError, match="too long"):
        await inspect(pool, b"spin")
    assert pool.stats.hangs == 1
    await pool.close()


async def test_memory_is_limited(workers: ProcessWorkers) -> None:
    with pytest.raises(MediaError) as caught:
        await inspect(workers, b"hog")
    assert caught.value.code == "image_too_large"
    assert workers.stats.crashes == 0


async def test_caller_that_leaves_does_not_share_its_worker(workers: ProcessWorkers) -> None:
    task = asyncio.create_task(inspect(workers, b"x" * 100))
    await asyncio.sleep(0)
    task.cancel()
    results = await asyncio.gather(*(inspect(workers, b"y" * n) for n in range(1, 20)))
    assert [result.size[0] for result in results] == list(range(1, 20))


async def test_real_media_come_out_as_in_threads() -> None:
    config = PreprocessorConfig(decode_threads=1, resample="pillow")
    here = MediaProcessor(config, FAMILY)
    pool = ProcessWorkers.for_model(config, FAMILY)
    try:
        for modality, data in (("image", encoded(noise(120, 90), "JPEG")), ("video", clip())):
            seen = here.inspect(modality, data, OPTIONS)  # type: ignore[arg-type]
            assert await pool.inspect(modality, data, OPTIONS) == seen  # type: ignore[arg-type]
            expected = here.process(modality, data, seen, OPTIONS)  # type: ignore[arg-type]
            got = await pool.process(modality, data, seen, OPTIONS)  # type: ignore[arg-type]
            assert np.array_equal(got.patches, expected.patches)
            assert (got.content, got.layout) == (expected.content, expected.layout)
        with pytest.raises(MediaError) as caught:
            await pool.inspect("image", b"<html>", OPTIONS)
        assert caught.value.code == "unsupported_image_format"
    finally:
        await pool.close()


def test_factory_is_picklable() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(functools.partial(MediaProcessor, PreprocessorConfig(), FAMILY)))


def test_main_module_is_hidden_from_new_processes_only_while_they_start() -> None:
    """A Serve replica's main module is Ray's: running it again takes a second for every replacement."""
    main = sys.modules["__main__"]
    before = main.__spec__, getattr(main, "__file__", None)
    with _without_main_module():
        data = multiprocessing.spawn.get_preparation_data("decode")
        assert not {"init_main_from_path", "init_main_from_name"} & set(data)
    assert (main.__spec__, getattr(main, "__file__", None)) == before


async def test_process_that_cannot_start_is_no_fault_of_the_media(workers: ProcessWorkers) -> None:
    pids = {(await inspect(workers, b"x")).size[1] for _ in range(2)}
    workers._workers[0]._make_processor = workers._workers[1]._make_processor = Unstartable
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in range(4):
        with pytest.raises(OverloadedError):
            await inspect(workers, b"x")
    workers._workers[0]._make_processor = workers._workers[1]._make_processor = Misbehaving
    assert (await inspect(workers, b"four")).size[0] == 4
