"""An embedding from the encoder's process to the engine's, by each back end that works here.

    python -m tests.bench.bench_embedding_transfer [--mib 11] [--rounds 50] [--gpus 0|1|2] \\
        [--commit $(git rev-parse HEAD)] [--out FILE]

Two Ray actors. One puts a fresh embedding as an encoder does: from the host, or with GPUs from the device, which for
the object store means reading it back first. The other one gets it and uploads it as an engine does, through the pool,
until it has a tensor of its own on its device. With one GPU both share it, with two each has its own. Medians and 95th
percentiles in ms; a back end that does not work here is named with its reason. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import ray
import torch
from tqdm import tqdm

from deployments.direct_store import open_store
from deployments.lm_engine.embed_pool import EmbedPool
from deployments.lm_engine.embed_upload import EmbedUploader
from deployments.ports import EmbeddingTransfer
from tests.bench.record import header

WIDTH = 3584
"""Columns of a row: the hidden size of a language model of 7B parameters."""
WARM_UP = 5
STEPS = ("put", "get", "upload", "whole")


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Encoder:
    """The side that puts."""

    def __init__(self, transfer: EmbeddingTransfer, num_rows: int) -> None:
        self._store, self._transfer = open_store(transfer), transfer
        self._device, self._num_rows = device_here(), num_rows

    async def device(self) -> str:
        return torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu"

    async def put(self, value: float) -> tuple[list[Any], float]:
        """A ref to rows that hold `value`, nested in a list so that it stays one, and the seconds of putting."""
        rows = torch.full((self._num_rows, WIDTH), value, dtype=torch.bfloat16, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        ref = await asyncio.to_thread(self._put, rows)
        return [ref], time.perf_counter() - began_s

    def _put(self, rows: torch.Tensor) -> Any:
        if self._transfer != "object_store":
            return self._store.put(rows)
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows) if rows.is_cuda else rows
        return self._store.put(host.view(torch.uint16).numpy())


class Engine:
    """The side that gets."""

    def __init__(self, transfer: EmbeddingTransfer, num_rows: int) -> None:
        self._store = open_store(transfer)
        pool = EmbedPool(4 * num_rows * WIDTH * 2)
        self._uploader = EmbedUploader(pool, device_here(), torch.bfloat16)

    async def take(self, message: list[Any], value: float) -> tuple[float, float]:
        """Seconds of getting and uploading."""
        began_s = time.perf_counter()
        rows: np.ndarray | torch.Tensor = await self._store.get(message[0])
        got_s = time.perf_counter()
        tensor = await self._uploader.upload(rows, "bfloat16")
        if tensor.is_cuda:
            torch.cuda.synchronize()
        ended_s = time.perf_counter()
        if not (tensor.device.type == device_here().type and bool((tensor == value).all())):
            raise AssertionError("what arrived is not what was put")
        return got_s - began_s, ended_s - got_s


def measure(transfer: EmbeddingTransfer, num_rows: int, rounds: int, gpus: int) -> tuple[dict[str, list[float]], str]:
    """Seconds of each step, round by round, and the device.

    Raises:
        RayError: The back end does not work here.
    """
    options: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": {0: 0, 1: 0.5, 2: 1}[gpus]}
    encoder = ray.remote(Encoder).options(**options).remote(transfer, num_rows)
    engine = ray.remote(Engine).options(**options).remote(transfer, num_rows)
    device: str = ray.get(encoder.device.remote())
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    for turn in tqdm(range(rounds + WARM_UP), desc=transfer, unit="embedding"):
        began_s = time.perf_counter()
        message, put_s = ray.get(encoder.put.remote(float(turn % 64)))
        get_s, upload_s = ray.get(engine.take.remote(message, float(turn % 64)))
        whole_s = time.perf_counter() - began_s
        del message
        gc.collect()
        if turn >= WARM_UP:
            for step, value in zip(STEPS, (put_s, get_s, upload_s, whole_s), strict=True):
                seconds[step].append(value)
    ray.kill(encoder)
    ray.kill(engine)
    return seconds, device


def summary(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, float]:
    """Milliseconds, and bytes per second of the three steps together."""
    found: dict[str, float] = {}
    for step, values in seconds.items():
        found[f"{step}_ms_p50"] = round(1e3 * statistics.median(values), 3)
        found[f"{step}_ms_p95"] = round(1e3 * sorted(values)[int(0.95 * (len(values) - 1))], 3)
    moved_s = statistics.median(map(sum, zip(*(seconds[step] for step in STEPS[:3]), strict=True)))
    found["bytes_per_s"] = round(num_bytes / moved_s)
    return found


def reason_of(error: Exception) -> str:
    """The last line that says why."""
    lines = [line.strip() for line in str(error).splitlines() if "embedding_transfer" in line or "Error" in line]
    return lines[-1] if lines else repr(error)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_embedding_transfer", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--mib", type=float, default=11.0, help="size of an embedding")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=0, help="1: shared by both, 2: one each")
    parser.add_argument(
        "--backend", nargs="+", choices=get_args(EmbeddingTransfer), default=get_args(EmbeddingTransfer)
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    num_rows = max(1, round(options.mib * 2**20 / (2 * WIDTH)))
    num_bytes = num_rows * WIDTH * 2
    ray.init(
        num_cpus=4, num_gpus=options.gpus, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20
    )
    backends: dict[str, dict[str, Any]] = {}
    device = ""
    for transfer in options.backend:
        try:
            seconds, device = measure(transfer, num_rows, options.rounds, options.gpus)
        except ray.exceptions.RayError as error:
            backends[transfer] = {"unavailable": reason_of(error)}
        else:
            backends[transfer] = summary(seconds, num_bytes)
    ray.shutdown()

    print(f"\n{num_bytes / 2**20:.1f} MiB ({num_rows} x {WIDTH} bfloat16), {device}, medians in ms\n")
    print("| back end | put | get | upload | the three | with both calls | GB/s |")
    print("|---|---|---|---|---|---|---|")
    for name, found in backends.items():
        if "unavailable" in found:
            print(f"| {name} | {found['unavailable']} | | | | | |")
            continue
        steps = [found[f"{step}_ms_p50"] for step in STEPS]
        rate = found["bytes_per_s"] / 1e9
        print(
            f"| {name} | {steps[0]:.2f} | {steps[1]:.2f} | {steps[2]:.2f} | {num_bytes / rate / 1e6:.2f} |"
            f" {steps[3]:.2f} | {rate:.2f} |"
        )
    result = {
        **header("embedding_transfer"),
        "commit": options.commit,
        "device": device,
        "versions": {"ray": ray.__version__, "torch": torch.__version__},
        "num_bytes": num_bytes,
        "rounds": options.rounds,
        "backends": backends,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
