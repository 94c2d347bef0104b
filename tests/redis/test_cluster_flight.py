"""Replicas that share a real server: one picture, one computation."""

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from cache_service.cluster_flight import ClusterFlight
from cache_service.codec import DecodedArray, decode_array
from cache_service.identity import EffectiveProcessing, content_digest, item_identity
from cache_service.memory_tier import MemoryTier
from cache_service.read_through import ReadThrough
from cache_service.redis_lease import RedisLeases
from cache_service.redis_tier import RedisTier
from cache_service.single_flight import SingleFlight
from cache_service.tiered import TieredCache
from tests.redis.rig import Server, config, decode, embedding, is_right, new_key, until

pytestmark = pytest.mark.redis


class Encoder:
    """One replica: counts what it really computes; `gate` holds computations back."""

    def __init__(self, url: str, lease_s: float = 30.0) -> None:
        self.tier = RedisTier.connect(config(url, max_value_bytes=1024), kind="embedding")
        self.memory = MemoryTier(1_000_000)
        self.computed: Counter[bytes] = Counter()
        self.gate = asyncio.Event()
        self.reads: ReadThrough[DecodedArray] = ReadThrough(
            TieredCache([self.memory, self.tier], decode),
            lambda key, value: embedding(key, rows=40),
            flights=SingleFlight(),
            shared=self.tier,
            cluster=ClusterFlight(
                RedisLeases(self.tier.link, self.tier.layout, timeout_s=5), lease_s=lease_s, max_wait_s=60
            ),
        )

    async def encode(self, key: bytes) -> str:
        async def compute() -> DecodedArray:
            self.computed[key] += 1
            await self.gate.wait()
            return decode_array(embedding(key, rows=40), identity=key)

        found = await self.reads.get_or_compute(key, compute)
        assert is_right(key, found.value)
        return found.origin

    async def close(self) -> None:
        await self.reads.close()
        await self.tier.close()


async def test_a_hundred_requests_at_two_replicas_encode_once(server: Server) -> None:
    key = new_key()
    replicas = [Encoder(server.url) for _ in range(2)]
    requests = [asyncio.ensure_future(replicas[number % 2].encode(key)) for number in range(100)]
    await until(lambda: sum(replica.computed[key] for replica in replicas) == 1)
    await asyncio.sleep(0.05)
    for replica in replicas:
        replica.gate.set()
    origins = Counter(await asyncio.gather(*requests))
    assert sum(replica.computed[key] for replica in replicas) == 1
    assert origins == {"computed": 1, "joined": 99}
    for replica in replicas:
        await replica.reads.close()
        assert await replica.encode(key) == "memory"
        await replica.memory.close()
        assert await replica.encode(key) == "redis"
        await replica.close()


async def test_many_pictures_at_two_replicas_encode_each_once(server: Server) -> None:
    keys = [new_key() for _ in range(20)]
    replicas = [Encoder(server.url) for _ in range(2)]
    for replica in replicas:
        replica.gate.set()
    await asyncio.gather(*(replica.encode(key) for key in keys for replica in replicas * 3))
    total = sum((replica.computed for replica in replicas), Counter[bytes]())
    assert total == Counter(keys)
    for replica in replicas:
        await replica.close()


def encode_and_hang(url: str, key: bytes, started: Connection) -> None:
    """Body of a process that takes the lease, says so, and never finishes."""

    async def scenario() -> None:
        encoder = Encoder(url, lease_s=0.5)
        running = asyncio.ensure_future(encoder.encode(key))
        await until(lambda: encoder.computed[key] == 1)
        started.send(True)
        await running

    asyncio.run(scenario())


async def test_a_leader_killed_while_encoding_is_replaced_once(server: Server) -> None:
    key = new_key()
    context: Any = multiprocessing.get_context("spawn")
    started, far_end = context.Pipe()
    leader = context.Process(target=encode_and_hang, args=(server.url, key, far_end), daemon=True)
    leader.start()
    try:
        assert await asyncio.to_thread(started.poll, 60)
        replicas = [Encoder(server.url) for _ in range(2)]
        for replica in replicas:
            replica.gate.set()
        requests = [asyncio.ensure_future(replicas[number % 2].encode(key)) for number in range(100)]
        await asyncio.sleep(1.0)  # twice its life: the leader prolongs its lease, so all wait
        assert sum(replica.computed[key] for replica in replicas) == 0
        os.kill(leader.pid, signal.SIGKILL)
        origins = Counter(await asyncio.gather(*requests))
    finally:
        leader.kill()
        await asyncio.to_thread(leader.join)
        leader.close()
    assert sum(replica.computed[key] for replica in replicas) == 1
    assert origins == {"computed": 1, "joined": 99}
    for replica in replicas:
        await replica.close()


async def test_without_a_server_each_replica_encodes_for_itself(own_server: Server) -> None:
    key = new_key()
    replicas = [Encoder(own_server.url) for _ in range(2)]
    own_server.kill()
    for replica in replicas:
        replica.gate.set()
    origins = Counter(await asyncio.gather(*(replica.encode(key) for replica in replicas * 20)))
    assert origins == {"computed": 2, "joined": 38}
    for replica in replicas:
        await replica.close()
    own_server.start()


async def test_tenants_do_not_meet(server: Server) -> None:
    """Equal pixels under two namespaces: different keys, so counted as two computations and no shared entry."""
    pixels = np.zeros((4, 4, 3), np.uint8)
    processing = EffectiveProcessing(
        resized_height=4,
        resized_width=4,
        patch_size=2,
        merge_size=1,
        temporal_patch_size=1,
        resample="bicubic",
        image_mean=(0.5,) * 3,
        image_std=(0.5,) * 3,
        rescale_factor=1 / 255,
    )
    content = content_digest("RGB", (4, 4), pixels.data)
    red, blue = (item_identity(namespace, content, processing) for namespace in ("tenant:red", "tenant:blue"))
    encoder = Encoder(server.url)
    encoder.gate.set()
    assert await encoder.encode(red) == "computed"
    await encoder.reads.close()
    assert await encoder.encode(red) == "memory"
    assert await encoder.encode(blue) == "computed"
    assert encoder.computed == {red: 1, blue: 1}
    await encoder.close()
