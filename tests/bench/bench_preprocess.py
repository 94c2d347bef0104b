"""Preprocessing of one picture, JPEG bytes to patches, against the transformers image processor. Both in one run.

    python -m tests.bench.bench_preprocess [--rounds 15] [--size 1920x1080]

One thread each; medians; CPU-bound regime, nothing cached. Theirs ends with normalised float32 that holds each temporal
frame twice, ours with uint8 patches (the encoder's first projection takes the rest), which is part of the gain.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode import ImageDecoder
from deployments.preprocessor.families.base import PatchGeometry
from deployments.preprocessor.families.qwen2_vl import Qwen2VLFamily
from deployments.preprocessor.media import Inspection, MediaOptions
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.resize import PixelLimits
from tests.bench.pictures import photo_like_jpeg


def medians_ms(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median of each call; the calls take turns, so that a noisy neighbour meets them all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, seen in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                seen.append(time.perf_counter() - start)
    return [statistics.median(seen) * 1e3 for seen in times]


def run_theirs(processor: Qwen2VLImageProcessorPil, data: bytes) -> object:
    return processor(Image.open(io.BytesIO(data)), return_tensors="np")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", default="1920x1080")
    arguments = parser.parse_args()
    width, height = (int(side) for side in arguments.size.split("x"))
    torch.set_num_threads(1)
    data = photo_like_jpeg(width, height)
    rows = []
    for label, max_pixels in (("1280*28*28", 1280 * 784), ("16384*28*28", 16384 * 784)):
        limits = PixelLimits(3136, max_pixels)
        theirs = Qwen2VLImageProcessorPil(min_pixels=limits.min_pixels, max_pixels=limits.max_pixels)
        family = Qwen2VLFamily(
            geometry=PatchGeometry(
                patch_size=14,
                merge_size=2,
                temporal_patch_size=2,
                image_mean=tuple(theirs.image_mean),
                image_std=tuple(theirs.image_std),
            ),
            limits=limits,
            frame_limits=limits,
            image_token_id=1,
            video_token_id=2,
        )

        fast, exact = (MediaProcessor(PreprocessorConfig(resample=name), family) for name in ("torch", "pillow"))
        options = MediaOptions(image_limits=limits, frame_limits=limits, fps=2.0)
        seen = Inspection(size=(width, height))
        decoder = ImageDecoder(max_pixels=10**8)
        calls: list[Callable[[], object]] = [
            partial(run_theirs, theirs, data),
            partial(fast.process, "image", data, seen, options),
            partial(exact.process, "image", data, seen, options),
            partial(decoder.decode, data),
        ]
        theirs_ms, fast_ms, exact_ms, decode_ms = medians_ms(calls, arguments.rounds)
        picture = fast.process("image", data, seen, options)
        for resample, ours_ms in (("torch", fast_ms), ("pillow", exact_ms)):
            rows.append(
                {
                    "max_pixels": label,
                    "slots": picture.layout.num_slots,
                    "resample": resample,
                    "transformers_ms": round(theirs_ms, 2),
                    "ours_ms": round(ours_ms, 2),
                    "decode_ms": round(decode_ms, 2),
                    "gain": round(theirs_ms / ours_ms, 2),
                    "payload_mb": round(picture.patches.nbytes / 1e6, 2),
                }
            )
    print(f"{arguments.size} JPEG of {len(data)} bytes, {arguments.rounds} rounds, one thread")
    titles = ("max_pixels", "slots", "resample", "theirs ms", "ours ms", "decode", "gain", "MB")
    print("{:>12} {:>6} {:>9} {:>10} {:>8} {:>7} {:>6} {:>5}".format(*titles))
    for row in rows:
        print(
            f"{row['max_pixels']:>12} {row['slots']:>6} {row['resample']:>9} {row['transformers_ms']:>10} "
            f"{row['ours_ms']:>8} {row['decode_ms']:>7} {row['gain']:>5}x {row['payload_mb']:>5}"
        )
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({"bench": "preprocess", "size": arguments.size, "machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
