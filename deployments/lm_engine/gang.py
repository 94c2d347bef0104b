"""The Ray side of tensor parallelism: a replica's other ranks, as actors in the bundles of its placement group.

Adds to tensor_parallel/: processes. Serve reserves one bundle per rank and puts the replica, rank 0, into the first.
The actors are the replica's own and end with it; Serve then frees the group, and the new replica brings a new gang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.errors import InternalError, ReplicaLostError
from deployments.lm_engine.build import pick_device
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.tensor_parallel.channel import Address
from deployments.lm_engine.tensor_parallel.leader import Gathering
from deployments.lm_engine.tensor_parallel.worker import run_rank


class Rank:
    """A rank other than 0."""

    def run(self, address: Address, rank: int, config: EngineConfig, folder: Path) -> None:
        """Returns once rank 0 is gone or has closed the gang."""
        run_rank(address, rank, config, folder)


class Gang:
    """All ranks but this process, which is rank 0; they are building their shares when this returns.

    Raises:
        InternalError: The replica's placement group has no bundle for each rank.
        ReplicaLostError: A rank did not start.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        size, device = config.tensor_parallel_size, pick_device(config.device)
        group = _placement_group(size)
        gathering = Gathering(size, ray.util.get_node_ip_address())
        # Rank 0 decides for all: sums between a GPU and a CPU would wait for each other.
        config = replace(config, device=device.type)  # type: ignore[arg-type]
        self._ranks = [_start(group, rank) for rank in range(1, size)]
        self._runs = [
            actor.run.remote(gathering.address, rank, config, folder) for rank, actor in enumerate(self._ranks, start=1)
        ]
        self.leader = gathering.join(device, check=self._check_runs)

    def _check_runs(self) -> None:
        """Raise ReplicaLostError if a rank has ended already, before it came to say why."""
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        if ended:
            try:
                ray.get(ended)
            except Exception as exc:
                raise ReplicaLostError(f"a rank did not start: {exc}") from exc
            raise ReplicaLostError("a rank ended at start")


def _placement_group(size: int) -> PlacementGroup:
    group = ray.util.get_current_placement_group()
    bundles = 0 if group is None else group.bundle_count
    if group is None or bundles < size:
        raise InternalError(
            f"tensor_parallel_size is {size}, but the replica's placement_group_bundles are {bundles}; there must be "
            "one for each rank"
        )
    return group


def _start(group: PlacementGroup, rank: int) -> Any:
    bundle: Mapping[str, float] = group.bundle_specs[rank]
    actor: Any = ray.remote(Rank)
    return actor.options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")},
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    ).remote()
