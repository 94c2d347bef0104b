"""Puts the encoder together from its options: folder, device, kernels, graphs, memory. Runs once, at start.

The checkpoint reader (blake3) is imported where it is used, so that a core with given weights runs without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from tqdm import tqdm

from deployments.fp8 import Fp8Ops, choose_fp8
from deployments.vision_encoder.adapters.base import PathSpec, VisionAdapter
from deployments.vision_encoder.adapters.factory import build_adapter, read_normalisation, shape_of
from deployments.vision_encoder.adapters.tower import Normalisation
from deployments.vision_encoder.calibrate import calibrate_memory, eager_sizes, measure_eager, measure_seconds
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.data_parallel import DataParallelCore
from deployments.vision_encoder.encoder import EncoderCore, PathRunner
from deployments.vision_encoder.graphs import GraphManager, Measure
from deployments.vision_encoder.kernel_choice import choose_attention, choose_ops
from deployments.vision_encoder.ladder import make_ladder
from deployments.vision_encoder.packing import Capacity, plan_batches, plan_smallest_first
from deployments.vision_encoder.stats import EncoderStats
from deployments.vision_encoder.weights import DummyWeights, WeightSource, checkpoint_weights

logger = logging.getLogger(__name__)


def load_core(
    config: EncoderConfig, *, keep_on_device: bool = False, stats: EncoderStats | None = None
) -> EncoderCore | DataParallelCore:
    """Core of the model that `config.model` names, warmed up; over several devices if `data_parallel_size` says so.

    Args:
        stats: Counters of the core; with several devices each core has its own (see `DataParallelCore.part_stats`).

    Raises:
        CheckpointError: The folder cannot be used.
        ValueError: Unknown family, wrong tensors, or options that the device cannot honour.
    """
    from deployments.checkpoint import read_json, resolve_model

    folder = resolve_model(config.model, config.revision, config_only=config.load_format == "dummy")
    model_config = read_json(folder, "config.json")
    normalisation = read_normalisation(folder, model_config)
    stored = None if config.load_format == "dummy" else checkpoint_weights(folder)

    def build(device: torch.device, stats: EncoderStats | None) -> EncoderCore:
        return build_core(
            config,
            model_config,
            stored or DummyWeights(device),
            normalisation=normalisation,
            keep_on_device=keep_on_device,
            stats=stats,
            device=device,
        )

    devices = pick_devices(config)
    if len(devices) == 1:
        return build(devices[0], stats)
    if keep_on_device:
        raise ValueError(
            f"data_parallel_size is {config.data_parallel_size}; an encoder inside an engine's replica takes 1, since"
            " its embeddings stay on the engine's device"
        )
    return DataParallelCore([build(device, None) for device in devices], num_threads=config.num_threads)


def build_core(
    config: EncoderConfig,
    model_config: Mapping[str, Any],
    source: WeightSource,
    *,
    normalisation: Mapping[str, Normalisation] | None = None,
    keep_on_device: bool = False,
    stats: EncoderStats | None = None,
    measure: Measure | None = None,
    device: torch.device | None = None,
    fp8: Fp8Ops | None = None,
) -> EncoderCore:
    """One device's core without a folder: weights from any source, such as random ones.

    Args:
        measure: Times a call; the device's clock if None.
        device: The one that the options name if None.
        fp8: What `quantization: fp8` computes with; what the device has if None.
    """
    device = device or pick_devices(config)[0]
    # Streams, graphs and kernels go to the thread's current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _build_core(config, model_config, source, device, normalisation, keep_on_device, stats, measure, fp8)


def _build_core(
    config: EncoderConfig,
    model_config: Mapping[str, Any],
    source: WeightSource,
    device: torch.device,
    normalisation: Mapping[str, Normalisation] | None,
    keep_on_device: bool,
    stats: EncoderStats | None,
    measure: Measure | None,
    fp8: Fp8Ops | None,
) -> EncoderCore:
    dtype = pick_dtype(config, model_config, device)
    if config.quantization and fp8 is None:
        fp8 = choose_fp8(dtype, device, fused=config.fused_kernels)
    shape = shape_of(model_config)
    attention, window_attention = choose_attention(config.mm_encoder_attn_backend, shape, dtype, device)
    ops = choose_ops(config.fused_kernels, shape, dtype, device)
    adapter = build_adapter(
        model_config,
        source,
        dtype=dtype,
        device=device,
        attention=attention,
        window_attention=window_attention,
        ops=ops,
        normalisation=normalisation,
        mlp_width_multiple=config.mlp_width_multiple if device.type == "cuda" else 1,
        fp8=fp8 if config.quantization else None,
    )
    limit = Capacity(
        slots=config.max_batch_slots,
        patches=config.max_batch_patches,
        items=config.max_batch_items,
        segments=config.max_batch_patches,
        frames=config.max_batch_frames,
    )
    return prepare_core(config, adapter, limit, keep_on_device=keep_on_device, stats=stats, measure=measure)


def prepare_core(
    config: EncoderConfig,
    adapter: VisionAdapter,
    limit: Capacity,
    *,
    keep_on_device: bool = False,
    stats: EncoderStats | None = None,
    measure: Measure | None = None,
) -> EncoderCore:
    """Calibrate memory, measure eager passes, capture graphs, for any adapter."""
    stats = stats or EncoderStats()
    measure = measure or measure_seconds(adapter.device)
    started = time.perf_counter()
    memory = calibrate_memory(config, adapter, limit)
    runners = _runners(config, adapter, limit, measure, stats)
    stats.capture_seconds = time.perf_counter() - started
    return EncoderCore(
        adapter,
        limit,
        stats=stats,
        runners=runners,
        memory=memory,
        planner=plan_batches if config.packing == "planned" else plan_smallest_first,
        keep_on_device=keep_on_device,
    )


def _runners(
    config: EncoderConfig, adapter: VisionAdapter, limit: Capacity, measure: Measure, stats: EncoderStats
) -> list[PathRunner]:
    on_cuda = adapter.device.type == "cuda"
    if not (config.cudagraph_mm_encoder and adapter.capturable) if on_cuda else not config.static_buffers_on_cpu:
        return [PathRunner(path.name) for path in adapter.paths]
    pool = torch.cuda.graph_pool_handle() if on_cuda else None
    reserved = _reserved_bytes(adapter.device)
    runners = []
    for path in adapter.paths:
        capacities = path_capacities(config, adapter, path, limit)
        if not capacities:
            runners.append(PathRunner(path.name))
            continue
        sizes = eager_sizes([capacity.slots for capacity in capacities], path.slot_step)
        eager_cost = measure_eager(adapter, path, sizes, measure)
        graphs = GraphManager(adapter, path.name, capacities, capture=on_cuda, pool=pool)
        graphs.prepare(measure, eager_cost if on_cuda else None, _progress(config, path.name))
        runners.append(PathRunner(path.name, eager_cost, graphs))
        stats.graph_bytes += graphs.input_bytes
    if on_cuda:
        stats.graph_bytes = _reserved_bytes(adapter.device) - reserved
    logger.info("encoder budgets: %.0f MiB for %s", stats.graph_bytes / 2**20, [runner.name for runner in runners])
    return runners


def _reserved_bytes(device: torch.device) -> int:
    """Device memory held by torch, without what eager passes left in its cache; 0 on CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def path_capacities(config: EncoderConfig, adapter: VisionAdapter, path: PathSpec, limit: Capacity) -> list[Capacity]:
    """Budgets to capture for a path; empty for paths of frames if `encoder_cudagraph_max_frames_per_batch` is 0."""
    top = min(config.encoder_cudagraph_max_budget, limit.slots)
    if config.encoder_cudagraph_token_budgets:
        top = limit.slots
    budgets = make_ladder(
        path.min_slots,
        top,
        steps_per_octave=1 if path.of_frames else config.encoder_cudagraph_steps_per_octave,
        slot_step=path.slot_step,
        explicit=config.encoder_cudagraph_token_budgets,
        usual=path.usual_slots if config.encoder_cudagraph_usual_sizes else (),
    )
    most_frames = config.encoder_cudagraph_max_frames_per_batch
    if path.of_frames and most_frames == 0:
        return []
    capacities = []
    for slots in budgets:
        # Empty segments cost launch slots in every attention layer, so a budget takes no more items than it needs.
        items = config.encoder_cudagraph_max_vision_items_per_batch or max(2, slots // path.min_slots)
        frames = most_frames if most_frames is not None else 4 * items
        capacity = adapter.capacity(path.name, slots, min(items, limit.items), min(frames, limit.frames))
        if capacity.patches <= limit.patches:
            capacities.append(capacity)
    return capacities


def _progress(config: EncoderConfig, path: str) -> Callable[[Iterable[Capacity]], Iterable[Capacity]]:
    if not config.capture_progress:
        return iter
    return lambda budgets: tqdm(budgets, desc=f"capturing encoder graphs ({path})", unit="budget")


def pick_devices(config: EncoderConfig) -> list[torch.device]:
    """One device per data parallel rank.

    Raises:
        ValueError: No CUDA device is visible though `device` asks for one, or fewer than `data_parallel_size`.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not visible:
        raise ValueError("device is 'cuda', but no CUDA device is visible; allowed here: auto, cpu")
    wanted = config.data_parallel_size
    if config.device == "cpu" or not visible:
        return [torch.device("cpu")] * wanted
    if wanted > visible:
        raise ValueError(
            f"data_parallel_size is {wanted}, but {visible} CUDA device(s) are visible to this replica; ask for"
            f" num_gpus: {wanted} in its ray_actor_options"
        )
    if wanted == 1:
        return [torch.device("cuda", torch.cuda.current_device())]
    return [torch.device("cuda", index) for index in range(wanted)]


def pick_dtype(config: EncoderConfig, model_config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        text = model_config.get("text_config") or {}
        stored = next(
            (source[key] for source in (model_config, text) for key in ("dtype", "torch_dtype") if source.get(key)),
            "bfloat16",
        )
        name = "float32" if device.type == "cpu" else str(stored).removeprefix("torch.")  # type: ignore[assignment]
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {name!r} of the checkpoint is not served; allowed: float32, bfloat16, float16")
    return dtype
