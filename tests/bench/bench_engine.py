"""The LM engine on one GPU, offline: a 7B-shaped Qwen2.5-VL decoder, random weights made on the device, bf16.

    python -m tests.bench.bench_engine --out tests/bench/results/engine_h200.json --time-limit 60
    python -m tests.bench.bench_engine --out /tmp/engine_fp8.json --quantization fp8
    python -m tests.bench.bench_engine --out /tmp/engine.json --device cpu --tiny           (does it run?)

Every part stands alone: one that fails leaves its error in the results and the next one runs. The results are written
after each case, so that whatever cuts the run short leaves what was measured.

    setup     load, fuse, choose kernels, record graphs
    kernels   attention and row kernels alone, with the memory traffic they reach
    products  a layer's matrix products alone, with the quantising of their input if they are in 8 bits
    decode    one step of a batch: graph against eager, then with sampling
    prefill   one step of a prompt
    engine    scheduler, runner, sampler and detokeniser together: closed batches of requests
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from tqdm import tqdm

from cache_service.identity import EmbeddingIdentity, EncoderFingerprint
from deployments.fp8 import EmulatedFp8
from deployments.lm_engine.attention import AttentionBackend, Rotary
from deployments.lm_engine.build import capture_decodes, load_model
from deployments.lm_engine.config import EngineConfig, ModelLimits
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.engine import EncodeBatch, Engine
from deployments.lm_engine.kernel_choice import choose_attention, choose_row_ops
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.model_runner import DecodeReplay, ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan
from deployments.lm_engine.sampler import Sampler, SamplingState
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.tokenizer import TokenDecoder
from deployments.messages import GenerateRequest, SamplingParams

Case = tuple[str, dict[str, Any]]

TEXT_7B = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
}
TEXT_TINY = TEXT_7B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
BLOCK_SIZE = 16


class NoEncodes:
    """Text alone: nothing is ever asked for."""

    def handle(self, cancelled: tuple[EmbeddingIdentity, ...], batches: tuple[EncodeBatch, ...]) -> None:
        raise AssertionError("a text prompt asked for an embedding")


class Bench:
    """All parts; each yields its cases as they are done."""

    def __init__(self, *, device: str, tiny: bool, deadline_s: float, quantization: str | None = None) -> None:
        self.device, self.tiny, self.deadline_s = torch.device(device), tiny, deadline_s
        self.on_cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.batches = (1, 4) if tiny else (1, 8, 32, 64, 128, 256)
        self.context = 40 if tiny else 1518
        self.blocks_each = -(-(self.context + 256) // BLOCK_SIZE)
        self.config = EngineConfig(
            model="bench",
            device=self.device.type,  # type: ignore[arg-type]
            load_format="dummy",
            quantization=quantization,  # type: ignore[arg-type]
            max_num_seqs=self.batches[-1],
            max_num_batched_tokens=256 if tiny else 8192,
            block_size=BLOCK_SIZE,
            cudagraph_capture_sizes=self.batches,
            max_queued_requests=0,
            max_queue_s=0,
        )
        self._model: LanguageModel | None = None
        self._backend: AttentionBackend | None = None
        self._decodes: DecodeReplay | None = None
        self.num_blocks = 0

    def setup(self) -> Iterator[Case]:
        begin_s = time.perf_counter()
        text = TEXT_TINY if self.tiny else TEXT_7B
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "model_type": "qwen2_5_vl",
                "text_config": text,
                "vision_config": {"model_type": "qwen2_5_vl_vision"},
                "tie_word_embeddings": False,
            }
            (Path(folder) / "config.json").write_text(json.dumps(config))
            fp8 = None if self.on_cuda else EmulatedFp8()
            self._model = model = load_model(self.config, Path(folder), self.dtype, self.device, fp8)
        self.synchronize()
        load_s = time.perf_counter() - begin_s
        layout = model.kv_layout(BLOCK_SIZE)
        begin_s = time.perf_counter()
        make = choose_attention("auto", layout, model.num_heads, self.device)
        check_s = time.perf_counter() - begin_s
        self.num_blocks = self.batches[-1] * self.blocks_each
        kv = KVTensors(layout, self.num_blocks, self.device)
        kv._pools.normal_()  # zeros would flatter the kernels: they draw less power
        self._backend = make(kv)
        begin_s = time.perf_counter()
        self._decodes = capture_decodes(self.config, model, self._backend, self.blocks_each * BLOCK_SIZE)
        self.synchronize()
        yield (
            "engine",
            {
                "attention": self._backend.name,
                "row_ops": getattr(choose_row_ops(model.hidden_size, self.dtype, self.device), "name", None),
                "graphs": list(getattr(self._decodes, "sizes", ())),
                "load_s": round(load_s, 2),
                "check_s": round(check_s, 2),
                "capture_s": round(time.perf_counter() - begin_s, 2),
                "allocated_gib": round(torch.cuda.memory_allocated() / 2**30, 2) if self.on_cuda else None,
            },
        )

    def decode(self) -> Iterator[Case]:
        for batch in self.batches:
            plan = StepPlan(tuple(self._chunk(index, self.context, 1) for index in range(batch)))
            states = [SamplingState(SamplingParams(max_tokens=1, temperature=0.0), ()) for _ in range(batch)]
            sampler = Sampler(device=self.device)
            runner, eager = self._runner(self._decodes), self._runner(None)
            graph = self.time_ms(lambda runner=runner, plan=plan: runner.run(plan))
            whole = self.time_ms(
                lambda runner=runner, plan=plan, states=states, sampler=sampler: sampler.sample(
                    states, runner.run(plan)
                )
            )
            yield (
                f"batch {batch}, context {self.context}",
                {
                    "step_ms": graph,
                    "eager_ms": self.time_ms(lambda eager=eager, plan=plan: eager.run(plan), repeats=5),
                    "with_sampling_ms": whole,
                    "tokens_per_s": round(batch / whole * 1e3, 1),
                },
            )

    def prefill(self) -> Iterator[Case]:
        runner = self._runner(None)
        shapes = ((self.context, 1), (self.context, 5)) if not self.tiny else ((20, 1), (20, 2))
        for tokens, sequences in shapes:
            plan = StepPlan(tuple(self._chunk(index, 0, tokens) for index in range(sequences)))
            step_ms = self.time_ms(lambda plan=plan: runner.run(plan), repeats=5)
            yield (
                f"{sequences} x {tokens} tokens",
                {"step_ms": step_ms, "tokens_per_s": round(tokens * sequences / step_ms * 1e3)},
            )

    def kernels(self) -> Iterator[Case]:
        model, backend = self._ready()
        layout = model.kv_layout(BLOCK_SIZE)
        heads, dim = model.num_heads, layout.head_dim
        width = (heads + 2 * layout.num_kv_heads) * dim
        row_bytes = 2 * layout.num_kv_heads * dim * layout.dtype.itemsize
        for batch in sorted({self.batches[0], self.batches[-1] // 8 or 1, self.batches[-1]}):
            chunks = [self._chunk(index, self.context, 1) for index in range(batch)]
            ms = self._attention_ms(backend, chunks, width, heads, dim)
            gib = batch * (self.context + 1) * row_bytes / 2**30
            yield f"decode attention, batch {batch}", {"layer_ms": ms, "gib_per_s": round(gib / ms * 1e3, 1)}
        ms = self._attention_ms(backend, [self._chunk(0, 0, self.context)], width, heads, dim)
        flops = 4 * heads * dim * self.context**2 / 2
        yield "prefill attention", {"layer_ms": ms, "tflop_per_s": round(flops / ms / 1e9, 2)}
        ops = choose_row_ops(model.hidden_size, self.dtype, self.device)
        if ops is not None:
            x = torch.randn(4096, model.hidden_size, device=self.device).to(self.dtype)
            weight, gate_up = x[0].clone(), torch.randn(4096, 37888, device=self.device).to(self.dtype)
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "add_norm": (lambda: ops.add_norm(x, x, weight, 1e-6), 4 * x.nbytes),
                "gated_silu": (lambda: ops.gated_silu(gate_up), gate_up.nbytes * 3 // 2),
            }
            for name, (call, num_bytes) in calls.items():
                ms = self.time_ms(call)
                yield f"{name}, 4096 rows", {"ms": ms, "gib_per_s": round(num_bytes / 2**30 / ms * 1e3, 1)}

    def products(self) -> Iterator[Case]:
        layers: Any = self._ready()[0].model.layers
        for name in ("qkv_proj", "gate_up_proj", "down_proj"):
            if not hasattr(layers[0], name):
                continue  # the library's own layers
            inner, outer = getattr(layers[0], name).in_features, getattr(layers[0], name).out_features
            for num_rows in (1, 16, 32, 256, 1518, 8192):
                x = torch.randn(num_rows, inner, device=self.device).to(self.dtype)

                @torch.inference_mode()
                def all_layers(name: str = name, x: torch.Tensor = x) -> None:
                    for layer in layers:
                        getattr(layer, name)(x)

                # All layers in a row, so that launches overlap the work and no weight is in a cache.
                ms = self.time_ms(all_layers) / len(layers)
                tflops = 2 * num_rows * inner * outer / ms / 1e9
                yield f"{name}, {num_rows} rows", {"layer_ms": round(ms, 4), "tflop_per_s": round(tflops, 1)}

    def engine(self) -> Iterator[Case]:
        for batch, num_tokens in ((self.batches[0], 16), (self.batches[-1] // 8 or 1, 64)):
            engine, rng = self._engine(), np.random.default_rng(batch)
            for index in range(batch):
                prompt = tuple(rng.integers(0, self._ready()[0].vocab_size, self.context).tolist())
                params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                engine.add(GenerateRequest(request_id=f"{index}", prompt_token_ids=prompt, sampling=params))
            steps, finished, produced = list[float](), 0, 0
            begin_s = time.perf_counter()
            while engine.has_work:
                step_s = time.perf_counter()
                result = engine.step()
                assert not result.failed, "a step failed; see the log"
                steps.append((time.perf_counter() - step_s) * 1e3)
                produced += len(result.outputs)
                finished += sum(output.delta.finish_reason is not None for output in result.outputs)
            total_s = time.perf_counter() - begin_s
            assert finished == batch, (finished, batch)
            yield (
                f"{batch} requests, {self.context} in, {num_tokens} out",
                {
                    "total_s": round(total_s, 3),
                    "requests_per_s": round(batch / total_s, 2),
                    "output_tokens_per_s": round(produced / total_s, 1),
                    "decode_step_ms": round(statistics.median(steps[len(steps) // 2 :]), 3),
                    "longest_step_ms": round(max(steps), 2),
                },
            )

    # -- inside -------------------------------------------------------------------------------------------------------
    def time_ms(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Median wall time until the device is done, after two unmeasured calls; fewer repeats once time is up."""
        samples: list[float] = []
        for turn in range(repeats + 2):
            self.synchronize()
            begin_s = time.perf_counter()
            call()
            self.synchronize()
            if turn >= 2:
                samples.append((time.perf_counter() - begin_s) * 1e3)
            if samples and time.perf_counter() > self.deadline_s:
                break
        return round(statistics.median(samples), 4)

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def _attention_ms(
        self, backend: AttentionBackend, chunks: list[SequenceChunk], width: int, heads: int, dim: int
    ) -> float:
        """One layer's rotation, store and attention; many layers in a row, so that launches overlap the work."""
        num_layers = self._ready()[0].kv_layout(BLOCK_SIZE).num_layers
        tokens = sum(chunk.num_tokens for chunk in chunks)
        qkv = torch.randn(tokens, width, device=self.device).to(self.dtype)
        rotary = Rotary(torch.ones_like(qkv[:, :dim]), torch.zeros_like(qkv[:, :dim]))
        batch = backend.prepare(chunks)

        @torch.inference_mode()
        def layers() -> None:
            for layer in range(num_layers):
                batch.attend_qkv(layer, qkv, rotary, num_heads=heads, norms=None, scale=dim**-0.5, sliding_window=None)

        return self.time_ms(layers) / num_layers

    def _ready(self) -> tuple[LanguageModel, AttentionBackend]:
        if self._model is None or self._backend is None:
            raise RuntimeError("the setup part failed")
        return self._model, self._backend

    def _runner(self, decodes: DecodeReplay | None) -> ModelRunner:
        model, backend = self._ready()
        return ModelRunner(model, backend, EmbedStore(), decodes)

    def _chunk(self, index: int, start: int, num_tokens: int) -> SequenceChunk:
        model, _ = self._ready()
        ids = np.random.default_rng(index).integers(0, model.vocab_size, num_tokens).tolist()
        positions = model.position_rule.positions(start + num_tokens, ()).slice(start, start + num_tokens)
        blocks = range(index * self.blocks_each, (index + 1) * self.blocks_each)
        return SequenceChunk(str(index), start, ids, positions, blocks, True)

    def _engine(self) -> Engine:
        model, _ = self._ready()
        limits = ModelLimits(max_model_len=self.blocks_each * BLOCK_SIZE, num_blocks=self.num_blocks)
        resolved = self.config.resolve(limits)
        tokenizer = Tokenizer(models.BPE({f"t{index}": index for index in range(model.vocab_size)}, []))
        tokenizer.decoder = decoders.ByteLevel()
        return Engine(
            make_scheduler=lambda: Scheduler(resolved),
            runner=self._runner(self._decodes),
            sampler=Sampler(device=self.device),
            encodes=NoEncodes(),
            decoder=TokenDecoder(tokenizer),
            position_rule=model.position_rule,
            fingerprint=EncoderFingerprint(model_id="bench", weights_revision="1", dtype="bfloat16"),
            eos_token_ids=(),
        )


