"""What the caches cost on the path of a repeated picture. CPU and memory bandwidth only; no model is involved.

    python -m tests.bench.bench_cache [--mib 11] [--rounds 40]

Starts a Valkey server of its own on the same host, so figures have no network in them. Prints a table, then one JSON
line. Medians; `end to end` is from a key to a verified array, through codec and tiers, as the encoder does it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable

import numpy as np

from cache_service.codec import DecodedArray, decode_array, encode_array
from cache_service.identity import EmbeddingIdentity, block_key, content_digest, encoded_digest
from cache_service.memory_tier import MemoryTier
from cache_service.redis_tier import RedisTier
from cache_service.tiered import TieredCache
from tests.redis.rig import config, running_server

MIB = 1024 * 1024


def decode(key: bytes, value: memoryview, *, trusted: bool) -> DecodedArray:
    return decode_array(value, identity=key, verify_checksum=not trusted)


async def median_ms(call: Callable[[], Awaitable[object]], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def repeat_ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


async def measure(mib: int, rounds: int) -> dict[str, float]:
    """Milliseconds by what was done, for one embedding of `mib` MiB."""
    key = os.urandom(32)
    array = np.frombuffer(os.urandom(mib * MIB), np.uint16).reshape(-1, 3584 if mib * MIB % 7168 == 0 else 64)
    value = encode_array(key, array, dtype="bfloat16")
    figures = {
        "encode_ms": repeat_ms(lambda: encode_array(key, array, dtype="bfloat16"), rounds),
        "decode_verified_ms": repeat_ms(lambda: decode_array(value, identity=key), rounds),
        "decode_trusted_ms": repeat_ms(lambda: decode_array(value, identity=key, verify_checksum=False), rounds),
    }
    memory = TieredCache([MemoryTier(4 * len(value))], decode)
    await memory.put(key, value)
    figures["memory_hit_ms"] = await median_ms(lambda: memory.get(key), 50 * rounds)
    with running_server() as server:
        for name, longest in (("whole", 2 * mib * MIB), ("chunked_4mib", 4 * MIB)):
            tier = RedisTier.connect(
                config(server.url, max_value_bytes=longest, max_bytes=max(longest, 256 * MIB)), kind="embedding"
            )
            await tier.start()
            cache = TieredCache([tier], decode)

            async def store(tier: RedisTier = tier) -> None:
                assert await tier.put_fenced(key, value, None)

            async def load(cache: TieredCache[DecodedArray] = cache) -> None:
                assert await cache.get(key) is not None

            figures[f"redis_set_{name}_ms"] = await median_ms(store, rounds)
            figures[f"redis_get_{name}_end_to_end_ms"] = await median_ms(load, rounds)
            figures[f"redis_miss_{name}_ms"] = await median_ms(
                lambda cache=cache: cache.get(os.urandom(32)), 5 * rounds
            )  # type: ignore[misc]
            await tier.close()
    return figures


def digest_figures(rounds: int) -> dict[str, float]:
    photo, frame = os.urandom(300_000), os.urandom(1920 * 1080 * 3)
    parent = block_key(None, range(16))
    item = EmbeddingIdentity(os.urandom(32))
    file_ms = repeat_ms(lambda: encoded_digest(photo), rounds)
    frame_ms = repeat_ms(lambda: content_digest("RGB", (1920, 1080), frame), rounds)
    return {
        "digest_300kB_file_ms": file_ms,
        "digest_1080p_pixels_ms": frame_ms,
        "digest_gb_per_s": len(frame) / frame_ms / 1e6,
        "block_key_16_tokens_us": 1000 * repeat_ms(lambda: block_key(parent, range(16), [(item, -5)]), 100 * rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=11, help="size of the embedding (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of each measurement (default: %(default)s)")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.mib, options.rounds)) | digest_figures(options.rounds)
    for name, value in figures.items():
        print(f"{name:<36} {value:>10.4f}")
    print(
        json.dumps(
            {
                "bench": "cache",
                "date": time.strftime("%Y-%m-%d"),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "load_1min": round(os.getloadavg()[0], 1),
                "mib": options.mib,
                "rounds": options.rounds,
                **{name: round(value, 4) for name, value in figures.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
