"""Routes by picture and prefix inside Serve: routing.py's decider over Serve's replicas and their queue lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.utils import generate_request_id
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from deployments.routing import Placer

MAX_ROUTING_TASKS = 4096


class AffinityRouter(ConsistentHashRouter):
    """Serve's consistent-hash router with bounded loads, and with requests that stay where their first call went.

    What it inherits is the loop that routes: one task sees each request through, so that calls of one session that come
    at once are not lost. `request_router_kwargs` are the Placer's options.
    """

    @property
    def max_num_routing_tasks(self) -> int:
        """Calls that look for a replica at once. One for a replica that hangs looks until it is given up: with Serve's
        limit of two a replica, a few of them would keep all other calls from being routed."""
        return MAX_ROUTING_TASKS

    def initialize_state(self, **options: Any) -> None:
        self._placer = Placer(**options)

    def _rebuild_ring(self, new_snapshot: frozenset[ReplicaID]) -> None:
        self._ids = {replica_id.unique_id: replica_id for replica_id in new_snapshot}
        self._placer.set_replicas(self._ids)
        self._replica_set_snapshot = new_snapshot

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        # Not only when the controller says so, seconds later: its calls go elsewhere now.
        self._rebuild_ring(frozenset(self._replica_id_set))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank, so that Serve asks the next one only if the one before is full or does not answer."""
        key = self._routing_key(pending_request)
        if not candidate_replicas or pending_request is None or key is None:
            return [candidate_replicas] if candidate_replicas else []
        pending_request.routing_context.should_backoff = True
        ranked = (self._replicas.get(self._ids[name]) for name in self._placer.rank(key, self._load))
        return [[replica] for replica in ranked if replica is not None]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if not is_retry:
            # All calls that one request makes bear its id, and Serve finds a call that waits for its replica by that
            # id: of several at once it would serve one, and leave the others waiting for ever. The id is for Serve's
            # own use, and also what the replica's calls are cancelled by, so that no call cancels its sibling's.
            pending_request.metadata = replace(
                pending_request.metadata, internal_request_id=generate_request_id()
            )  # fmt: skip
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        key = self._routing_key(pending_request)
        if key is not None:
            self._placer.keep(key, replica_id.unique_id)

    def _load(self, name: str) -> float:
        """Calls that the replica had at our last contact, those sent since then included; 0 if that was long ago."""
        return self._replica_queue_len_cache.get(self._ids[name]) or 0
