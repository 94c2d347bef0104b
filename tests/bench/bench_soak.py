"""Does anything grow? Requests by the thousand against the dev configuration, memory read all along.

    python -m tests.bench.bench_soak [--requests 10000] [--concurrency 16] [--out FILE.json] [--plot FILE.png]

Every other request bears a salt of its own, so that no cache helps it; caches fill up to their bounds and turn over.
Once a second: private memory of each replica, and shared memory of the raylet, which holds the object store (pages once
used stay, so it is a high-water mark). Growth is the least-squares slope over the second half, as bytes a request. Exit
status 1 if a request failed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from tqdm import tqdm

from tests.bench.record import header
from tests.serve.app_process import AppProcess, running_app
from tests.serve.cluster_app import DEPLOYMENTS
from tests.serve.examples import load_examples
from tests.serve.streams import ask

MIB = 1 << 20
SAMPLE_EVERY_S = 1.0


class MemoryLog:
    """Private bytes of the replicas, and bytes of the object store, against requests done."""

    def __init__(self, app: AppProcess) -> None:
        self._replicas = {name: _process(app, f"ServeReplica:{app.application}:{name}") for name in DEPLOYMENTS}
        self._raylet = _process(app, "raylet/raylet")
        self.series: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
        """By name: requests done, seconds since the start, bytes."""
        self._began_s = time.monotonic()

    def sample(self, num_done: int) -> None:
        at_s = time.monotonic() - self._began_s
        for name, process in self._replicas.items():
            memory = process.memory_info()
            self.series[name].append((num_done, at_s, memory.rss - memory.shared))
        self.series["object store"].append((num_done, at_s, self._raylet.memory_info().shared))

    def bytes_per_request(self, name: str) -> float:
        half = self.series[name][len(self.series[name]) // 2 :]
        done, _, used = np.array(half, np.float64).T
        return float(np.polyfit(done, used, 1)[0])


def _process(app: AppProcess, title: str) -> psutil.Process:
    return next(process for process in app.processes() if title in " ".join(process.cmdline()))


async def run(app: AppProcess, log: MemoryLog, requests: int, concurrency: int) -> Counter[str]:
    numbered = enumerate(itertools.islice(itertools.cycle(load_examples()), requests))
    outcomes: Counter[str] = Counter()
    bar = tqdm(total=requests, unit="request")

    async def work(client: httpx.AsyncClient) -> None:
        for number, example in numbered:
            outcome, _ = await ask(client, app.model, example, f"fresh {number}" if number % 2 else None)
            outcomes[outcome] += 1
            bar.update()

    async def watch() -> None:
        while True:
            log.sample(bar.n)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async with httpx.AsyncClient(base_url=app.url, timeout=120) as client:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
        watching.cancel()
    bar.close()
    return outcomes


def draw(log: MemoryLog, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, rows in log.series.items():
        axes.plot([row[0] for row in rows], [row[2] / MIB for row in rows], label=name)
    axes.set(
        xlabel="requests done", ylabel="MiB", ylim=(0, None), title="Private memory of each replica; shared memory"
    )
    axes.legend(ncols=len(log.series), fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    parser.add_argument("--plot", type=Path, help="draw a PNG there; needs matplotlib")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_app(Path(folder), args={}, replicas={}) as app:
        log = MemoryLog(app)
        began_s = time.monotonic()
        outcomes = asyncio.run(run(app, log, args.requests, args.concurrency))
        seconds = time.monotonic() - began_s
    if args.plot:
        draw(log, args.plot)
    memory: dict[str, Any] = {}
    print(f"\n{'MiB':16}{'start':>9}{'half way':>10}{'end':>9}{'bytes/request':>15}")
    for name, rows in log.series.items():
        start, half, end = (rows[i][2] / MIB for i in (0, len(rows) // 2, -1))
        slope = log.bytes_per_request(name)
        memory[name] = {"start_mib": start, "half_mib": half, "end_mib": end, "bytes_per_request": slope}
        print(f"{name:16}{start:9.1f}{half:10.1f}{end:9.1f}{slope:15.0f}")
    result = {
        **header("soak"),
        "seconds": round(seconds, 1), "outcomes": dict(outcomes), "memory": memory,
    }  # fmt: skip
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if outcomes["right"] == args.requests else 1


if __name__ == "__main__":
    sys.exit(main())
