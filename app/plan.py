"""How many vision encoders and LM replicas does a trace need, and what does each split of the GPUs cost?

    python -m app.plan --model Qwen/Qwen2.5-VL-7B-Instruct --gpus 8 --trace requests.jsonl --ttft-s 1 --tpot-ms 30
    python -m app.plan --model FOLDER --gpus 2 --rate 12 --images 8 --size 336x336 --output-tokens 128
    python -m app.plan rates --help          (a rates file from the benchmarks' results)

Every split of 1 to N GPUs into encoders and LM replicas, and colocated replicas with an encoder inside, is worked out
from rates measured per stage. The cheapest promising ones are then replayed: the real scheduler, routing and packing in
simulated time. A GPU is never shared by two replicas; in a colocated one, encoder and engine share its time evenly and
nothing is lost or gained by that.

The trace is the simulator's: a JSON object a line with arrival_s, text_tokens, output_tokens, pictures [[id, slots]...]
and, if prompts share a beginning, prefix_id and prefix_tokens. Without one, requests are made up that are all alike.

Exit codes: 0 a split meets the targets, 1 none does (the nearest one is named), 2 the question is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from app.planning.choose import Candidate, Choice, Targets, best_of, choose, make_candidate
from app.planning.errors import PlanError
from app.planning.estimate import Estimate
from app.planning.rates import Rates, read_rates, write_rates
from app.planning.replay import CACHE_BYTES, Played, Replay
from app.planning.report import Report
from app.planning.results import make_rates
from app.planning.serve_fragment import preprocessors_for, serve_fragment
from app.planning.shape import ModelShape, read_shape
from app.planning.splits import EngineOptions, Split, engine_memory, splits_of
from app.planning.stage_times import StageTimes
from app.planning.workload import Caches, Demand, SyntheticWorkload, at_rate, demand_of, rate_of, read_trace
from deployments.checkpoint import CheckpointError, read_json, resolve_model
from deployments.errors import SightlineError
from deployments.lm_engine.trace import TraceRequest
from deployments.preprocessor.families.registry import load_family

EXIT_MET, EXIT_NOT_MET, EXIT_WRONG = 0, 1, 2

DEFAULT_RATES = Path(__file__).parents[1] / "serve_configs" / "rates" / "h200_qwen2.5-vl-7b.json"
MOST_GPUS = 64
"""There are about N² / 2 splits."""

_SIZE = re.compile(r"(\d+)(?:x(\d+))?")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["rates"]:
            return make_rates_file(_rates_parser().parse_args(arguments[1:]))
        return plan(_parser().parse_args(arguments))
    except (PlanError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_WRONG


def plan(args: argparse.Namespace) -> int:
    """Answer the question on standard output; progress goes to standard error.

    Raises:
        PlanError: An option or a file is wrong.
        CheckpointError: The model cannot be read.
    """
    if not 1 <= args.gpus <= MOST_GPUS:
        raise PlanError(f"--gpus is {args.gpus}; it must be 1 to {MOST_GPUS}")
    targets = Targets(
        ttft_s=args.ttft_s, tpot_s=None if args.tpot_ms is None else args.tpot_ms / 1e3, max_use=args.max_use
    )
    rates = read_rates(args.rates)
    folder = resolve_model(args.model, args.revision, config_only=True)
    planner = Planner(args, rates, read_shape(folder, args.model, args.dtype), folder)
    report = planner.report(targets)
    fragment = planner.fragment(report.choice) if args.yaml else None
    if args.json:
        found = report.as_json() | ({"serve": fragment} if fragment else {})
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write(report.text(every_split=args.all))
        if fragment:
            sys.stdout.write(f"\n{fragment}")
    return EXIT_NOT_MET if report.choice.recommended is None else EXIT_MET


class Planner:
    """Args:
    args: Parsed options.
    folder: Of the model.
    """

    def __init__(self, args: argparse.Namespace, rates: Rates, shape: ModelShape, folder: Path) -> None:
        self._args, self._rates, self._shape, self._folder = args, rates, shape, folder
        self._times = StageTimes(rates, shape)
        self._options = EngineOptions(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_prefill_tokens_while_decoding=args.max_prefill_tokens_while_decoding,
            encoder_cache_slots=args.encoder_cache_slots,
            max_model_len=args.max_model_len or min(shape.decoder.max_model_len, EngineOptions().max_model_len),
            gpu_memory_utilization=args.gpu_memory_utilization,
        )
        gpu_memory_gib = args.gpu_memory_gib or rates.gpu_memory_gib
        self._memory = {
            colocated: engine_memory(rates, shape, self._options, gpu_memory_gib, colocated=colocated)
            for colocated in (True, False)
        }
        self._requests, self._megapixels_per_slot = self._read_requests()
        self._check_lengths()
        self._rate_per_s = rate_of(self._requests)
        self._demands: dict[Caches, Demand] = {}

    def report(self, targets: Targets) -> Report:
        candidates = [
            make_candidate(self._estimate(split), self._rate_per_s, targets)
            for gpus in range(1, self._args.gpus + 1)
            for split in splits_of(gpus)
        ]
        choice = choose(candidates, targets, self._replay, self._args.replays)
        return Report(
            model=self._args.model,
            rates=self._rates,
            times=self._times,
            demand=choice.nearest.estimate.demand,
            rate_per_s=self._rate_per_s,
            targets=targets,
            choice=choice,
        )

    def fragment(self, choice: Choice) -> str:
        """For Serve: the recommended (or nearest) split, and as far as all GPUs go with the same placement."""
        least = choice.nearest
        most = best_of(
            [
                other
                for other in choice.candidates
                if other.split.gpus == self._args.gpus and other.split.colocated == least.split.colocated
            ]
        )
        cpu_s = least.estimate.preprocess_cpu_s()
        tokens = self._options.max_num_batched_tokens
        return serve_fragment(
            self._args.model,
            least.split,
            most.split,
            self._options,
            self._memory[least.split.colocated],
            preprocessors=(
                preprocessors_for(cpu_s, self._rate_per_s),
                preprocessors_for(cpu_s, max(self._rate_per_s, most.good_rate_per_s)),
            ),
            patches_per_s=self._patches_per_s(),
            prompt_tokens_per_s=tokens / self._times.step_s(tokens, 0.0, 0.0),
        )

    def _patches_per_s(self) -> float:
        """Of an encoder that is kept busy with small pictures."""
        loads = [self._times.load_of(64) for _ in range(64)]
        seconds = sum(self._times.pass_s(batch.load, len(batch.indices)) for batch in self._times.passes(loads))
        return sum(load.patches for load in loads) / seconds

    # -- inside --------------------------------------------------------------------------------------------------------
    def _estimate(self, split: Split) -> Estimate:
        memory = self._memory[split.colocated]
        caches = Caches(
            (split.encoders or split.engines) * CACHE_BYTES / self._shape.tower.row_bytes,
            split.engines * memory.kv_tokens,
        )
        if caches not in self._demands:
            self._demands[caches] = demand_of(self._requests, caches)
        return Estimate(split, self._demands[caches], self._times, self._options, memory, self._megapixels_per_slot)

    def _replay(self, candidate: Candidate) -> Played:
        requests = self._requests[: self._args.replay_requests]
        cpu_s = candidate.estimate.preprocess_cpu_s()
        with tqdm(
            total=len(requests), desc=f"replay {candidate.split}", unit="request", file=sys.stderr,
            disable=self._args.no_progress or None,
        ) as bar:  # fmt: skip
            return Replay(
                candidate.split,
                self._times,
                self._options,
                self._memory[candidate.split.colocated],
                requests,
                megapixels_per_slot=self._megapixels_per_slot,
                preprocessors=preprocessors_for(cpu_s, self._rate_per_s),
                on_end=bar.update,
            ).run()

    def _read_requests(self) -> tuple[list[TraceRequest], float]:
        """The trace, and source megapixels of a slot."""
        args = self._args
        tower = self._shape.tower
        cell_megapixels = (tower.patch * tower.merge) ** 2 / 1e6
        if args.trace is not None:
            requests = read_trace(args.trace)
            if args.rate is not None:
                requests = at_rate(requests, _positive(args.rate, "--rate"))
            if math.isinf(rate_of(requests)):
                raise PlanError(f"--trace {args.trace}: all requests come at once; give the rate to plan for (--rate)")
            slots = [picture.num_slots for request in requests for picture in request.pictures]
            if args.megapixels is None or not slots:
                return requests, cell_megapixels
            return requests, _positive(args.megapixels, "--megapixels") * len(slots) / sum(slots)
        if args.rate is None:
            raise PlanError("give --trace, or --rate for requests that are all alike")
        width, height = _parse_size(args.size)
        slots_each = self._slots_of(width, height) if args.images else 1
        workload = SyntheticWorkload(
            requests=args.requests,
            requests_per_s=args.rate,
            images=args.images,
            slots=slots_each,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            reuse=args.reuse,
            seed=args.seed,
        )
        # Poisson arrivals miss their rate by chance; the one that was asked for is planned for.
        return at_rate(workload.make(), args.rate), width * height / 1e6 / slots_each

    def _slots_of(self, width: int, height: int) -> int:
        family = load_family(self._folder)
        try:
            return family.layout(width, height, family.limits).num_slots
        except SightlineError as error:
            raise PlanError(f"--size {self._args.size}: {error}") from None

    def _check_lengths(self) -> None:
        most = self._options.max_model_len
        if most > self._shape.decoder.max_model_len:
            raise PlanError(f"--max-model-len is {most}; the model's own is {self._shape.decoder.max_model_len}")
        for index, request in enumerate(self._requests):
            prompt = request.prefix_tokens + request.text_tokens + sum(p.num_slots for p in request.pictures)
            if prompt + request.output_tokens > most:
                raise PlanError(
                    f"request {index} has {prompt} prompt and {request.output_tokens} output tokens; --max-model-len "
                    f"allows {most}"
                )


def make_rates_file(args: argparse.Namespace) -> int:
    """Raises PlanError: A result file cannot be read or lacks figures."""
    files = {name: getattr(args, name) for name in ("engine", "encoder", "stages", "scheduler", "transfer")}
    config = read_json(resolve_model(args.model, config_only=True), "config.json")
    rates = make_rates(files, config, args.name or Path(args.model).name, args.gpu_memory_gib)
    try:
        write_rates(rates, args.out)
    except OSError as error:
        raise PlanError(f"--out {args.out}: {error}") from None
    sys.stdout.write(f"{args.out}\n")
    return EXIT_MET


def _positive(value: float, option: str) -> float:
    if not 0 < value < math.inf:
        raise PlanError(f"{option} is {value}; it must be above 0")
    return value


def _parse_size(text: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) < 1 or int(match[2] or match[1]) < 1:
        raise PlanError(f"--size is {text!r}; it must be WIDTHxHEIGHT in pixels, such as 1024x768")
    return int(match[1]), int(match[2] or match[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id; only its configuration is read")
    parser.add_argument("--revision", help="hub branch, tag or commit")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    parser.add_argument("--gpus", type=int, required=True, help=f"GPUs to split, 1 to {MOST_GPUS}")
    parser.add_argument("--gpu-memory-gib", type=float, help="of one GPU (default: what the rates file says)")
    parser.add_argument("--rates", type=Path, default=DEFAULT_RATES, help="measured rates (default: %(default)s)")

    load = parser.add_argument_group("what is asked for")
    load.add_argument("--trace", type=Path, help="recorded requests, JSONL")
    load.add_argument(
        "--megapixels", type=float, help="mean size of a trace's pictures before resizing (default: that after it)"
    )
    load.add_argument("--rate", type=float, help="requests per second; with --trace, its arrivals are stretched to it")
    load.add_argument("--requests", type=int, default=1000, help="to make up without --trace (default: %(default)s)")
    load.add_argument("--images", type=int, default=1, help="of each of them (default: %(default)s)")
    load.add_argument("--size", default="336x336", help="of each picture in pixels (default: %(default)s)")
    load.add_argument("--prompt-tokens", type=int, default=128, help="of text (default: %(default)s)")
    load.add_argument("--output-tokens", type=int, default=128, help="(default: %(default)s)")
    load.add_argument("--reuse", type=float, default=0.0, help="share of pictures that came before (default: none)")
    load.add_argument("--seed", type=int, default=0)

    goal = parser.add_argument_group("targets, for the 95th percentile of requests")
    goal.add_argument("--ttft-s", type=float, help="time to the first token (default: any)")
    goal.add_argument("--tpot-ms", type=float, help="time of each further token, mean of a request (default: any)")
    goal.add_argument(
        "--max-use", type=float, default=Targets().max_use,
        help="share of a split's capacity that the trace may take (default: %(default)s)",
    )  # fmt: skip

    engine = parser.add_argument_group("options of the LM engine")
    defaults = EngineOptions()
    engine.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    engine.add_argument("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens)
    engine.add_argument("--max-prefill-tokens-while-decoding", type=int, default=0)
    engine.add_argument("--encoder-cache-slots", type=int, default=0, help="0: as many as step tokens")
    engine.add_argument("--max-model-len", type=int, help=f"(default: {defaults.max_model_len}, or the model's own)")
    engine.add_argument("--gpu-memory-utilization", type=float, default=defaults.gpu_memory_utilization)

    output = parser.add_argument_group("output")
    output.add_argument(
        "--replays", type=int, default=4, help="most splits to replay; 0: estimates (default: %(default)s)"
    )
    output.add_argument(
        "--replay-requests", type=int, default=2000, help="of the trace (default: the first %(default)s)"
    )
    output.add_argument("--all", action="store_true", help="show every split of fewer GPUs, too")
    output.add_argument("--yaml", action="store_true", help="also the part of a Serve config file that belongs to it")
    output.add_argument("--json", action="store_true", help="JSON instead of text")
    output.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser


def _rates_parser() -> argparse.ArgumentParser:
    results = "tests/bench/results"
    parser = argparse.ArgumentParser(
        prog="python -m app.plan rates",
        description="Make a rates file from results of the benchmarks, all of one model on one kind of GPU. Host "
        "figures (stages, scheduler, transfer) should come from the machines that serve.",
    )
    parser.add_argument(
        "--model", required=True, help="the model that was measured: folder or hub id with its config.json"
    )
    parser.add_argument("--name", help="of that model, for reports (default: the folder's)")
    parser.add_argument("--gpu-memory-gib", type=float, required=True, help="memory of one GPU")
    for name, bench in (
        ("engine", "bench_engine, with the parts decode and prefill, better also kernels"),
        ("encoder", "bench_encoder, with the parts setup and latency"),
        ("stages", "bench_stages"),
        ("scheduler", "bench_scheduler"),
        ("transfer", "bench_transfer"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"result of {bench} ({results})")
    parser.add_argument("--out", type=Path, required=True, help="rates file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
