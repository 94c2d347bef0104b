"""Several cores behind the face of one: the items of a round are spread over the devices of a replica.

    encode(items) ──costs──▶ plan_shards ──▶ core 0 (thread, device, stream, graphs) ──▶ deliver(position, rows)
                                        └──▶ core 1 (thread, device, stream, graphs) ──▶ deliver(position, rows)

Every core has its own copy of the weights. A round ends when its heaviest shard does.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from deployments.vision_encoder.adapters.base import ItemSpec, Modality, VisionItem
from deployments.vision_encoder.encoder import Deliver, EncoderCore, Rows
from deployments.vision_encoder.packing import Capacity
from deployments.vision_encoder.sharding import plan_shards
from deployments.vision_encoder.stats import EncoderStats


class DataParallelCore:
    """Args:
    cores: One per device, all of the same model, each with counters of its own.
    num_threads: Torch CPU threads of each core's thread; 0 leaves the default.
    """

    def __init__(self, cores: Sequence[EncoderCore], *, num_threads: int = 0) -> None:
        if not cores:
            raise ValueError("data parallel encoding needs one core at least")
        self.cores = tuple(cores)
        # Limits are checked by the core with the least memory, whichever core an item will go to.
        self._strictest = min(cores, key=lambda core: core.memory.limit_bytes if core.memory else float("inf"))
        self.limit = _scaled(cores[0].limit, len(cores))
        self._threads = [
            ThreadPoolExecutor(1, f"encode-{rank}", initializer=_start_thread, initargs=(num_threads,))
            for rank in range(len(cores))
        ]

    @property
    def width(self) -> int:
        return self.cores[0].width

    @property
    def dtype_name(self) -> str:
        return self.cores[0].dtype_name

    @property
    def part_stats(self) -> tuple[EncoderStats, ...]:
        return tuple(core.stats for core in self.cores)

    def describe(self, modality: Modality, grid: tuple[int, int, int]) -> ItemSpec:
        """See EncoderCore."""
        return self._strictest.describe(modality, grid)

    def predict_seconds(self, item: VisionItem) -> float:
        """See EncoderCore."""
        return self._strictest.predict_seconds(item)

    def encode_all(self, items: Sequence[VisionItem]) -> list[Rows | Exception]:
        """See EncoderCore."""
        results: dict[int, Rows | Exception] = {}
        self.encode(items, results.__setitem__)
        return [results[i] for i in range(len(items))]

    def encode(self, items: Sequence[VisionItem], deliver: Deliver) -> None:
        """See EncoderCore. `deliver` is called from the cores' threads; all calls have been made on return."""
        shards = plan_shards([self.predict_seconds(item) for item in items], len(self.cores))
        running: list[Future[None]] = []
        for core, thread, positions in zip(self.cores, self._threads, shards, strict=True):
            if positions:
                shard = [items[position] for position in positions]
                running.append(thread.submit(core.encode, shard, _Relay(positions, deliver)))
        errors = [error for future in running if (error := future.exception()) is not None]
        if errors:
            # A core answers for each item; that it raised at all is a fault. The other shards have been delivered.
            raise errors[0]

    def close(self) -> None:
        """Let running shards end and stop the threads."""
        for thread in self._threads:
            thread.shutdown()


class _Relay:
    """From a shard's positions to the round's."""

    __slots__ = ("_deliver", "_positions")

    def __init__(self, positions: Sequence[int], deliver: Deliver) -> None:
        self._positions, self._deliver = positions, deliver

    def __call__(self, position: int, result: Rows | Exception) -> None:
        self._deliver(self._positions[position], result)


def _scaled(limit: Capacity, factor: int) -> Capacity:
    """What a round may hold so that every device gets a full pass."""
    return Capacity(
        slots=limit.slots * factor,
        patches=limit.patches * factor,
        items=limit.items * factor,
        segments=limit.segments * factor,
        frames=limit.frames * factor,
    )


def _start_thread(num_threads: int) -> None:
    if num_threads:
        torch.set_num_threads(num_threads)
