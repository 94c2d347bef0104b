"""The vision encoder on one or two GPUs: a 7B-shaped Qwen2.5-VL tower, random weights, random pixels, bf16.

    python -m tests.bench.bench_encoder --out tests/bench/results/encoder_h200.json --seconds 115 \\
        --commit $(git rev-parse HEAD)
    python -m tests.bench.bench_encoder --out /tmp/profile.json --profile         (top kernels and the bottleneck alone)
    python -m tests.bench.bench_encoder --out /tmp/encoder_fp8.json --quantization fp8
    python -m tests.bench.bench_encoder --out /tmp/encoder.json --device cpu --tiny       (does it run?)

Every part stands alone: one that fails leaves its error in the results and the next one runs. The results are written
after each case, so that whatever cuts the run short leaves what was measured; the parts that decide most come first.
Regimes: up to about 1,000 slots a pass is bound by launches, above by matrix products.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deployments.fp8 import EmulatedFp8
from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.adapters.factory import family_of, shape_of
from deployments.vision_encoder.build import build_core, path_capacities
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.data_parallel import DataParallelCore
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.forward import run_eager, to_host
from deployments.vision_encoder.graphs import GraphManager
from deployments.vision_encoder.packing import Load, plan_batches, plan_smallest_first
from deployments.vision_encoder.weights import TensorWeights
from tests.bench.encoder_kernels import compare_frames, compare_products, compare_windows, device_us, summarise

Case = tuple[str, Any]
"""Name and what was measured."""

VISION_7B: dict[str, Any] = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "out_hidden_size": 3584,
}
TINY = VISION_7B | {
    "depth": 4,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 70,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1, 3],
}
"""For a dry run (`--tiny`)."""
CASES: tuple[tuple[int, int], ...] = ((1, 224), (1, 336), (4, 336), (1, 644), (1, 1036), (4, 1036), (20, 336))
MIX: tuple[tuple[float, int], ...] = ((0.3, 224), (0.3, 336), (0.2, 448), (0.1, 672), (0.1, 1036))
MIXED_REQUESTS = 400


class Bench:
    """All parts; each yields its cases as they are done."""

    def __init__(self, *, device: str, tiny: bool, deadline_s: float, quantization: str | None = None) -> None:
        self.device = torch.device(device)
        self.quantization = quantization
        self.on_cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.vision = TINY if tiny else VISION_7B
        self.model: dict[str, Any] = {"model_type": "qwen2_5_vl", "vision_config": self.vision}
        self.tiny, self.deadline_s = tiny, deadline_s
        self.state = random_state(self.vision, self.device)
        self.core: EncoderCore | None = None

    @property
    def config(self) -> EncoderConfig:
        return EncoderConfig(
            model="bench",
            device=self.device.type,  # type: ignore[arg-type]
            dtype="bfloat16" if self.on_cuda else "float32",
            quantization=self.quantization,  # type: ignore[arg-type]
            max_batch_slots=1_024 if self.tiny else 16_384,
            encoder_cudagraph_max_frames_per_batch=0,
            static_buffers_on_cpu=not self.on_cuda,
            encoder_cudagraph_steps_per_octave=1 if self.tiny else 8,
            capture_progress=False,
        )

    def build(self, config: EncoderConfig, device: torch.device | None = None) -> EncoderCore:
        return build_core(
            config,
            self.model,
            TensorWeights(self.state),
            device=device or self._first_device(),
            fp8=None if self.on_cuda else EmulatedFp8(),
        )

    def _first_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_cuda else self.device

    def ready(self) -> EncoderCore:
        if self.core is None:
            raise RuntimeError("the setup part failed or was left out")
        return self.core

    def items(self, count: int, side: int, seed: int = 0) -> list[VisionItem]:
        patches = max(2, side // 56 * 2) if self.tiny else side // 28 * 2
        generator = np.random.default_rng(seed)
        grid = (1, patches, patches)
        size = (patches * patches, 588)
        return [VisionItem("image", grid, generator.integers(0, 256, size, dtype=np.uint8)) for _ in range(count)]

    def load(self, items: Sequence[VisionItem]) -> Load:
        core = self.ready()
        return sum((core.describe(item.modality, item.grid).loads["image"] for item in items), Load())

    def time_ms(self, call: Callable[[], object], repeats: int = 20) -> dict[str, float]:
        """Wall time until the device is done, after two unmeasured calls; fewer repeats once the time is up."""
        samples: list[float] = []
        for turn in range(repeats + 2):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            if turn >= 2:
                samples.append((time.perf_counter() - started) * 1e3)
            if samples and time.perf_counter() > self.deadline_s:
                break
        return {"median_ms": round(statistics.median(samples), 3), "max_ms": round(max(samples), 3)}

    def synchronize(self) -> None:
        if self.on_cuda:
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    # -- parts --------------------------------------------------------------------------------------------------------
    def parity(self) -> Iterator[Case]:
        """Least cosine of a row with transformers' tower in float32: ours without graphs, and transformers' own in our
        precision."""
        core = self.build(replace(self.config, cudagraph_mm_encoder=False, static_buffers_on_cpu=False))
        exact = hf_tower(self.vision, self.state, torch.float32, self.device)
        half = hf_tower(self.vision, self.state, self.dtype, self.device)
        for sides in ([336, 224, 644], [1036]):
            items = [self.items(1, side, seed=side)[0] for side in sides]
            with torch.inference_mode():
                pixels, grid = hf_inputs(items, torch.float32, self.device)
                truth = exact(pixels, grid_thw=grid).pooler_output
                theirs = half(pixels.to(self.dtype), grid_thw=grid).pooler_output.float()
                ours = torch.cat([to_tensor(rows).to(self.device) for rows in core.encode_all(items)])
                yield (
                    "+".join(f"{side}^2" for side in sides),
                    {
                        "least_cosine_ours": float(torch.cosine_similarity(ours, truth).min()),
                        "least_cosine_transformers": float(torch.cosine_similarity(theirs, truth).min()),
                        "max_abs_ours": float((ours - truth).abs().max()),
                        "finite": bool(torch.isfinite(ours).all()),
                    },
                )

    def setup(self) -> Iterator[Case]:
        started = time.perf_counter()
        self.core = core = self.build(self.config)
        tower = core.adapter._tower  # type: ignore[attr-defined]
        runner = core._runners["image"]
        yield (
            "core",
            {
                "attention": tower.attention.name,
                "window_attention": tower.window_attention.name,
                "ops": tower.ops.name,
                "build_s": round(time.perf_counter() - started, 2),
                "calibrate_and_capture_s": round(core.stats.capture_seconds, 2),
                "graph_mib": round(core.stats.graph_bytes / 2**20, 1),
                "memory_model": repr(core.memory),
            },
        )
        yield (
            "costs",
            {"pair_ps": round(runner.eager_cost.pair_s * 1e12, 4)},
        )
        yield (
            "ladder",
            [
                {
                    "slots": budget.capacity.slots,
                    "items": budget.capacity.items,
                    "graph_ms": round(budget.replay_s(usual_load(budget.capacity.slots)) * 1e3, 3),
                    "eager_ms": round(runner.eager_cost(usual_load(budget.capacity.slots)) * 1e3, 3),
                }
                for budget in (runner.graphs.budgets if runner.graphs else ())
            ],
        )

    def latency(self) -> Iterator[Case]:
        """encode: the whole core, pixels to rows in host memory; encode_rows_stay_on_device: as an engine in the same
        process takes them; graph: the smallest budget that holds all, upload included; eager: our pass without a
        graph."""
        core = self.ready()
        graphs = core._runners["image"].graphs
        for count, side in CASES:
            items = self.items(count, side)
            load = self.load(items)
            fits = [b for b in (graphs.budgets if graphs else ()) if b.capacity.shortage(load, count) is None]
            before = Counter(core.stats.invocations)
            with torch.inference_mode():
                encode = self.time_ms(lambda items=items: core.encode_all(items))
                calls = core.stats.invocations - before
                core._keep_on_device = self.on_cuda
                stay = self.time_ms(lambda items=items: core.encode_all(items), 10)
                core._keep_on_device = False
                graph = None
                if graphs is not None and fits:
                    budget = fits[0].capacity.slots
                    graph = self.time_ms(lambda items=items, budget=budget: graphs.run(items, budget))
                    graph["budget"] = budget
                eager = self.time_ms(lambda items=items: run_eager(core.adapter, "image", items), 6)
            yield (
                f"{count}x{side}^2",
                {
                    "slots": load.slots,
                    "encode": encode,
                    "encode_rows_stay_on_device": stay,
                    "graph": graph,
                    "eager": eager,
                    "passes": {f"{path}:{mode}": n for (path, mode), n in calls.items()},
                },
            )

    def transformers(self) -> Iterator[Case]:
        """Its own tower, eager, SDPA, normalised pixels on the device already."""
        tower = hf_tower(self.vision, self.state, self.dtype, self.device)
        for count, side in CASES:
            with torch.inference_mode():
                pixels, grid = hf_inputs(self.items(count, side), self.dtype, self.device)
                yield f"{count}x{side}^2", self.time_ms(lambda p=pixels, g=grid: tower(p, grid_thw=g), 4)

    def mixed(self) -> Iterator[Case]:
        """Requests of one image each, one after the other: 30% 224, 30% 336, 20% 448, 10% 672, 10% 1036."""
        core, rng = self.ready(), random.Random(0)
        sides = rng.choices([side for _, side in MIX], [share for share, _ in MIX], k=MIXED_REQUESTS)
        pool = {side: self.items(1, side, seed=side) for _, side in MIX}
        for items in pool.values():
            core.encode_all(items)
        stats = core.stats
        slots, padded = stats.slots["image"], stats.padded_slots["image"]
        before = Counter(stats.invocations)
        samples: list[float] = []
        for side in sides:
            started = time.perf_counter()
            core.encode_all(pool[side])
            samples.append((time.perf_counter() - started) * 1e3)
            if time.perf_counter() > self.deadline_s:
                break
        samples.sort()
        calls = stats.invocations - before
        used, wasted = stats.slots["image"] - slots, stats.padded_slots["image"] - padded
        yield (
            "one_by_one",
            {
                "requests": len(samples),
                "mean_ms": round(statistics.mean(samples), 3),
                "p50_ms": round(samples[len(samples) // 2], 3),
                "p99_ms": round(samples[max(0, int(len(samples) * 0.99) - 1)], 3),
                "padded_share": round(wasted / (used + wasted), 4),
                "graph_hit_rate": round(1 - calls["image", "eager"] / max(1, sum(calls.values())), 4),
            },
        )

    def data_parallel(self) -> Iterator[Case]:
        """Images per second of rounds of 336^2 pictures: on one device, and spread over all of them."""
        core = self.ready()
        count = torch.cuda.device_count() if self.on_cuda else 2
        if count < 2:
            yield "skipped", "one GPU is visible"
            return
        devices = [torch.device("cuda", index) if self.on_cuda else self.device for index in range(count)]
        parallel = DataParallelCore([core, *(self.build(self.config, device) for device in devices[1:])])
        try:
            for name, encoder, images in (
                ("one_device_20", core, 20),
                (f"{count}_devices_20", parallel, 20),
                (f"{count}_devices_{20 * count}", parallel, 20 * count),
            ):
                items = self.items(images, 336)
                measured = self.time_ms(lambda encoder=encoder, items=items: encoder.encode_all(items), 20)
                yield name, measured | {"images_per_s": round(images / measured["median_ms"] * 1e3, 1)}
            alone, spread = core.encode_all(items), parallel.encode_all(items)
            worst = min(
                float(torch.cosine_similarity(to_tensor(a), to_tensor(b)).min())
                for a, b in zip(alone, spread, strict=True)
            )
            yield "least_cosine_to_one_device", worst
        finally:
            parallel.close()

    def packing(self) -> Iterator[Case]:
        """Rounds of 24 images of the mix: planned against smallest-first, predicted and measured, summed."""
        core, rng = self.ready(), random.Random(1)
        rules = core._rules(core._runners["image"])
        totals: dict[str, float] = {}
        for turn in range(8):
            sides = rng.choices([side for _, side in MIX], [share for share, _ in MIX], k=24)
            items = [self.items(1, side, seed=turn)[0] for side in sides]
            loads = [self.load([item]) for item in items]
            for name, planner in (("planned", plan_batches), ("smallest_first", plan_smallest_first)):
                started = time.perf_counter()
                batches = planner(loads, rules)
                planned_ms = (time.perf_counter() - started) * 1e3
                predicted_ms = sum(rules.choose(batch.load, len(batch.indices))[0] * 1e3 for batch in batches)
                core._planner = planner
                measured_ms = self.time_ms(lambda items=items: core.encode_all(items), 3)["median_ms"]
                core._planner = plan_batches
                for what, value in (("plan", planned_ms), ("predicted", predicted_ms), ("measured", measured_ms)):
                    key = f"{name}_{what}_ms"
                    totals[key] = round(totals.get(key, 0.0) + value, 3)
            yield "rounds", turn + 1
            yield "sums", dict(totals)

    def replay_equals_eager(self) -> Iterator[Case]:
        """Replays of all budgets in shuffled order, three times over: against the same buffers without a graph."""
        core = self.ready()
        graphs = core._runners["image"].graphs
        if graphs is None:
            raise RuntimeError("no graphs were captured")
        rng, worst, finite, replays = random.Random(2), 0.0, True, 0
        order = [budget for budget in graphs.budgets for _ in range(3)]
        rng.shuffle(order)
        with torch.inference_mode():
            for budget in order:
                slots = max(1, budget.capacity.slots * rng.choice([10, 7, 9]) // 10)
                items = core.adapter.sample_items("image", slots, max(1, slots // rng.choice([1, 2])))
                if budget.capacity.shortage(self.load(items), len(items)) is not None:
                    continue
                replayed = torch.cat(graphs.run(items, budget.capacity.slots))
                called = graphs._forward(graphs._captured[budget.capacity.slots].inputs)[: len(replayed)]
                worst = max(worst, float((replayed.float() - called.float()).abs().max()))
                finite = finite and bool(torch.isfinite(replayed).all())
                replays += 1
        yield "all_budgets", {"replays": replays, "max_abs_difference": worst, "all_finite": finite}

    def profile(self) -> Iterator[Case]:
        """Kernels by device time in a pass without a graph, device time of the graph's replay, and what to do next."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        core = self.ready()
        graphs = core._runners["image"].graphs
        activity = ProfilerActivity.CUDA if self.on_cuda else ProfilerActivity.CPU
        key = "self_device_time_total" if self.on_cuda else "self_cpu_time_total"
        mixed = [item for _, side in MIX for item in self.items(1, side)]
        for name, items in (("1x224^2", self.items(1, 224)), ("1x1036^2", self.items(1, 1036)), ("mixed", mixed)):
            with torch.inference_mode():
                run_eager(core.adapter, "image", items)
                self.synchronize()
                with profiler(activities=[activity]) as trace:
                    run_eager(core.adapter, "image", items)
                    self.synchronize()
                replay_ms = None
                fits = self.budgets_for(items)
                if self.on_cuda and graphs is not None and fits:
                    graphs.run(items, fits[0])
                    replay_ms = device_us(graphs._captured[fits[0]].graph.replay) / 1e3  # type: ignore[union-attr]
            events = [(event.key, event.count, getattr(event, key) / 1e3) for event in trace.key_averages()]
            yield (
                name,
                {"slots": self.load(items).slots, "budget": fits[0] if fits else None} | summarise(events, replay_ms),
            )

    def host(self) -> Iterator[Case]:
        """Where a replayed pass's milliseconds go: writing inputs to pinned memory, upload, launching the graph (host
        time) and its run (device time), copying the rows out, and the whole core. All but the last one by one, so the
        sum is more than the whole."""
        core = self.ready()
        graphs = core._runners["image"].graphs
        if graphs is None or not self.on_cuda:
            yield "skipped", "needs graphs on a GPU"
            return
        for count, side in ((1, 224), (1, 336), (1, 1036), (20, 336)):
            items = self.items(count, side)
            fits = self.budgets_for(items)
            if not fits:
                continue
            captured = graphs._captured[fits[0]]
            inputs, graph = captured.inputs, captured.graph
            with torch.inference_mode():
                rows = graphs.run(items, fits[0])
                launches = []
                for _ in range(10):
                    self.synchronize()
                    started = time.perf_counter()
                    graph.replay()  # type: ignore[union-attr]
                    launches.append((time.perf_counter() - started) * 1e3)
                yield (
                    f"{count}x{side}^2",
                    {
                        "budget": fits[0],
                        "input_mib": round(inputs.nbytes / 2**20, 2),
                        "result_mib": round(sum(part.nbytes for part in rows) / 2**20, 2),
                        "write_ms": self.time_ms(partial(inputs.write, items), 10)["median_ms"],
                        "upload_ms": device_us(partial(inputs._arena.upload, inputs.nbytes)) / 1e3,
                        "launch_ms": round(statistics.median(launches), 3),
                        "replay_ms": device_us(graph.replay) / 1e3,  # type: ignore[union-attr]
                        "copy_out_ms": self.time_ms(partial(copy_all, rows), 10)["median_ms"],
                        "whole_ms": self.time_ms(partial(core.encode_all, items), 10)["median_ms"],
                        "torch_threads": torch.get_num_threads(),
                    },
                )

    def kernels(self) -> Iterator[Case]:
        """Attention over frames and in windows, products and the residual: each way that there is, one layer each."""
        if not self.on_cuda:
            yield "skipped", "needs a GPU"
            return
        shape, device = shape_of(self.model), self._first_device()
        padded = -(-shape.mlp_width // self.config.mlp_width_multiple) * self.config.mlp_width_multiple
        yield from compare_frames(shape, self.dtype, device)
        yield from compare_windows(shape, self.dtype, device)
        yield from compare_products(shape, padded, self.dtype, device)

    def backends(self) -> Iterator[Case]:
        """The whole core with each attention over frames, on three budgets: which one should `auto` have taken?"""
        if not self.on_cuda:
            yield "skipped", "needs a GPU"
            return
        for backend in ("varlen", "triton_windows", "triton_frames", "auto"):
            core = self.build(
                replace(
                    self.config,
                    mm_encoder_attn_backend=backend,
                    encoder_cudagraph_token_budgets=(64, 576, 1_408, 2_880),
                )
            )
            times = {}
            for count, side in ((1, 224), (4, 336), (1, 1036), (20, 336)):
                items = self.items(count, side)
                times[f"{count}x{side}^2"] = self.time_ms(partial(core.encode_all, items), 10)["median_ms"]
            yield backend, times | {"attention": core.adapter._tower.attention.name}  # type: ignore[attr-defined]
            del core
            self.reserved_bytes()

    def budgets_for(self, items: Sequence[VisionItem]) -> list[int]:
        """Captured budgets that hold all items, ascending."""
        graphs, load = self.ready()._runners["image"].graphs, self.load(items)
        budgets = graphs.budgets if graphs is not None else ()
        return [b.capacity.slots for b in budgets if b.capacity.shortage(load, len(items)) is None]

    def ladders(self) -> Iterator[Case]:
        """Time and memory of capturing alone, for 1, 4 and 8 budgets per octave in a pool of their own."""
        core = self.ready()
        (path,) = (path for path in core.adapter.paths if path.name == "image")
        for steps in (1, 4, 8):
            config = replace(self.config, encoder_cudagraph_steps_per_octave=steps)
            capacities = path_capacities(config, core.adapter, path, core.limit)
            pool = torch.cuda.graph_pool_handle() if self.on_cuda else None
            graphs = GraphManager(core.adapter, "image", capacities, capture=self.on_cuda, pool=pool)
            reserved, started = self.reserved_bytes(), time.perf_counter()
            graphs.prepare(lambda call: 0.0)
            seconds = time.perf_counter() - started
            yield (
                f"{steps}_per_octave",
                {
                    "budgets": [capacity.slots for capacity in capacities],
                    "capture_s": round(seconds, 2),
                    "memory_mib": round((self.reserved_bytes() - reserved) / 2**20, 1),
                    "input_mib": round(graphs.input_bytes / 2**20, 1),
                },
            )

    def reserved_bytes(self) -> int:
        if not self.on_cuda:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def memory(self) -> Iterator[Case]:
        """Predicted and measured peak of passes without a graph."""
        core = self.ready()
        if not self.on_cuda:
            yield "skipped", "needs a GPU"
            return
        for count, side in ((1, 1036), (4, 1036), (20, 336)):
            items = self.items(count, side)
            self.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run_eager(core.adapter, "image", items)
            self.synchronize()
            yield (
                f"{count}x{side}^2",
                {
                    "predicted_mib": round(core.memory.bytes_of(self.load(items)) / 2**20, 1) if core.memory else None,
                    "measured_mib": round((torch.cuda.max_memory_allocated() - base) / 2**20, 1),
                },
            )

    def plain_kernels(self) -> Iterator[Case]:
        """The same latency table with plain torch between the products and varlen windows: the kernels' worth."""
        self.core = None
        self.reserved_bytes()
        self.core = self.build(
            replace(
                self.config,
                fused_kernels=False,
                mm_encoder_attn_backend="varlen" if self.on_cuda else "sdpa_segments",
                encoder_cudagraph_steps_per_octave=1,
            )
        )
        yield from self.latency()


def random_state(vision: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Weights by transformers' names, scaled by fan-in so that every layer shows in the result."""
    generator = torch.Generator(device).manual_seed(0)
    tower = hf_class()(hf_config(vision, meta=True))
    state = {}
    for name, tensor in tower.state_dict().items():
        noise = torch.randn(tensor.shape, device=device, generator=generator)
        if tensor.ndim == 1:
            state[name] = 1 + 0.1 * noise if "norm" in name or "ln_q" in name else 0.1 * noise
        else:
            state[name] = noise / tensor[0].numel() ** 0.5
    return state


def hf_class() -> Any:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    def make(config: Any) -> Any:
        with torch.device("meta"):
            return Qwen2_5_VisionTransformerPretrainedModel(config)

    return make


def hf_config(vision: dict[str, Any], *, meta: bool = False) -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    config = Qwen2_5_VLVisionConfig(**vision)
    config._attn_implementation = "sdpa"
    return config


def hf_tower(
    vision: dict[str, Any], state: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    with torch.device(device):
        tower = Qwen2_5_VisionTransformerPretrainedModel(hf_config(vision))
    tower.load_state_dict(state)
    # Weights alone change precision: the rotary frequencies stay float32, as after from_pretrained.
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return tower.eval()


def hf_inputs(
    items: Sequence[VisionItem], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    usual = family_of("qwen2_5_vl").normalisation
    mean = torch.tensor(usual.mean, device=device).view(1, 3, 1, 1)
    std = torch.tensor(usual.std, device=device).view(1, 3, 1, 1)
    pixels = torch.from_numpy(np.concatenate([item.patches for item in items])).to(device)
    wide = (pixels.float().view(len(pixels), 3, 1, 196) / 255 - mean) / std
    grid = torch.tensor([item.grid for item in items], device=device)
    return wide.expand(-1, -1, 2, -1).reshape(len(pixels), -1).to(dtype), grid


def usual_load(slots: int) -> Load:
    """Of 224^2 pictures: 256 patches each, which see each other."""
    return Load(slots, slots * 4, pairs=slots * 4 * 256)


def copy_all(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [to_host(part) for part in rows]


def to_tensor(rows: Any) -> torch.Tensor:
    if isinstance(rows, Exception):
        raise rows
    tensor = torch.from_numpy(np.array(rows))
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor).float()


PARTS = (
    "setup",
    "latency",
    "mixed",
    "host",
    "kernels",
    "profile",
    "packing",
    "parity",
    "replay_equals_eager",
    "backends",
    "data_parallel",
    "memory",
    "transformers",
    "ladders",
    "plain_kernels",
)
"""In the order of what they decide."""


class Results:
    """What was measured so far, on disk after every case."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        self._out = out
        self.values: dict[str, Any] = about | {"parts": {}, "seconds": {}}
        out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, case: str, value: Any) -> None:
        self.values["parts"].setdefault(part, {})[case] = value
        self._save()
        print(f"{part} {case}: {json.dumps(value)}", flush=True)

    def took(self, part: str, seconds: float) -> None:
        self.values["seconds"][part] = round(seconds, 1)
        self._save()

    def _save(self) -> None:
        unfinished = self._out.with_suffix(".part")
        unfinished.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._out)


def run_part(bench: Bench, part: str, results: Results) -> bool:
    """False if the part failed; its error is then among its cases. Stops between cases once the time is up."""
    started = time.perf_counter()
    try:
        for case, value in getattr(bench, part)():
            results.add(part, case, value)
            if time.perf_counter() > bench.deadline_s:
                break
    except Exception as exc:  # the other parts are still worth having
        results.add(part, "error", {"error": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc()[-2500:]})
        return False
    finally:
        results.took(part, time.perf_counter() - started)
    return True


def main() -> int:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--seconds", "--time-limit", type=float, default=300.0, help="no case begins after that (default: 300)"
    )
    parser.add_argument("--profile", action="store_true", help="only set up and profile")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny tower and tiny pictures: does the script run?")
    parser.add_argument("--quantization", choices=("fp8",), help="of the blocks; emulated on a CPU (default: none)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    on_cuda = arguments.device == "cuda"
    results = Results(
        arguments.out,
        {
            "command": " ".join(["python -m tests.bench.bench_encoder", *sys.argv[1:]]),
            "commit": arguments.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_cuda else "cpu",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "quantization": arguments.quantization,
        },
    )
    bench = Bench(
        device=arguments.device,
        tiny=arguments.tiny,
        deadline_s=began + arguments.seconds,
        quantization=arguments.quantization,
    )
    failed = []
    for part in ("setup", "profile") if arguments.profile else arguments.parts.split(","):
        if time.perf_counter() > bench.deadline_s:
            results.add(part, "skipped", "out of time")
        elif not run_part(bench, part, results):
            failed.append(part)
    parts = results.values["parts"]
    print(json.dumps({"latency": parts.get("latency"), "mixed": parts.get("mixed"), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
