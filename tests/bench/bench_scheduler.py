"""Host-side cost of one engine step: schedule and update at 256 running and 1,000 waiting requests.

    python -m tests.bench.bench_scheduler [--running 256] [--waiting 1000] [--steps 400]

Three regimes, since each loads another path: steady decode (every seat decodes), churn (sequences end and others are
admitted, prefix look-ups and pictures included) and churn with a KV pool so small that sequences are preempted.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from typing import NamedTuple

import numpy as np

from cache_service.identity import EmbeddingIdentity, ItemIdentity
from deployments.lm_engine.config import SchedulerConfig
from deployments.lm_engine.plan import SampledToken
from deployments.lm_engine.request import Sequence, SequenceItem
from deployments.lm_engine.scheduler import Scheduler
from deployments.messages import MediaItem

PLACEHOLDER = 151655
MAX_MODEL_LEN = 8192
WARM_UP_STEPS = 60
"""Steps until the seats are filled; not measured."""


class Moment(NamedTuple):
    """Now, on the clock and in this thread's CPU time, which other processes do not stretch."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.thread_time())


class CountingPositions:
    """M-RoPE-shaped positions out of one shared table."""

    table = np.arange(MAX_MODEL_LEN, dtype=np.int32)[None].repeat(3, axis=0)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.table[:, start:stop]


def make_sequence(serial: int, rng: random.Random, max_tokens: int) -> Sequence:
    """A 64-token system prompt that all share, one of 200 pictures of 256 slots, a question of its own."""
    number = int(rng.paretovariate(1.1)) % 200
    identity = EmbeddingIdentity(number.to_bytes(32, "little"))
    media = MediaItem(
        modality="image", identity=ItemIdentity(identity), grid=(1, 32, 32), offset=64, num_slots=256, num_patches=1024
    )
    question = [rng.randrange(150_000) for _ in range(rng.randrange(16, 200))]
    return Sequence(
        sequence_id=f"r{serial}",
        request_id=f"r{serial}",
        prompt_token_ids=[*range(64), *[PLACEHOLDER] * 256, *question],
        positions=CountingPositions(),
        items=(SequenceItem(identity, media),),
        max_tokens=max_tokens,
        arrival_s=float(serial),
        namespace=f"tenant{serial % 4}",
    )


def run(name: str, *, running: int, waiting: int, steps: int, num_blocks: int, outputs: tuple[int, int]) -> dict:
    """Milliseconds of schedule + update over `steps` steps, the queue kept at `waiting`."""
    rng = random.Random(0)
    config = SchedulerConfig(
        max_num_batched_tokens=8192,
        max_num_seqs=running,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_blocks=num_blocks,
        encoder_cache_slots=16384,
        max_encoder_slots_per_step=8192,
        max_encoder_patches_per_step=32768,
    )
    scheduler = Scheduler(config, clock=lambda: 0.0)
    serial = 0
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    for step in range(WARM_UP_STEPS + steps):
        stats = scheduler.stats()
        for _ in range(waiting + running - stats.waiting - stats.running):
            scheduler.add(make_sequence(serial, rng, rng.randrange(*outputs)))
            serial += 1
        began = Moment.now()
        plan = scheduler.schedule()
        scheduled = Moment.now()
        sampled = [SampledToken(chunk.sequence_id, 7) for chunk in plan.chunks if chunk.samples]
        resumed = Moment.now()
        scheduler.update(plan, sampled, {})
        ended = Moment.now()
        for start in plan.encode:
            scheduler.on_embedding_ready(start.identity)
        if step >= WARM_UP_STEPS:
            wall_ms.append(1e3 * (scheduled.wall_s - began.wall_s + ended.wall_s - resumed.wall_s))
            cpu_ms.append(1e3 * (scheduled.cpu_s - began.cpu_s + ended.cpu_s - resumed.cpu_s))
    scheduler.check_integrity()
    stats = scheduler.stats()
    return {
        "regime": name,
        "cpu_ms_median": round(statistics.median(cpu_ms), 3),
        "cpu_ms_p90": round(statistics.quantiles(cpu_ms, n=100)[89], 3),
        "cpu_ms_p99": round(statistics.quantiles(cpu_ms, n=100)[98], 3),
        "wall_ms_median": round(statistics.median(wall_ms), 3),
        "wall_ms_min": round(min(wall_ms), 3),
        "running": stats.running,
        "tokens_per_step": round(stats.scheduled_tokens / stats.steps, 1),
        "preemptions": stats.preemptions,
        "prefix_hit_rate": round(stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    size = {"running": args.running, "waiting": args.waiting, "steps": args.steps}
    gc.freeze()
    roomy, tight = 200 * args.running, 18 * args.running
    results = [
        run("decode", **size, num_blocks=roomy, outputs=(args.steps + 500, args.steps + 600)),
        run("churn", **size, num_blocks=roomy, outputs=(20, 200)),
        run("preempting", **size, num_blocks=tight, outputs=(400, 800)),
    ]
    columns = list(results[0])
    print("  ".join(f"{column:>15}" for column in columns))
    for result in results:
        print("  ".join(f"{result[column]!s:>15}" for column in columns))
    host = {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"benchmark": "scheduler", **size, **host, "results": results}))


if __name__ == "__main__":
    main()
