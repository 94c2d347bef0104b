"""Trains the demo model from nothing.

    python train.py --out FIRST --minutes 7
    python train.py --out FOLDER --start FIRST --stage 2 --minutes 8 --lr 1.2e-3 --seed 2

Draws pictures and conversations in worker processes while the GPU trains on them, until the time is up; the learning
rate follows the clock. FOLDER always holds the newest checkpoint, ready to serve.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pathlib
import shutil
import sys
import time

import torch
import torch.nn.functional as F
from feeder import Feeder
from flat import FlatWeights
from net import Net
from optimizer import Optimizer
from packing import Room, Stream
from score import draw, score
from shape import config, write_processor
from tokenizers import Tokenizer
from tqdm import tqdm

HERE = pathlib.Path(__file__).parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model on pictures that the recipe draws.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder for the model")
    parser.add_argument("--minutes", type=float, default=7.0, help="training time, after the first step")
    parser.add_argument("--start", type=pathlib.Path, help="go on from this folder's weights instead of random ones")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1, help="which mixture of questions to show")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps instead (for trials)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=14, help="drawing processes")
    parser.add_argument("--repeats", type=int, default=3, help="how often a batch may be shown when drawing is slow")
    parser.add_argument("--score", type=int, default=200, help="held-out conversations a kind to score at the end")
    parser.add_argument("--save-minutes", type=float, default=2.0, help="time between checkpoints")
    parser.add_argument("--small", type=int, default=0, help="batches of so many patches, for a trial on a CPU")
    parser.add_argument("--no-compile", action="store_true", help="run the layers as written")
    parser.add_argument("--no-graph", action="store_true", help="launch each step's kernels one by one")
    return parser.parse_args()


def rate(done: float, peak: float) -> float:
    """Warm-up over the first 3 %, then a cosine down to 1 % of the peak; `done` is the share of time spent."""
    if done < 0.03:
        return peak * max(done, 0.001) / 0.03
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.03) / 0.97))))


def save(flat: FlatWeights, out: pathlib.Path) -> None:
    """Writes the checkpoint as bf16 safetensors, in files of at most 15 MB."""
    model = copy.deepcopy(flat.write_back()).to(torch.bfloat16)
    for part in (model.config.text_config, model.config.vision_config):
        part.dtype = torch.bfloat16  # a start from float32 weights leaves that here
    model.save_pretrained(out, max_shard_size="15MB")


class Trainer:
    """One training run: weights, optimizer, clock and log."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        self.args = args
        self.tokenizer = str(HERE / "tokenizer.json")
        self.room = Room(args.small, args.small, 1024, 200, 60, 1600, 2048) if args.small else Room()
        # The drawing processes fork here, before anything touches the GPU.
        stream = Stream(self.tokenizer, self.room, args.seed, args.stage)
        self.feeder = Feeder(stream, args.workers, args.repeats, pin=torch.cuda.device_count() > 0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        args.out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "chat_template.jinja"):
            if args.out.resolve() != HERE.resolve():
                shutil.copy(HERE / name, args.out / name)
        raw = Tokenizer.from_file(self.tokenizer)
        write_processor(args.out, raw)
        torch.manual_seed(args.seed)
        if args.start is None:
            model = Qwen2_5_VLForConditionalGeneration(config(raw))
        else:
            model = Qwen2_5_VLForConditionalGeneration.from_pretrained(args.start, dtype=torch.float32)
        model.generation_config = type(model.generation_config).from_pretrained(args.out)
        self.flat = FlatWeights(model, self.device, self.dtype)
        self.net = Net(model.config, self.device, compiled=self.device.type == "cuda" and not args.no_compile)
        self.optimizer = Optimizer(self.flat, self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: dict[str, torch.Tensor] = {}  # the device's copy of the current batch, overwritten by each
        self.loss = torch.zeros((), device=self.device)
        self.log: list[dict[str, float]] = []

    def compute(self) -> None:
        """One step on `self.batch`, on the device alone: nothing here waits for a result."""
        logits = self.net(self.flat.weights, self.batch, self.dtype, self.room.longest)
        each = F.cross_entropy(logits.float(), self.batch["targets"], ignore_index=-100, reduction="none")
        loss = (each * self.batch["weights"]).sum() / self.batch["weights"].sum()
        loss.backward()
        self.flat.collect()
        self.optimizer.step()
        self.flat.refresh()
        self.loss.mul_(0.95).add_(0.05 * loss.detach())

    def step(self, batch: dict[str, torch.Tensor], lr: float) -> None:
        """One step at the given learning rate."""
        if not self.batch:
            self.batch = {k: torch.empty_like(v, device=self.device) for k, v in batch.items()}
        for name, value in batch.items():
            self.batch[name].copy_(value, non_blocking=True)
        self.optimizer.lr.fill_(lr)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute()

    def warm_up(self) -> None:
        """Compiles, and records the step as a CUDA graph; the weights stay as they were (the rate is zero)."""
        if self.device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(self.feeder.next(), 0.0)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if not self.args.no_graph:
            graph = torch.cuda.CUDAGraph()
            # thread_local: the feeder goes on pinning memory meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.compute()
            self.graph = graph
        self.loss.fill_(8.0)

    def run(self) -> None:
        """Trains until the clock or the step count says stop."""
        args = self.args
        feeder = self.feeder
        budget = args.minutes * 60
        self.warm_up()
        start = saved = told = time.monotonic()
        bar = tqdm(total=args.steps or round(budget), unit="step" if args.steps else "s", mininterval=2)
        steps = 0
        while True:
            spent = time.monotonic() - start
            done = steps / args.steps if args.steps else spent / budget
            if done >= 1:
                break
            self.step(feeder.next(), rate(done, args.lr))
            steps += 1
            if steps % 20 == 0 or args.steps:
                loss = self.loss.item()  # also keeps the host from running far ahead
                bar.n = steps if args.steps else min(bar.total, round(spent))
                fresh = round(feeder.drawn / feeder.shown, 2)
                bar.set_postfix(loss=f"{loss:.4f}", steps=steps, fresh=fresh, refresh=False)
                bar.update(0)
                if spent - (told - start) > 10:
                    told = time.monotonic()
                    self.log.append(
                        {"seconds": round(spent, 1), "steps": steps, "loss": round(loss, 4), "fresh": fresh}
                    )
                    (args.out / "train_log.json").write_text(json.dumps(self.log))
            if time.monotonic() - saved > args.save_minutes * 60:
                save(self.flat, args.out)
                saved = time.monotonic()
        bar.close()
        feeder.close()
        save(self.flat, args.out)
        print(f"{steps} steps, {feeder.drawn} batches drawn, {feeder.shown} shown")


def main() -> int:
    args = parse()
    if args.minutes <= 0 or args.workers < 0:
        print("--minutes must be above 0 and --workers at least 0", file=sys.stderr)
        return 2
    if args.start is not None and not (args.start / "config.json").is_file():
        print(f"{args.start} holds no model", file=sys.stderr)
        return 2
    trainer = Trainer(args)
    trainer.run()
    if args.score:
        talks = draw(trainer.tokenizer, args.score, max(1, args.workers))
        scores = score(trainer.net, trainer.flat.weights, talks, trainer.room, trainer.dtype)
        (args.out / "quick_scores.json").write_text(json.dumps(scores, indent=1) + "\n")
        for kind, value in scores.items():
            print(f"{kind:18} {value:6.1%}")
        print(f"{'mean':18} {sum(scores.values()) / len(scores):6.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
