"""How fast a payload gets from one process to another: an array that a Ray actor puts and another one reads.

    python -m tests.bench.bench_transfer [--rounds 30] [--mib 0.25 1 4 16] [--out FILE]

A round is: the first actor puts a fresh array, its reference goes to the second one nested in a message, which copies
the array into memory of its own, as an upload to a device would. Medians; a line through them gives what a hand-over
costs at all and bytes per second. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from tqdm import tqdm

from tests.bench.record import header

MIB = 1 << 20
WARM_UP = 3


@ray.remote(num_cpus=1)
class Producer:
    def put(self, num_bytes: int, seed: int) -> list[Any]:
        # Nested in a list, the reference travels as a reference.
        return [ray.put(np.full(num_bytes, seed % 256, np.uint8))]


@ray.remote(num_cpus=1)
class Consumer:
    def read(self, message: list[Any]) -> int:
        return int(np.array(ray.get(message[0]), copy=True)[-1])


def measure(sizes_bytes: list[int], rounds: int) -> dict[int, float]:
    """Median seconds of a hand-over by bytes."""
    producer, consumer = Producer.remote(), Consumer.remote()
    found: dict[int, list[float]] = {size: [] for size in sizes_bytes}
    for turn in tqdm(range(rounds + WARM_UP), unit="round"):
        for size, seen in found.items():
            start_s = time.perf_counter()
            message = ray.get(producer.put.remote(size, turn))
            assert ray.get(consumer.read.remote(message)) == turn % 256
            if turn >= WARM_UP:
                seen.append(time.perf_counter() - start_s)
    return {size: statistics.median(seen) for size, seen in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_transfer", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 1.0, 4.0, 16.0], help="payloads, two or more")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=512 * MIB, log_to_driver=False)
    try:
        found = measure([int(mib * MIB) for mib in args.mib], args.rounds)
    finally:
        ray.shutdown()
    slope, fixed = np.polyfit(list(found), list(found.values()), 1)
    for size, seconds in found.items():
        print(f"{size / MIB:8.2f} MiB {seconds * 1e3:10.2f} ms")
    result = {
        **header("transfer"), "rounds": args.rounds, "ms": {str(size): s * 1e3 for size, s in found.items()},
        "hand_over_ms": fixed * 1e3, "bytes_per_s": 1 / slope,
    }  # fmt: skip
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
