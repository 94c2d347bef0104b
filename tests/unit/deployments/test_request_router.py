"""The router inside Serve: which replicas it offers, and what it learns from Serve. Replicas are names only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from deployments.request_router import AffinityRouter
from deployments.routing import replica_session, session_id

DEPLOYMENT = DeploymentID("LMEngine", "sightline")


@dataclass(eq=False)
class Replica:
    """What the router asks of a RunningReplica."""

    replica_id: ReplicaID
    max_ongoing_requests: int = 100
    hangs: bool = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.hangs:
            await asyncio.sleep(deadline_s)
            raise TimeoutError
        return 0


@pytest.fixture
async def router() -> AffinityRouter:
    router = AffinityRouter(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        self_actor_id="caller",
        event_loop=asyncio.get_running_loop(),
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(min_bound=2)
    router.update_replicas([Replica(ReplicaID(name, DEPLOYMENT)) for name in "abcd"])  # type: ignore[list-item]
    for _ in range(10):  # the router asks new replicas for their queues
        await asyncio.sleep(0)
    return router


def call(session: str) -> Any:
    metadata = SimpleNamespace(session_id=session, internal_request_id="internal")
    return SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace(should_backoff=False))


async def offered(router: AffinityRouter, session: str) -> list[str]:
    ranks = await router.choose_replicas(router._replicas_list, call(session))
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


async def test_a_request_is_offered_to_all_until_one_takes_it_and_then_to_that_one(router: AffinityRouter) -> None:
    ranked = await offered(router, session_id("key", "r"))
    assert sorted(ranked) == list("abcd")
    router.on_request_routed(call(session_id("key", "r")), ReplicaID(ranked[1], DEPLOYMENT), None)  # type: ignore[arg-type]
    assert await offered(router, session_id("", "r")) == [ranked[1]]
    assert await offered(router, session_id("key")) == ranked


async def test_a_replica_above_the_bound_is_offered_last(router: AffinityRouter) -> None:
    first, *others = await offered(router, session_id("key"))
    router.on_new_queue_len_info(ReplicaID(first, DEPLOYMENT), 50)
    assert await offered(router, session_id("key")) == [*others, first]


async def test_a_dead_replica_is_left_at_once_by_its_requests_and_its_keys(router: AffinityRouter) -> None:
    first, second, *_ = await offered(router, session_id("key", "r"))
    router.on_request_routed(call(session_id("key", "r")), ReplicaID(first, DEPLOYMENT), None)  # type: ignore[arg-type]
    router.on_replica_actor_died(ReplicaID(first, DEPLOYMENT))
    assert (await offered(router, session_id("key", "r")))[0] == second


async def test_calls_without_a_session_are_offered_somewhere(router: AffinityRouter) -> None:
    assert sorted(await offered(router, "")) == list("abcd")
    assert await router.choose_replicas([], call("")) == []


async def test_a_call_for_one_replica_is_offered_to_that_one_however_loaded(router: AffinityRouter) -> None:
    for name in "abcd":
        router.on_new_queue_len_info(ReplicaID(name, DEPLOYMENT), 50 if name == "b" else 0)
        assert await offered(router, replica_session(name)) == [name]


async def test_a_call_for_a_replica_that_is_gone_is_offered_to_others_which_refuse_it(router: AffinityRouter) -> None:
    router.on_request_routed(call(replica_session("b")), ReplicaID("b", DEPLOYMENT), None)  # type: ignore[arg-type]
    router.on_replica_actor_died(ReplicaID("b", DEPLOYMENT))
    for _ in range(2):
        ranked = await offered(router, replica_session("b"))
        assert sorted(ranked) == list("acd")
        router.on_request_routed(call(replica_session("b")), ReplicaID(ranked[0], DEPLOYMENT), None)  # type: ignore[arg-type]


# -- calls at once -----------------------------------------------------------------------------------------------------
def pending(session: str, internal_request_id: str = "the caller's request") -> PendingRequest:
    metadata = RequestMetadata(request_id="", internal_request_id=internal_request_id, session_id=session)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


async def routed(router: AffinityRouter, call: PendingRequest) -> str:
    return (await router._choose_replica_for_request(call)).replica_id.unique_id


@pytest.mark.parametrize("num_calls", [2, 3, 40])
async def test_calls_that_one_request_makes_at_once_are_all_routed(router: AffinityRouter, num_calls: int) -> None:
    calls = [pending(session_id(f"key {i}")) for i in range(num_calls)]
    async with asyncio.timeout(20):
        names = await asyncio.gather(*(routed(router, call) for call in calls))
    assert names == [(await offered(router, session_id(f"key {i}")))[0] for i in range(num_calls)]


async def test_a_retry_keeps_its_place_and_its_id(router: AffinityRouter) -> None:
    call = pending(session_id("key"))
    await routed(router, call)
    own = call.metadata.internal_request_id
    async with asyncio.timeout(20):
        await router._choose_replica_for_request(call, is_retry=True)
    assert call.metadata.internal_request_id == own != "the caller's request"


async def test_calls_for_a_replica_that_hangs_do_not_keep_the_others_from_being_routed(router: AffinityRouter) -> None:
    hanging: Any = router._replicas[ReplicaID("b", DEPLOYMENT)]
    hanging.hangs = True
    router.on_replica_actor_unavailable(hanging.replica_id)  # Serve asks it before it sends it anything
    stuck = [asyncio.create_task(routed(router, pending(replica_session("b")))) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await routed(router, pending(replica_session("c"))) == "c"
    assert not any(task.done() for task in stuck)
    hanging.hangs = False
    async with asyncio.timeout(20):
        assert set(await asyncio.gather(*stuck)) == {"b"}
