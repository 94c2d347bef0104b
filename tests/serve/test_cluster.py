"""Two nodes, a replica of every deployment on each: one node dies under load, another one takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.serve.cluster_app import DEPLOYMENTS, ClusterApp, deployments_of, dev_config, running_cluster_app
from tests.serve.load import load_on

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS = 60
BEGUN = "failed: event replica_lost"
"""The one end other than right that a request may come to: its answer had begun when its replica was lost."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterApp]:
    config = dev_config(**dict.fromkeys(DEPLOYMENTS, 2))
    for deployment in deployments_of(config).values():
        deployment["max_replicas_per_node"] = 1
    with running_cluster_app(tmp_path_factory.mktemp("cluster"), config, workers=2) as app:
        yield app


async def test_the_loss_of_a_node_costs_the_streams_that_had_begun_there_and_nothing_else(cluster: ClusterApp) -> None:
    clients = 8
    async with load_on(cluster.url, cluster.model, clients) as load:
        await load.reaches(REQUESTS // 3)
        cluster.nodes.kill(cluster.nodes.workers[0])
        await load.reaches(REQUESTS)
        assert set(cluster.running().values()) <= {1, 2}
        cluster.nodes.add_worker()
        await asyncio.to_thread(cluster.wait_until, cluster.is_whole)
    assert set(load.outcomes) <= {"right", BEGUN}, load.outcomes
    assert load.outcomes[BEGUN] <= clients
