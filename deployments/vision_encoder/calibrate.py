"""What start-up measures: seconds of passes and bytes of activations, on this device with this model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from deployments.vision_encoder.adapters.base import PathSpec, VisionAdapter
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.costs import PassCost, fit_pair_seconds, fit_pass_cost
from deployments.vision_encoder.encoder import MemoryLimit
from deployments.vision_encoder.forward import load_of, run_eager, to_host
from deployments.vision_encoder.graphs import Measure
from deployments.vision_encoder.memory_model import MemoryModel, MemoryPoint, fit_memory_model
from deployments.vision_encoder.packing import Capacity, Load

logger = logging.getLogger(__name__)

_CALIBRATION_SLOTS = 2_048
"""Size of the largest measured pass: large enough that activations outweigh workspaces."""


def measure_seconds(device: torch.device, repeats: int = 3) -> Measure:
    """Median wall time of a call after one unmeasured call; on CUDA from an idle device until it is done."""

    def measure(call: Callable[[], object]) -> float:
        samples = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples.append(time.perf_counter() - started)
        return median(samples[1:])

    return measure


def measure_eager(adapter: VisionAdapter, path: PathSpec, slots: Sequence[int], measure: Measure) -> PassCost:
    """Cost of eager passes, from passes of usual small items at the given sizes, upload and copying out included, and
    from one of a single item at the largest."""

    def timed(size: int, longest: int) -> tuple[Load, float]:
        items = adapter.sample_items(path.name, size, longest)
        seconds = measure(lambda: [to_host(rows) for rows in run_eager(adapter, path.name, items)])
        return load_of(adapter, path.name, items), seconds

    points = [timed(size, min(size, path.min_slots)) for size in sorted(slots)]
    top = max(slots)
    return fit_pass_cost(points, fit_pair_seconds(timed(top, top), points[-1]))


def eager_sizes(slots: Sequence[int], step: int) -> list[int]:
    """Of the sizes of a ladder, about one an octave with the smallest and the largest: the curve between is smooth.

    Args:
        step: Sizes must be multiples of this.
    """
    sizes, top = [min(slots)], max(slots)
    while sizes[-1] * 2 < top:
        sizes.append(sizes[-1] * 2 // step * step)
    return sorted({*sizes, top})


def calibrate_memory(config: EncoderConfig, adapter: VisionAdapter, limit: Capacity) -> MemoryLimit | None:
    """Model and limit of a pass's activation memory.

    On CPU nothing can be measured: the adapter's estimate is used, and only if `batch_memory_bytes` asks for a limit.

    Raises:
        ValueError: The limit does not hold even the smallest usual item.
    """
    if adapter.device.type == "cuda":
        model = _measured_model(adapter, limit)
        free_bytes = torch.cuda.mem_get_info(adapter.device)[0]
        limit_bytes = config.batch_memory_bytes or int(free_bytes * config.batch_memory_fraction)
    elif config.batch_memory_bytes:
        model = MemoryModel(0.0, float(adapter.activation_bytes_per_patch))
        limit_bytes = config.batch_memory_bytes
    else:
        return None
    path = adapter.paths[0]
    least = adapter.capacity(path.name, path.min_slots, 1, 1).patches
    needed = model.predict_bytes(least, least)
    if needed > limit_bytes:
        raise ValueError(
            f"batch_memory_bytes allows {limit_bytes}; an item of {path.min_slots} slots alone needs {needed}"
        )
    logger.info("encoder memory: %.0f bytes a patch, limit %.0f MiB", model.bytes_per_patch, limit_bytes / 2**20)
    return MemoryLimit(model=model, limit_bytes=limit_bytes)


def _measured_model(adapter: VisionAdapter, limit: Capacity) -> MemoryModel:
    path = adapter.paths[0]
    top = min(_CALIBRATION_SLOTS, limit.slots) // path.slot_step * path.slot_step
    points = []
    for slots in {max(path.min_slots, top // 4), max(path.min_slots, top // 2), top}:
        for longest in {slots, max(path.min_slots, slots // 4)}:
            items = adapter.sample_items(path.name, slots, longest)
            run_eager(adapter, path.name, items)
            torch.cuda.synchronize(adapter.device)
            before = torch.cuda.memory_allocated(adapter.device)
            torch.cuda.reset_peak_memory_stats(adapter.device)
            run_eager(adapter, path.name, items)
            torch.cuda.synchronize(adapter.device)
            loads = [adapter.describe(item.modality, item.grid).loads[path.name] for item in items]
            points.append(
                MemoryPoint(
                    sum(load.patches for load in loads),
                    max(load.longest_patches for load in loads),
                    torch.cuda.max_memory_allocated(adapter.device) - before,
                )
            )
    return fit_memory_model(points)
