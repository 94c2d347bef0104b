"""Gangs of ranks on the CPU: rank 0 is the test, the others are threads, each with its own share and real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.build import DeviceSide
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.fused_layers import RowOps
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import load_language_model
from deployments.lm_engine.tensor_parallel.group import TensorParallelGroup
from deployments.lm_engine.tensor_parallel.leader import Gathering, Leader, LeaderRunner
from deployments.lm_engine.tensor_parallel.worker import serve_rank

CPU = torch.device("cpu")
MakeSide = Callable[[TensorParallelGroup], DeviceSide]
TIMEOUT_S = 20.0


@dataclass
class Gang:
    leader: Leader
    side: DeviceSide
    """Rank 0's."""
    faults: list[BaseException] = field(default_factory=list)
    """What ended other ranks."""

    def runner(self, embeds: EmbedStore | None = None, max_tables: int = 64) -> LeaderRunner:
        """Rank 0's; a second one would not agree with the other ranks on block tables."""
        side = self.side
        parts = (side.model, side.backend, EmbedStore() if embeds is None else embeds, side.decodes)
        return LeaderRunner(*parts, leader=self.leader, max_tables=max_tables)


def side_of(
    folder: Path, *, num_blocks: int, block_size: int = 4, ops: RowOps | None = None, **options: Any
) -> MakeSide:
    """Shares of a checkpoint in float32.

    Args:
        ops: Of fused layers; None leaves the library's.
    """

    def make(group: TensorParallelGroup) -> DeviceSide:
        model = load_language_model(folder, dtype=torch.float32, group=group, **options)
        if ops is not None:
            assert model.fuse(ops)
        kv = KVTensors(model.kv_layout(block_size), num_blocks)
        return DeviceSide(model=model, backend=SdpaBackend(kv), decodes=None, mixed=None, num_blocks=num_blocks)

    return make


@contextmanager
def gang_of(size: int, make_side: MakeSide, *, worker_side: MakeSide | None = None) -> Iterator[Gang]:
    """All ranks, watched by the leader.

    Args:
        worker_side: Of the ranks other than 0, where they differ.
    """
    gathering, faults = Gathering(size), list[BaseException]()

    def work(rank: int) -> None:
        try:
            serve_rank(gathering.address, rank, size, CPU, worker_side or make_side, TIMEOUT_S)
        except BaseException as exc:
            faults.append(exc)

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(1, size)]
    for worker in workers:
        worker.start()
    leader = gathering.join(CPU, join_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
    try:
        side = make_side(leader.group)
        leader.start()
        yield Gang(leader, side, faults)
    finally:
        leader.close()
        for worker in workers:
            worker.join(TIMEOUT_S)
            assert not worker.is_alive(), "a rank did not end with its gang"
