"""What it costs to get tokens out of an engine replica: a Serve stream per request against one channel for all of them.

    python -m tests.bench.bench_streams [--streams 64] [--tokens 500] [--host-ms 1] [--device-ms 4] [--out FILE]

A real Serve application of two replicas. One stands in for the engine: a thread that works in Python for `--host-ms`,
waits for a device for `--device-ms`, and then has a token for each request; all else is the engine's and the ingress's
own code. The other calls it as an ingress does. How much longer than asked for a step takes is what the streams take
from the engine's thread. Prints a table; the last line is one JSON object:

- `step_ms`              mean time of a step, less than that of an idle replica by nothing but noise at best
- `tokens_per_s`         as they arrive at the caller
- `tokens_per_item`      above 1 where the caller found several steps folded together
- `engine_cpu_us`, `caller_cpu_us`  CPU of the replica's process per token, the engine's own work (`--host-ms`) excluded
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.delta_codec import encode
from deployments.handles import EngineHandle
from deployments.lm_engine.request_streams import RequestStreams
from deployments.messages import DeltaBatch, GenerateRequest, SamplingParams, SequenceDelta
from deployments.routing import session_id
from tests.bench.record import header

APPLICATION = "streams"
MODES = ("stream per request", "channel")
ROUTER = RequestRouterConfig(request_router_class="deployments.request_router:AffinityRouter")  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    streams: int
    tokens: int
    host_ms: float
    device_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    mode: str
    step_ms: float
    tokens_per_s: float
    tokens_per_item: float
    engine_cpu_us: float
    caller_cpu_us: float


def work(seconds: float) -> None:
    """Python, as a scheduler is: it holds the interpreter's lock for this much CPU time of its thread."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Engine:
    """The LM engine's shim around a thread that makes tokens out of nothing."""

    def __init__(self) -> None:
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._streams = RequestStreams(lambda _: None, open_timeout_s=60)
        self._requests: list[str] = []

    async def submit(self, request: GenerateRequest) -> str:
        self._streams.await_reader(request.request_id, self._streams.add(request))
        self._requests.append(request.request_id)
        return self._replica

    async def stream(self, request_id: str, channel_id: str) -> AsyncIterator[None]:
        await self._streams.forward(request_id, channel_id)
        yield None

    async def read_channel(self, channel_id: str, replica: str) -> AsyncIterator[bytes]:
        async with aclosing(self._streams.read_channel(channel_id)) as steps:
            async for batches in steps:
                for message in encode(batches):
                    yield message

    async def stream_alone(self, request_id: str) -> AsyncIterator[DeltaBatch]:
        async with aclosing(self._streams.read(request_id)) as batches:
            async for batch in batches:
                yield batch

    async def generate(self, load: Load) -> tuple[float, float]:
        """Make all tokens of all requests: (mean milliseconds of a step, CPU seconds less the engine's own)."""
        loop = asyncio.get_running_loop()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        done = asyncio.Event()

        def push(position: int) -> None:
            last = position == load.tokens - 1
            for request_id in self._requests:
                delta = SequenceDelta(
                    text=" word", token_ids=(1000 + position,), finish_reason="length" if last else None
                )
                self._streams.push(request_id, delta)

        def run() -> None:
            for position in range(load.tokens):
                work(load.host_ms / 1e3)
                time.sleep(load.device_ms / 1e3)
                loop.call_soon_threadsafe(push, position)
            loop.call_soon_threadsafe(done.set)

        thread = threading.Thread(target=run)
        thread.start()
        await done.wait()
        step_ms = (time.perf_counter() - began_s) / load.tokens * 1e3
        while len(self._streams):  # noqa: ASYNC110 - until all are read
            await asyncio.sleep(0.01)
        self._requests.clear()
        thread.join()
        return step_ms, time.process_time() - began_cpu_s - load.tokens * load.host_ms / 1e3


class Caller:
    def __init__(self, engine: DeploymentHandle) -> None:
        self._handle, self._engine = engine, EngineHandle(engine)
        self._rounds = 0

    async def measure(self, mode: str, load: Load) -> Result:
        self._rounds += 1
        names = [f"chatcmpl-{self._rounds:016x}{i:016x}" for i in range(load.streams)]
        for name in names:
            sampling = SamplingParams(max_tokens=load.tokens)
            await self._engine.submit(GenerateRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling))
        read = self._engine.stream if mode == "channel" else self._read_alone
        # Each in a context of its own, as requests are: the router takes calls at once from one request for one call.
        readers = [
            asyncio.get_running_loop().create_task(self._count(read(name)), context=contextvars.Context())
            for name in names
        ]
        await asyncio.sleep(1)  # all streams are open
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        step_ms, engine_cpu_s = await self._handle.generate.remote(load)
        counts = await asyncio.gather(*readers)
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        items, tokens = (sum(column) for column in zip(*counts, strict=True))
        assert tokens == load.streams * load.tokens, f"{tokens} of {load.streams * load.tokens} tokens came"
        return Result(
            mode=mode,
            step_ms=round(step_ms, 3),
            tokens_per_s=round(tokens / seconds, 1),
            tokens_per_item=round(tokens / items, 3),
            engine_cpu_us=round(engine_cpu_s / tokens * 1e6, 1),
            caller_cpu_us=round(cpu_s / tokens * 1e6, 1),
        )

    async def _read_alone(self, request_id: str) -> AsyncIterator[DeltaBatch]:
        handle = self._handle.options(session_id=session_id("", request_id), stream=True, _by_reference=False)
        async for batch in handle.stream_alone.remote(request_id):
            yield batch

    async def _count(self, batches: AsyncIterator[DeltaBatch]) -> tuple[int, int]:
        """(items, tokens)."""
        items = tokens = 0
        async for batch in batches:
            items += 1
            tokens += sum(len(delta.token_ids) for delta in batch)
        return items, tokens


def measure(load: Load, rounds: int) -> list[Result]:
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, logging_level="warning")
    try:
        replica: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 4096}
        engine = serve.deployment(Engine, name="Engine", request_router_config=ROUTER, **replica).bind()
        caller = serve.deployment(Caller, name="Caller", **replica).bind(engine)
        handle = serve.run(caller, name=APPLICATION, route_prefix=None)
        results = []
        for turn in range(rounds + 1):
            for mode in MODES:
                result = handle.measure.remote(mode, load).result(timeout_s=300)
                if turn:  # the first is to warm up
                    results.append(result)
                    print(*asdict(result).values(), sep="\t", file=sys.stderr, flush=True)
        return results
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_streams", description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=500, help="of each request (default: %(default)s)")
    parser.add_argument("--host-ms", type=float, default=1.0, help="Python of a step (default: %(default)s)")
    parser.add_argument("--device-ms", type=float, default=4.0, help="waiting of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each mode, in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    load = Load(streams=args.streams, tokens=args.tokens, host_ms=args.host_ms, device_ms=args.device_ms)
    results = measure(load, args.rounds)
    print(f"{'':20}{'ms/step':>9}{'tokens/s':>10}{'tokens/item':>12}{'engine us':>11}{'caller us':>11}")
    for r in results:
        figures = f"{r.step_ms:9.2f}{r.tokens_per_s:10.0f}{r.tokens_per_item:12.2f}"
        print(f"{r.mode:20}{figures}{r.engine_cpu_us:11.1f}{r.caller_cpu_us:11.1f}")
    result = {**header("streams"), **asdict(load), "results": [asdict(r) for r in results]}
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
