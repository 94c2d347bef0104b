"""Steps of a 7B-shaped language model on one GPU and spread over several: random weights, bf16, no Ray.

    python -m tests.bench.bench_tensor_parallel --out tests/bench/results/tensor_parallel_h200.json
    python -m tests.bench.bench_tensor_parallel --out /tmp/tensor_parallel.json --device cpu --tiny     (does it run?)

Decode steps are bound by memory traffic, which the ranks share, plus two all-reduces a layer; they replay graphs and
end with logits on rank 0. Prefill steps are bound by arithmetic; their all-reduces are larger. What rank 0 tells the
others (`plan_ms`, the encoding alone) is part of each step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from deployments.lm_engine.build import DeviceSide
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan
from deployments.lm_engine.tensor_parallel.wire import PlanEncoder
from tests.bench.bench_engine import BLOCK_SIZE, TEXT_7B, TEXT_TINY
from tests.bench.record import header
from tests.gpu.ranks import device_sides, runner_of

Figures = dict[str, float]


class Bench:
    """Steps of one size of gang."""

    def __init__(self, side: DeviceSide, runner: ModelRunner, *, context: int, deadline_s: float) -> None:
        self._side, self._runner, self._context, self._deadline_s = side, runner, context, deadline_s
        self._blocks_each = blocks_of(context)

    def decode(self, batches: tuple[int, ...]) -> Iterator[tuple[str, Figures]]:
        for batch in batches:
            plan = StepPlan(tuple(self._chunk(index, self._context, 1) for index in range(batch)))
            step_ms = self._time_ms(lambda plan=plan: self._runner.run(plan))
            encoder = PlanEncoder(batch)
            plan_ms = self._time_ms(lambda plan=plan, encoder=encoder: encoder.encode(plan.chunks))
            figures = {"step_ms": step_ms, "tokens_per_s": round(batch / step_ms * 1e3, 1), "plan_ms": plan_ms}
            yield f"decode, batch {batch}", figures

    def prefill(self, counts: tuple[int, ...]) -> Iterator[tuple[str, Figures]]:
        for count in counts:
            plan = StepPlan(tuple(self._chunk(index, 0, self._context) for index in range(count)))
            step_ms = self._time_ms(lambda plan=plan: self._runner.run(plan), repeats=5)
            figures = {"step_ms": step_ms, "tokens_per_s": round(count * self._context / step_ms * 1e3)}
            yield f"prefill, {count} x {self._context} tokens", figures

    def _chunk(self, index: int, start: int, num_tokens: int) -> SequenceChunk:
        model = self._side.model
        ids = np.random.default_rng(index).integers(0, model.vocab_size, num_tokens).tolist()
        positions = model.position_rule.positions(start + num_tokens, ()).slice(start, start + num_tokens)
        blocks = list(range(index * self._blocks_each, (index + 1) * self._blocks_each))
        return SequenceChunk(str(index), start, ids, positions, blocks, True)

    def _time_ms(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Median wall time until the device is done, after two unmeasured calls; fewer repeats once time is up."""
        samples: list[float] = []
        for turn in range(repeats + 2):
            self._synchronize()
            begin_s = time.perf_counter()
            call()
            self._synchronize()
            if turn >= 2:
                samples.append((time.perf_counter() - begin_s) * 1e3)
            if samples and time.perf_counter() > self._deadline_s:
                break
        return round(statistics.median(samples), 4)

    def _synchronize(self) -> None:
        if self._side.model.device.type == "cuda":
            torch.cuda.synchronize()


def blocks_of(context: int) -> int:
    return -(-(context + 256) // BLOCK_SIZE)


def config_of(folder: Path, size: int, options: argparse.Namespace, batches: tuple[int, ...]) -> EngineConfig:
    context = options.context
    return EngineConfig(
        model=str(folder),
        device=options.device,
        load_format="dummy",
        tensor_parallel_size=size,
        quantization=options.quantization,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=max(5, batches[-1]) * blocks_of(context),
        max_model_len=context + 256,
        max_num_seqs=batches[-1],
        max_num_batched_tokens=max(5 * context, batches[-1]),
        cudagraph_capture_sizes=batches,
    )


def write_model(folder: Path, text: dict[str, Any]) -> None:
    """A folder that dummy weights can be made for."""
    config = {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": {"model_type": "qwen2_5_vl_vision"},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON, rewritten after each case")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="of gangs (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1518, help="tokens of each sequence (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quantization", choices=("fp8",), help="of the layers (default: none)")
    parser.add_argument("--tiny", action="store_true", help="a model that runs anywhere")
    parser.add_argument("--time-limit", type=float, default=110.0, help="seconds after which no case starts")
    options = parser.parse_args()
    deadline_s = time.perf_counter() + options.time_limit
    if options.tiny:
        options.context = min(options.context, 40)
    if options.device == "cuda" and torch.cuda.device_count() < max(options.sizes):
        print(
            f"--sizes {max(options.sizes)} needs as many GPUs; there are {torch.cuda.device_count()}", file=sys.stderr
        )
        return 2
    batches = (1, 4) if options.tiny else (1, 32, 256)
    results: dict[str, Any] = header("tensor_parallel") | {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "quantization": options.quantization,
        "sizes": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, TEXT_TINY if options.tiny else TEXT_7B)
        for size in tqdm(options.sizes, unit="gang", disable=None):
            found = results["sizes"].setdefault(f"{size}", {})
            begin_s = time.perf_counter()
            with device_sides(config_of(folder, size, options, batches), folder) as (side, leader, _):
                found["start"] = {
                    "start_s": round(time.perf_counter() - begin_s, 1),
                    "graphs": side.decodes is not None,
                }
                bench = Bench(side, runner_of(side, leader), context=options.context, deadline_s=deadline_s)
                for parts in (bench.decode(batches), bench.prefill((1, 5))):
                    for case, figures in parts:
                        found[case] = figures
                        print(f"{size} rank(s), {case}: {json.dumps(figures)}", flush=True)
                        options.out.write_text(json.dumps(results, indent=1) + "\n")
                        if time.perf_counter() > deadline_s:
                            found["cut"] = "time limit"
                            break
            del side, leader, bench
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
