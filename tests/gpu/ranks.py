"""A gang as the server builds it, without Ray: rank 0 is this process, the others have a process and a GPU each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from deployments.lm_engine.build import DeviceSide, build_device_side, pick_device
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.tensor_parallel.leader import Gathering, Leader, LeaderRunner
from deployments.lm_engine.tensor_parallel.worker import run_rank

_END_S = 30.0


@contextmanager
def device_sides(config: EngineConfig, folder: Path) -> Iterator[tuple[DeviceSide, Leader | None, list[BaseProcess]]]:
    """Rank 0's share, its leader, and the other ranks' processes; the whole model and no leader on one device."""
    size = config.tensor_parallel_size
    if size == 1:
        yield build_device_side(config, folder), None, []
        return
    gathering = Gathering(size)
    workers = [
        multiprocessing.get_context("spawn").Process(target=run_rank, args=(gathering.address, rank, config, folder))
        for rank in range(1, size)
    ]
    for rank, worker in enumerate(workers, start=1):
        _start_on_gpu(worker, rank)
    leader = gathering.join(pick_device(config.device))
    try:
        side = build_device_side(config, folder, leader.group)
        leader.start()
        yield side, leader, workers
    finally:
        leader.close()
        for worker in workers:
            worker.join(_END_S)
            worker.kill()
            worker.join()


def runner_of(side: DeviceSide, leader: Leader | None, *, max_tables: int = 512) -> ModelRunner:
    parts = (side.model, side.backend, EmbedStore(), side.decodes, side.mixed)
    return ModelRunner(*parts) if leader is None else LeaderRunner(*parts, leader=leader, max_tables=max_tables)


def _start_on_gpu(worker: BaseProcess, index: int) -> None:
    """With one GPU in sight, as Ray's actors have."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = before.split(",")[index] if before else str(index)
    try:
        worker.start()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
