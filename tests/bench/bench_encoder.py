"""The vision encoder on one GPU: a 7B-shaped Qwen2.5-VL tower, random weights, random pixels, bf16.

    python -m tests.bench.bench_encoder --out tests/bench/results/encoder_h200.json --commit $(git rev-parse HEAD)

Every part stands alone: one that fails leaves its error in the results and the next one runs. The results are written
after each part. Regimes: up to about 1,000 slots a pass is bound by launches, above by matrix products.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.adapters.factory import build_adapter, family_of
from deployments.vision_encoder.attention import SdpaSegments
from deployments.vision_encoder.build import build_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.forward import run_eager
from deployments.vision_encoder.ops import PlainOps
from deployments.vision_encoder.packing import Load, plan_batches, plan_smallest_first
from deployments.vision_encoder.weights import TensorWeights

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
"""For a dry run on CPU (`--tiny`)."""
CASES: tuple[tuple[int, int], ...] = ((1, 224), (1, 336), (4, 336), (1, 644), (1, 1036), (4, 1036), (20, 336))
MIX: tuple[tuple[float, int], ...] = ((0.3, 224), (0.3, 336), (0.2, 448), (0.1, 672), (0.1, 1036))
MIXED_REQUESTS = 400


class Bench:
    def __init__(self, *, tiny: bool, deadline_s: float) -> None:
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.model = {"model_type": "qwen2_5_vl", "vision_config": TINY if tiny else VISION_7B}
        self.tiny, self.deadline_s = tiny, deadline_s
        self.state = random_state(self.model["vision_config"], self.device)  # type: ignore[arg-type]
        self.core: EncoderCore | None = None

    @property
    def config(self) -> EncoderConfig:
        return EncoderConfig(
            model="bench",
            device=self.device.type,  # type: ignore[arg-type]
            dtype="float32" if self.tiny else "bfloat16",
            max_batch_slots=2_048 if self.tiny else 16_384,
            encoder_cudagraph_max_frames_per_batch=0,
            static_buffers_on_cpu=self.tiny,
            encoder_cudagraph_steps_per_octave=1 if self.tiny else 4,
        )

    def ready(self) -> EncoderCore:
        if self.core is None:
            raise RuntimeError("the setup part failed")
        return self.core

    def items(self, count: int, side: int, seed: int = 0) -> list[VisionItem]:
        patches = (side // 28 * 2) if not self.tiny else max(2, side // 56 * 2)
        generator = np.random.default_rng(seed)
        grid = (1, patches, patches)
        size = (patches * patches, 588)
        return [VisionItem("image", grid, generator.integers(0, 256, size, dtype=np.uint8)) for _ in range(count)]

    def time_ms(self, call: Callable[[], object], repeats: int = 20) -> dict[str, float]:
        """Wall time until the device is done, after two unmeasured calls."""
        samples: list[float] = []
        for turn in range(repeats + 2):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            if turn >= 2:
                samples.append((time.perf_counter() - started) * 1e3)
            if turn >= 4 and time.perf_counter() > self.deadline_s:
                break
        return {"median_ms": round(statistics.median(samples), 3), "max_ms": round(max(samples), 3)}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -- parts --------------------------------------------------------------------------------------------------------
    def setup(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.core = core = build_core(self.config, self.model, TensorWeights(self.state))
        tower = core.adapter._tower  # type: ignore[attr-defined]
        runner = core._runners["image"]
        return {
            "attention": tower.attention.name,
            "window_attention": tower.window_attention.name,
            "ops": tower.ops.name,
            "build_s": round(time.perf_counter() - started, 2),
            "calibrate_and_capture_s": round(core.stats.capture_seconds, 2),
            "graph_mib": round(core.stats.graph_bytes / 2**20, 1),
            "memory_model": repr(core.memory),
            "budgets": [
                {
                    "slots": budget.capacity.slots,
                    "items": budget.capacity.items,
                    "replay_ms": round(budget.cost_s * 1e3, 3),
                    "eager_ms": round(runner.eager_cost(budget.capacity.slots) * 1e3, 3),
                }
                for budget in (runner.graphs.budgets if runner.graphs else ())
            ],
        }

    @torch.inference_mode()
    def latency(self) -> list[dict[str, Any]]:
        """eager: our pass without graph. encode: the whole core, pixels in host memory to rows in host memory."""
        core, table = self.ready(), []
        for count, side in CASES:
            items = self.items(count, side)
            before = Counter(core.stats.invocations)
            eager = self.time_ms(lambda items=items: run_eager(core.adapter, "image", items), 10)
            encode = self.time_ms(lambda items=items: core.encode_all(items))
            calls = core.stats.invocations - before
            table.append(
                {
                    "images": f"{count}x{side}^2",
                    "slots": sum(core.describe(item.modality, item.grid).num_slots for item in items),
                    "eager": eager,
                    "encode": encode,
                    "passes": {f"{path}:{mode}": n for (path, mode), n in calls.items()},
                }
            )
        return table

    @torch.inference_mode()
    def transformers(self) -> list[dict[str, Any]]:
        tower = hf_tower(self.model["vision_config"], self.state, self.dtype, self.device)  # type: ignore[arg-type]
        table = []
        for count, side in CASES:
            items = self.items(count, side)
            pixels, grid = hf_inputs(items, self.dtype, self.device)
            table.append(
                {
                    "images": f"{count}x{side}^2",
                    "eager": self.time_ms(lambda p=pixels, g=grid: tower(p, grid_thw=g), 4),
                }
            )
        return table

    def mixed(self) -> dict[str, Any]:
        """400 requests of one image each, one after the other: 30% 224, 30% 336, 20% 448, 10% 672, 10% 1036."""
        core, rng = self.ready(), random.Random(0)
        sides = rng.choices([side for _, side in MIX], [share for share, _ in MIX], k=MIXED_REQUESTS)
        pool = {side: self.items(1, side, seed=side) for _, side in MIX}
        for items in pool.values():
            core.encode_all(items)
        stats = core.stats
        slots, padded = stats.slots["image"], stats.padded_slots["image"]
        before = Counter(stats.invocations)
        samples = []
        for side in sides:
            started = time.perf_counter()
            core.encode_all(pool[side])
            samples.append((time.perf_counter() - started) * 1e3)
        samples.sort()
        calls = stats.invocations - before
        used, wasted = stats.slots["image"] - slots, stats.padded_slots["image"] - padded
        return {
            "mean_ms": round(statistics.mean(samples), 3),
            "p50_ms": round(samples[len(samples) // 2], 3),
            "p99_ms": round(samples[int(len(samples) * 0.99) - 1], 3),
            "padded_share": round(wasted / (used + wasted), 4),
            "graph_hit_rate": round(1 - calls["image", "eager"] / max(1, sum(calls.values())), 4),
        }

    def packing(self) -> dict[str, Any]:
        """Rounds of 24 images of the mix: planned against smallest-first, predicted and measured."""
        core, rng = self.ready(), random.Random(1)
        rules = core._rules(core._runners["image"])
        rounds = 10
        totals: Counter[str] = Counter()
        for turn in range(rounds):
            sides = rng.choices([side for _, side in MIX], [share for share, _ in MIX], k=24)
            items = [self.items(1, side, seed=turn)[0] for side in sides]
            loads: list[Load] = [core.describe(item.modality, item.grid).loads["image"] for item in items]
            for name, planner in (("planned", plan_batches), ("smallest_first", plan_smallest_first)):
                started = time.perf_counter()
                batches = planner(loads, rules)
                totals[f"{name}_plan_ms"] += (time.perf_counter() - started) * 1e3  # type: ignore[assignment]
                totals[f"{name}_predicted_ms"] += sum(  # type: ignore[assignment]
                    rules.choose(batch.load, len(batch.indices))[0] * 1e3 for batch in batches
                )
                core._planner = planner
                totals[f"{name}_measured_ms"] += self.time_ms(lambda items=items: core.encode_all(items), 3)[  # type: ignore[assignment]
                    "median_ms"
                ]
            core._planner = plan_batches
        return {name: round(value / rounds, 3) for name, value in totals.items()}

    @torch.inference_mode()
    def parity(self) -> list[dict[str, Any]]:
        """Cosine of every row with a float32 pass of plain torch, and with transformers in our precision."""
        core = self.ready()
        plain = build_adapter(
            self.model,
            TensorWeights(self.state),
            dtype=torch.float32,
            device=self.device,
            attention=SdpaSegments(),
            window_attention=SdpaSegments(),
            ops=PlainOps(),
        )
        tower = hf_tower(self.model["vision_config"], self.state, torch.float32, self.device)  # type: ignore[arg-type]
        table = []
        for sides in ([224], [336, 224, 644], [1036], [140, 420, 84]):
            items = [self.items(1, side, seed=side)[0] for side in sides]
            exact = torch.cat(run_eager(plain, "image", items))
            pixels, grid = hf_inputs(items, torch.float32, self.device)
            theirs = tower(pixels, grid_thw=grid).pooler_output
            ours = torch.cat([to_tensor(rows).to(self.device) for rows in core.encode_all(items)])
            eager = torch.cat(run_eager(core.adapter, "image", items)).float()
            table.append(
                {
                    "sides": sides,
                    "fp32_max_abs_to_transformers": float((exact - theirs).abs().max()),
                    "least_cosine_encode": float(torch.cosine_similarity(ours, exact).min()),
                    "least_cosine_eager": float(torch.cosine_similarity(eager, exact).min()),
                    "finite": bool(torch.isfinite(ours).all()),
                }
            )
        return table

    @torch.inference_mode()
    def replay_equals_eager(self) -> dict[str, Any]:
        """Replays of all budgets in shuffled order, three times over: against the same buffers without a graph."""
        core = self.ready()
        graphs = core._runners["image"].graphs
        if graphs is None:
            raise RuntimeError("no graphs were captured")
        rng, worst, finite, replays = random.Random(2), 0.0, True, 0
        order = [budget for budget in graphs.budgets for _ in range(3)]
        rng.shuffle(order)
        for turn, budget in enumerate(order):
            slots = max(1, budget.capacity.slots * rng.choice([10, 7, 9]) // 10)
            items = core.adapter.sample_items("image", slots, max(1, slots // rng.choice([1, 2])))
            load = sum((core.describe(item.modality, item.grid).loads["image"] for item in items), Load())
            if budget.capacity.shortage(load, len(items)) is not None:
                continue
            replayed = torch.cat(graphs.run(items, budget.capacity.slots))
            called = graphs._forward(graphs._captured[budget.capacity.slots].inputs)[: len(replayed)]
            worst = max(worst, float((replayed.float() - called.float()).abs().max()))
            finite = finite and bool(torch.isfinite(replayed).all())
            replays = turn + 1
        return {"replays": replays, "max_abs_difference": worst, "all_finite": finite}

    @torch.inference_mode()
    def profile(self) -> list[dict[str, Any]]:
        """Kernels by device time: one replay-sized eager pass of 1x1036^2."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        core, items = self.ready(), self.items(1, 1036)
        run_eager(core.adapter, "image", items)
        activities = [ProfilerActivity.CPU] if self.tiny else [ProfilerActivity.CUDA]
        with profiler(activities=activities) as trace:
            run_eager(core.adapter, "image", items)
            self.synchronize()
        key = "self_cpu_time_total" if self.tiny else "self_device_time_total"
        rows = sorted(trace.key_averages(), key=lambda event: -getattr(event, key))[:15]
        return [{"kernel": row.key[:90], "calls": row.count, "ms": round(getattr(row, key) / 1e3, 3)} for row in rows]

    def memory(self) -> dict[str, Any]:
        """Predicted and measured peak of eager passes."""
        core, table = self.ready(), {}
        if self.device.type == "cpu":
            return {"skipped": "needs a GPU"}
        for count, side in ((1, 1036), (4, 1036), (20, 336)):
            items = self.items(count, side)
            load = sum((core.describe(item.modality, item.grid).loads["image"] for item in items), Load())
            self.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run_eager(core.adapter, "image", items)
            self.synchronize()
            table[f"{count}x{side}^2"] = {
                "predicted_mib": round(core.memory.bytes_of(load) / 2**20, 1) if core.memory else None,
                "measured_mib": round((torch.cuda.max_memory_allocated() - base) / 2**20, 1),
            }
        return table

    def plain_kernels(self) -> list[dict[str, Any]]:
        """The same latency table with plain torch between the products and varlen windows: the kernels' worth."""
        self.core = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        config = replace(
            self.config,
            fused_kernels=False,
            mm_encoder_attn_backend="sdpa_segments" if self.tiny else "varlen",
            encoder_cudagraph_steps_per_octave=1,
        )
        self.core = build_core(config, self.model, TensorWeights(self.state))
        return self.latency()


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


