"""What start-up measures: seconds of passes and bytes of activations, on this device with this model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from deployments.vision_encoder.adapters.base import PathSpec, VisionAdapter
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.costs import EagerCost
from deployments.vision_encoder.encoder import MemoryLimit
from deployments.vision_encoder.forward import run_eager
from deployments.vision_encoder.graphs import Measure
from deployments.vision_encoder.memory_model import MemoryModel, MemoryPoint, fit_memory_model
from deployments.vision_encoder.packing import Capacity

logger = logging.getLogger(__name__)

_CALIBRATION_SLOTS = 2_048
"""Size of the largest measured pass: large enough that activations outweigh workspaces."""


def measure_seconds(device: torch.device, repeats: int = 5) -> Measure:
    """Median wall time of a call after one unmeasured call; on CUDA until the device is done."""

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


def measure_eager(adapter: VisionAdapter, path: PathSpec, slots: Sequence[int], measure: Measure) -> EagerCost:
    """Time of eager passes at the sizes of the ladder."""
    points = []
    for size in sorted(slots):
        items = adapter.sample_items(path.name, size, size)
        points.append((size, measure(lambda items=items: run_eager(adapter, path.name, items))))  # type: ignore[misc]
    return EagerCost(tuple(points))


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
