"""Where the time of one request goes: the dev configuration with the shipped model, on CPU, one request at a time.

    python -m tests.bench.bench_stages [--requests 40] [--size 1280x720] [--tokens 16] [--out FILE]

Every picture is new, then each is sent once more. Stage times are the server's own (`x-sightline-timings: 1`); the
client's clock stands beside their sum. `hop` rows are calls through the deployments' handles that do no work there.
Medians. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from ray import serve
from tqdm import tqdm

from app.serve import LocalServer, load_config
from deployments.handles import EngineHandle, PreprocessorHandle
from deployments.messages import EncodeRequest, PrepareRequest, TextPrompt
from tests.bench.pictures import photo_like_jpeg
from tests.bench.record import header

CONFIG = Path(__file__).parents[2] / "serve_configs" / "dev.yaml"
START_TIMEOUT_S = 240
WARM_UP = 5


def new_jpeg(width: int, height: int, seed: int) -> bytes:
    """A picture that no cache has seen."""
    return photo_like_jpeg(width, height, seed=seed, grain_levels=4.0)


def ask(client: httpx.Client, model: str, jpeg: bytes, max_tokens: int) -> tuple[float, dict[str, float]]:
    """Seconds on the client's clock, and by stage."""
    url = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
    body = {
        "model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe what you see."}]}],
    }  # fmt: skip
    start_s = time.perf_counter()
    answer = client.post("/v1/chat/completions", json=body, headers={"x-sightline-timings": "1"})
    seconds = time.perf_counter() - start_s
    return seconds, answer.raise_for_status().json()["sightline"]["stage_seconds"]


def medians(rows: list[tuple[float, dict[str, float]]], max_tokens: int) -> dict[str, float]:
    """Milliseconds by stage, the client's among them."""
    stages = dict.fromkeys(name for _, found in rows for name in found)
    table = {name: statistics.median(found.get(name, 0.0) for _, found in rows) * 1e3 for name in stages}
    table["per token"] = table["generation"] / (max_tokens - 1)
    table["sum of stages"] = statistics.median(sum(found.values()) for _, found in rows) * 1e3
    table["client"] = statistics.median(seconds for seconds, _ in rows) * 1e3
    return table


async def hops_ms(application: str, rounds: int) -> dict[str, float]:
    def handle(name: str) -> Any:
        return serve.get_deployment_handle(name, application)

    preprocessor, encoder = PreprocessorHandle(handle("Preprocessor")), handle("VisionEncoder")
    engine = EngineHandle(handle("LMEngine"))
    text = PrepareRequest(request_id="hop", prompt=TextPrompt(text="a"))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "hop to the preprocessor": lambda: preprocessor.prepare(text),
        "hop to the encoder": lambda: encoder.encode.remote(EncodeRequest(request_id="hop", items=())),
        "hop to the engine": lambda: engine.abort("hop"),
    }
    found = {}
    for name, call in calls.items():
        seen = []
        for turn in range(rounds + WARM_UP):
            start_s = time.perf_counter()
            await call()
            if turn >= WARM_UP:
                seen.append(time.perf_counter() - start_s)
        found[name] = statistics.median(seen) * 1e3
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_stages", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=40, help="new pictures (default: %(default)s)")
    parser.add_argument("--size", default="1280x720", help="of the JPEG that is sent (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer, 2 or more (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    config = load_config(CONFIG, args.port)
    server = LocalServer(config, num_cpus=8, object_store_bytes=512 << 20)
    server.start(START_TIMEOUT_S)
    try:
        (application,) = config["applications"]
        model = application["args"]["served_model_name"]
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for seed in range(WARM_UP):
                ask(client, model, new_jpeg(width, height, seed), args.tokens)
            pictures = [new_jpeg(width, height, 1000 + seed) for seed in range(args.requests)]
            tables = {
                name: medians([ask(client, model, jpeg, args.tokens) for jpeg in tqdm(pictures, name)], args.tokens)
                for name in ("new picture", "repeat")
            }
        hops = asyncio.run(hops_ms(application["name"], args.requests))
    finally:
        server.stop()
    print(f"\n{'ms':26}{'new picture':>14}{'repeat':>14}")
    for stage in tables["new picture"]:
        print(f"{stage:26}{tables['new picture'][stage]:14.2f}{tables['repeat'].get(stage, 0.0):14.2f}")
    for hop, ms in hops.items():
        print(f"{hop:26}{ms:14.2f}")
    result = {
        **header("stages"), "torch": torch.__version__,
        "requests": args.requests, "size": args.size, "tokens": args.tokens, "ms": tables, "hop_ms": hops,
    }  # fmt: skip
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
