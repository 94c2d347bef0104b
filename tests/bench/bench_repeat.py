"""What a repeated picture costs in each state of the caches. CPU, one process and one Valkey server on the same host.

    python -m tests.bench.bench_repeat [--seconds 5] [--size 1920x1080] [--mib 11] [--rounds 40] [--http]

- `prepare`: requests/s of the preprocessor core for one repeated JPEG, one request at a time, with and without the
  alias table, and as a replica that has not seen the picture but finds it in the index that replicas share.
- `get`: from a request to an embedding of --mib MiB in the encoder's hands, out of Redis: look-up, transfer, checksum,
  shape check. The encoder core is not run; the service, the tiers and the codec are the real ones.
- `bytes`: what one repeat moves through the object store and Redis, by where its embedding is found, with the shipped
  model's encoder. The request body itself comes on top.
- `http` (with --http): requests/s of the whole application for the repeated picture at 8 requests at a time, one token
  each, with and without the alias table.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cache_service.cluster_flight import ClusterFlight
from cache_service.identity import EncoderFingerprint, ItemIdentity, embedding_identity
from cache_service.read_through import Found, ReadThrough
from cache_service.redis_lease import RedisLeases
from cache_service.redis_tier import RedisTier
from cache_service.single_flight import SingleFlight
from cache_service.tiered import TieredCache
from deployments.messages import (
    ChatPrompt,
    EncodedItem,
    EncodeRequest,
    MediaInput,
    MediaItem,
    PreparedPrompt,
    PrepareRequest,
    Ref,
)
from deployments.preprocessor.build import build_preprocessor
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.preprocess import PreprocessorCore
from deployments.preprocessor.shared_index import SharedIndex
from deployments.vision_encoder.adapters.base import ItemSpec, VisionItem
from deployments.vision_encoder.batcher import DynamicBatcher
from deployments.vision_encoder.build import load_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.embedding_codec import Embedding, decode_embedding, encode_embedding
from deployments.vision_encoder.encoder import Rows
from deployments.vision_encoder.packing import Load
from deployments.vision_encoder.service import EncoderService
from deployments.vision_encoder.stats import EncoderStats
from tests.bench.pictures import photo_like_jpeg
from tests.redis.rig import config as redis_config
from tests.redis.rig import running_server
from tests.serve.app_process import running_app

MODEL = Path(__file__).parents[2] / "serve_configs" / "demo_model"
MIB = 1024 * 1024
FINGERPRINT = EncoderFingerprint(model_id="bench", weights_revision="1", dtype="float32")
NO_ALIAS_BYTES = 1
"""Room of an alias table that takes nothing."""
HTTP_CONCURRENCY = 8


@dataclass
class CountingStore:
    """ports.ObjectStore in memory that counts the payload bytes going through it. A test double for Ray's store: the
    bytes are those that would be written to and mapped from shared memory."""

    put_bytes: int = 0
    get_bytes: int = 0
    values: dict[int, Any] = field(default_factory=dict)

    def put(self, value: Any) -> Ref:
        ref = len(self.values)
        self.values[ref] = value
        self.put_bytes += _num_bytes(value)
        return ref

    async def get(self, ref: Ref) -> Any:
        value = self.values[ref]
        self.get_bytes += _num_bytes(value)
        return value


def _num_bytes(value: Any) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes


class OneShapeCore:
    """Stands in for a model whose picture has `rows` x `width` bfloat16 embeddings; it is never run."""

    dtype_name = "bfloat16"

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width

    def describe(self, modality: str, grid: tuple[int, int, int]) -> ItemSpec:
        return ItemSpec(self.rows, (4 * self.rows, 1176), {})


class NeverBatcher:
    async def submit(self, item: VisionItem, load: Load) -> Rows:
        raise AssertionError("the embedding was not found")

    async def close(self) -> None:
        pass


def request_of(url: str) -> PrepareRequest:
    prompt = ChatPrompt(
        messages=({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},)
    )
    return PrepareRequest(
        request_id="r", prompt=prompt, media=(MediaInput(modality="image", param="messages[0]", url=url),)
    )


# -- prepare ----------------------------------------------------------------------------------------------------------
async def prepare_figures(url: str, seconds: float) -> dict[str, float]:
    request = request_of(url)
    figures: dict[str, float] = {}
    configs = {"alias": PreprocessorConfig(), "no_alias": PreprocessorConfig(alias_cache_bytes=NO_ALIAS_BYTES)}
    for name, config in configs.items():
        core = build_preprocessor(config, MODEL, CountingStore())
        figures[f"prepare_{name}_per_s"] = await _rate(core, request, seconds)
        decodes, requests = core.stats().decodes, core.stats().requests
        assert decodes == (1 if name == "alias" else requests)
        await core.close()
    with running_server() as server:
        link_config = redis_config(server.url)
        tiers = [RedisTier.connect(link_config, kind=kind) for kind in ("alias", "refused", "uuid")]
        for tier in tiers:
            await tier.start()
        index = SharedIndex(aliases=tiers[0], refusals=tiers[1], names=tiers[2])
        seen = build_preprocessor(PreprocessorConfig(), MODEL, CountingStore(), index=index)
        await seen.prepare(request)
        await tiers[0].flush()
        # Forgets what it learns, so that each request asks the shared index anew.
        forgetful = PreprocessorConfig(alias_cache_bytes=NO_ALIAS_BYTES)
        other = build_preprocessor(forgetful, MODEL, CountingStore(), index=index)
        figures["prepare_shared_alias_per_s"] = await _rate(other, request, seconds)
        assert other.stats().decodes == 0
        await seen.close()
    return figures


async def _rate(core: PreprocessorCore, request: PrepareRequest, seconds: float) -> float:
    await core.prepare(request)
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        await core.prepare(request)
        count += 1
    return count / elapsed


# -- get --------------------------------------------------------------------------------------------------------------
async def redis_figures(mib: int, rounds: int) -> dict[str, float]:
    width = 3584
    rows = mib * MIB // (2 * width)
    item = MediaItem(
        modality="image",
        identity=ItemIdentity(os.urandom(32)),
        grid=(1, 2, 2 * rows),
        offset=0,
        num_slots=rows,
        num_patches=4 * rows,
    )
    array = np.frombuffer(os.urandom(rows * width * 2), np.uint16).reshape(rows, width)
    figures: dict[str, float] = {"embedding_mib": array.nbytes / MIB}
    with running_server() as server:
        async with AsyncExitStack() as stack:
            tier = RedisTier.connect(redis_config(server.url), kind="embedding")
            await tier.start()
            stack.push_async_callback(tier.close)
            lower = _read_through(tier)
            stats = EncoderStats()
            service = EncoderService(
                OneShapeCore(rows, width),
                NeverBatcher(),
                CountingStore(),
                fingerprint=FINGERPRINT,
                cache_bytes=1,  # keeps nothing: each request goes to Redis
                stats=stats,
                lower=lower,
            )
            request = EncodeRequest(request_id="r", items=(item,))
            await lower.get_or_compute(_key(item), lambda: _ready(Embedding(array, "bfloat16", item.grid)))
            await lower.close()
            times = []
            for _ in range(rounds):
                started = time.perf_counter()
                (encoded,) = await service.encode(request)
                times.append(time.perf_counter() - started)
                assert encoded.origin == "redis"
            figures["redis_get_end_to_end_ms"] = 1000 * statistics.median(times)
            figures["redis_get_gb_per_s"] = array.nbytes / statistics.median(times) / 1e9
    return figures


def _key(item: MediaItem) -> bytes:
    return embedding_identity(item.identity, FINGERPRINT)


async def _ready(embedding: Embedding) -> Embedding:
    return embedding


def _read_through(tier: RedisTier) -> ReadThrough[Embedding]:
    flights: SingleFlight[Found[Embedding]] = SingleFlight()
    return ReadThrough(
        TieredCache([tier], decode_embedding),
        partial(encode_embedding, model="bench"),
        flights=flights,
        shared=tier,
        cluster=ClusterFlight(RedisLeases(tier.link, tier.layout)),
    )


# -- bytes ------------------------------------------------------------------------------------------------------------
async def moved_bytes(url: str) -> dict[str, dict[str, int]]:
    """Bytes by way, of one request in each state. An LM hit makes no call to the encoder at all."""
    store, stats = CountingStore(), EncoderStats()
    core = load_core(EncoderConfig(model=str(MODEL), dtype="float32", capture_progress=False), stats=stats)
    preprocessor = build_preprocessor(PreprocessorConfig(), MODEL, store)
    moved: dict[str, dict[str, int]] = {}
    with running_server() as server:
        tier = RedisTier.connect(redis_config(server.url), kind="embedding")
        await tier.start()
        lower = _read_through(tier)
        batcher = DynamicBatcher(core.encode, core.limit, max_wait_s=0.0, max_queued_items=8, stats=stats)
        service = EncoderService(
            core,
            batcher,
            store,
            fingerprint=FINGERPRINT,
            cache_bytes=256 * MIB,
            stats=stats,
            preprocessor=preprocessor,
            lower=lower,
        )
        for state, origin in (("none", "computed"), ("memory_hit", "memory"), ("redis_hit", "redis"), ("lm_hit", None)):
            if state == "redis_hit":
                service.memory.clear()
            before = (store.put_bytes, store.get_bytes, tier.stats().bytes_in, tier.stats().bytes_out)
            prepared = await preprocessor.prepare(request_of(url))
            if origin is not None:
                encoded = await _encode(service, prepared)
                assert encoded.origin == origin, encoded.origin
                await store.get(encoded.embeddings)  # as the engine does
            await lower.close()
            after = (store.put_bytes, store.get_bytes, tier.stats().bytes_in, tier.stats().bytes_out)
            ways = ("store_put", "store_get", "redis_read", "redis_write")
            moved[state] = {way: new - old for way, new, old in zip(ways, after, before, strict=True)}
        await service.close()
        await tier.close()
    await preprocessor.close()
    return moved


async def _encode(service: EncoderService, prepared: PreparedPrompt) -> EncodedItem:
    (encoded,) = await service.encode(EncodeRequest(request_id="r", items=prepared.items))
    return encoded


# -- http -------------------------------------------------------------------------------------------------------------
def http_figures(url: str, seconds: float) -> dict[str, float]:
    figures = {}
    for name, options in (("alias", {}), ("no_alias", {"alias_cache_bytes": NO_ALIAS_BYTES})):
        with (
            tempfile.TemporaryDirectory() as folder,
            running_app(Path(folder), args={"preprocessor": options}, replicas={}) as app,
        ):
            figures[f"http_{name}_per_s"] = _http_rate(app.url, app.model, url, seconds)
    return figures


def _http_rate(server: str, model: str, url: str, seconds: float) -> float:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1})

    def ask_until(end_s: float) -> int:
        count = 0
        with httpx.Client(base_url=server, timeout=60) as client:
            while time.perf_counter() < end_s:
                reply = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
                reply.raise_for_status()
                count += 1
        return count

    ask_until(time.perf_counter() + 1.0)
    with ThreadPoolExecutor(HTTP_CONCURRENCY) as pool:
        started = time.perf_counter()
        counts = pool.map(ask_until, [started + seconds] * HTTP_CONCURRENCY)
        return sum(counts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate (default: %(default)s)")
    parser.add_argument("--size", default="1920x1080", help="of the picture (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=11, help="of the embedding read from Redis (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="reads from Redis (default: %(default)s)")
    parser.add_argument("--http", action="store_true", help="measure the whole application, too")
    options = parser.parse_args()
    width, height = (int(side) for side in options.size.split("x"))
    picture = photo_like_jpeg(width, height)
    url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
    figures: dict[str, float] = asyncio.run(prepare_figures(url, options.seconds))
    figures |= asyncio.run(redis_figures(options.mib, options.rounds))
    moved: Mapping[str, Mapping[str, int]] = asyncio.run(moved_bytes(url))
    if options.http:
        figures |= http_figures(url, options.seconds)
    for name, value in figures.items():
        print(f"{name:<32} {value:>12.2f}")
    for state, ways in moved.items():
        print(f"bytes, {state:<24} " + "  ".join(f"{way} {count}" for way, count in ways.items()))
    print(
        json.dumps(
            {
                "bench": "repeat",
                "date": time.strftime("%Y-%m-%d"),
                "command": " ".join(["python -m tests.bench.bench_repeat", *sys.argv[1:]]),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "load_1min": round(os.getloadavg()[0], 1),
                "picture": {"size": options.size, "file_bytes": len(picture), "body_bytes": len(url)},
                "figures": {name: round(value, 3) for name, value in figures.items()},
                "bytes_per_request": moved,
            }
        )
    )


if __name__ == "__main__":
    main()