PARTS = ("setup", "decode", "prefill", "kernels", "products", "engine")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON, rewritten after each case")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds after which no case starts")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a model that runs anywhere, to see that all parts work")
    parser.add_argument("--quantization", choices=("fp8",), help="of the layers; emulated on a CPU (default: none)")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--commit", default="unknown", help="of the tree, for the record (default: %(default)s)")
    options = parser.parse_args(arguments)
    deadline_s = time.perf_counter() + options.time_limit
    bench = Bench(device=options.device, tiny=options.tiny, deadline_s=deadline_s, quantization=options.quantization)
    results: dict[str, Any] = {
        "command": " ".join(["python -m tests.bench.bench_engine", *arguments]),
        "commit": options.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if bench.on_cuda else platform.processor(),
        "torch": torch.__version__,
        "quantization": options.quantization,
        "parts": {},
    }
    failed = 0
    for part in tqdm(["setup", *(part for part in options.parts if part != "setup")], unit="part", disable=None):
        cases = results["parts"].setdefault(part, {})
        try:
            for name, figures in getattr(bench, part)():
                cases[name] = figures
                print(f"{part:8} {name}: {json.dumps(figures)}", flush=True)
                _write(options.out, results)
                if time.perf_counter() > deadline_s:
                    cases["cut"] = "time limit"
                    break
        except Exception:
            failed += 1
            cases["error"] = traceback.format_exc(limit=-6)
            print(f"{part:8} failed\n{cases['error']}", flush=True)
        _write(options.out, results)
    return 1 if failed else 0


def _write(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