def to_tensor(rows: Any) -> torch.Tensor:
    if isinstance(rows, Exception):
        raise rows
    tensor = torch.from_numpy(np.array(rows))
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor).float()


PARTS = (
    "setup",
    "latency",
    "mixed",
    "replay_equals_eager",
    "packing",
    "parity",
    "profile",
    "memory",
    "transformers",
    "plain_kernels",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--seconds", type=float, default=330.0, help="parts not begun by then are skipped")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a tiny tower on CPU: does the script run?")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    started = time.perf_counter()
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": arguments.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cpu" if arguments.tiny else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    bench = Bench(tiny=arguments.tiny, deadline_s=started + arguments.seconds)
    failed = 0
    for part in arguments.parts.split(","):
        if time.perf_counter() - started > arguments.seconds:
            results[part] = {"skipped": "out of time"}
            continue
        began = time.perf_counter()
        try:
            results[part] = getattr(bench, part)()
        except Exception as exc:  # the other parts are still worth having
            failed += 1
            results[part] = {"error": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc()[-1500:]}
        results.setdefault("seconds", {})[part] = round(time.perf_counter() - began, 1)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"== {part} ({results['seconds'][part]} s)\n{json.dumps(results[part], indent=1)}", flush=True)
    print(json.dumps({"mixed": results.get("mixed"), "failed_parts": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
