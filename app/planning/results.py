"""Rates from the result files of the benchmarks.

bench_engine     steps by batch and context, prompts, attention kernels
bench_encoder    captured sizes, eager passes, pairs, memory of a pass
bench_stages     CPU time of a request and of a picture, calls between stages
bench_scheduler  host time of a step
bench_transfer   payloads from one process to another
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.planning.errors import PlanError
from app.planning.rates import (
    BudgetPoint,
    EagerPoint,
    EncoderRates,
    EngineRates,
    HostRates,
    Rates,
    Source,
    StepPoint,
    parse_rates,
)
from app.planning.shape import DecoderShape, ModelShape, shape_of

_DECODE = re.compile(r"batch (\d+), context (\d+)")
_PREFILL = re.compile(r"(\d+) x (\d+) tokens")
_KERNEL = re.compile(r"decode attention, batch (\d+)")
_LATENCY = re.compile(r"(\d+)x(\d+)\^2")
_USUAL_PATCHES = 256
"""Patches of the 224^2 pictures whose pairs are part of the ladder's times."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A benchmark's result; every look into it that fails says where."""

    part: str
    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, part: str, path: Path) -> ResultFile:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"--{part} {path}: {error}") from None
        if not isinstance(values, dict):
            raise PlanError(f"--{part} {path}: expected a JSON object")
        return cls(part, path, values)

    def get(self, *names: str | int) -> Any:
        value: Any = self.values
        for depth, name in enumerate(names):
            try:
                value = value[name]
            except (KeyError, IndexError, TypeError):
                where = ".".join(map(str, names[: depth + 1]))
                raise PlanError(f"--{self.part} {self.path}: the result has no {where}") from None
        return value

    def part_of(self, name: str) -> Mapping[str, Any]:
        """A part of a benchmark that may have been left out: empty then."""
        found = self.values.get("parts", {}).get(name, {})
        return found if isinstance(found, dict) else {}

    def number(self, *names: str | int) -> float:
        value = self.get(*names)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise PlanError(f"--{self.part} {self.path}: {'.'.join(map(str, names))} is {value!r}, not a number")
        return float(value)

    @property
    def source(self) -> Source:
        values = self.values
        return Source(
            part=self.part,
            file=self.path.name,
            machine=str(values.get("device") or values.get("machine") or ""),
            date=str(values.get("date") or ""),
            command=str(values.get("command") or values.get("benchmark") or ""),
            commit=str(values.get("commit") or ""),
        )


def make_rates(files: Mapping[str, Path], config: Mapping[str, Any], name: str, gpu_memory_gib: float) -> Rates:
    """Rates of the model that was measured.

    Args:
        files: Paths by part: engine, encoder, stages, scheduler, transfer.
        config: config.json of the measured model.

    Raises:
        PlanError: A file cannot be read or lacks figures; the message names file and figure.
    """
    shape = shape_of(config, name)
    engine, encoder, stages, scheduler, transfer = (
        ResultFile.read(part, files[part]) for part in ("engine", "encoder", "stages", "scheduler", "transfer")
    )
    rates = Rates(
        device=str(engine.get("device")),
        gpu_memory_gib=gpu_memory_gib,
        model=name,
        config=dict(config),
        engine=_engine(engine, shape.decoder, scheduler),
        encoder=_encoder(encoder, shape),
        host=_host(stages, transfer),
        sources=tuple(file.source for file in (engine, encoder, stages, scheduler, transfer)),
    )
    # Once more through the checks: a benchmark that was cut short may have left a zero.
    return parse_rates(json.loads(json.dumps(asdict(rates))), "made from results")


def _engine(file: ResultFile, shape: DecoderShape, scheduler: ResultFile) -> EngineRates:
    decodes = [
        StepPoint(
            sequences=int(match[1]),
            new_tokens=1,
            context_tokens=int(match[2]),
            seconds=file.number("parts", "decode", case, "with_sampling_ms") / 1e3,
        )
        for case, match in _cases(file, "decode", _DECODE)
    ]
    prefills = [
        StepPoint(
            sequences=int(match[1]),
            new_tokens=int(match[2]),
            context_tokens=0,
            seconds=file.number("parts", "prefill", case, "step_ms") / 1e3,
        )
        for case, match in _cases(file, "prefill", _PREFILL)
    ]
    if not decodes or not prefills:
        raise PlanError(f"--engine {file.path}: the result needs cases of decode and of prefill")
    kv_bytes_per_s, kv_from = _kv_rate(file, shape, decodes)
    attention, attention_from = _attention_rate(file, shape, prefills)
    return EngineRates(
        steps=(*decodes, *prefills),
        kv_bytes_per_s=kv_bytes_per_s,
        kv_from=kv_from,
        attention_flop_per_s=attention,
        attention_from=attention_from,
        host_step_s=scheduler.number("results", 0, "wall_ms_median") / 1e3,
    )


def _kv_rate(file: ResultFile, shape: DecoderShape, decodes: list[StepPoint]) -> tuple[float, str]:
    """From the attention kernel at its largest batch; without that, from the decode steps themselves."""
    kernels = file.part_of("kernels")
    batches = {int(match[1]): name for name in kernels if (match := _KERNEL.fullmatch(name))}
    if batches:
        return kernels[batches[max(batches)]]["gib_per_s"] * 2**30, f"decode attention of {max(batches)} sequences"
    contexts = {point.context_tokens for point in decodes}
    if len(contexts) > 1:
        rates = list(_rates_by_context(shape, decodes))
        if rates:
            return statistics.median(rates), "decode steps of equal batch and other context"
    least = min(decodes, key=lambda point: point.sequences)
    read = shape.read_bytes(least.sequences) + _kv_bytes(shape, least)
    return read / least.seconds, f"weights read by a decode step of {least.sequences}"


def _rates_by_context(shape: DecoderShape, decodes: list[StepPoint]) -> Iterator[float]:
    for short in decodes:
        for long in decodes:
            if short.sequences == long.sequences and long.seconds > short.seconds:
                more = _kv_bytes(shape, long) - _kv_bytes(shape, short)
                if more > 0:
                    yield more / (long.seconds - short.seconds)


def _kv_bytes(shape: DecoderShape, point: StepPoint) -> float:
    return point.sequences * point.context_tokens * shape.kv_bytes_per_token


def _attention_rate(file: ResultFile, shape: DecoderShape, prefills: list[StepPoint]) -> tuple[float, str]:
    kernel = file.part_of("kernels").get("prefill attention")
    if kernel:
        return kernel["tflop_per_s"] * 1e12, "prefill attention kernel"
    # Attention is a small share of prompts of usual length; it is taken to be as fast as the products.
    point = max(prefills, key=lambda point: point.sequences * point.new_tokens)
    pairs = point.new_tokens**2 / 2
    flops = point.sequences * (point.new_tokens * shape.flops_per_token + pairs * shape.flops_per_pair)
    return flops / point.seconds, f"whole prefill of {point.sequences} x {point.new_tokens} tokens"


def _encoder(file: ResultFile, shape: ModelShape) -> EncoderRates:
    setup = file.part_of("setup")
    ladder = setup.get("ladder") or setup.get("budgets")
    if not ladder:
        raise PlanError(f"--encoder {file.path}: the result has no ladder of captured sizes (part setup)")
    memory = re.search(r"fixed_bytes=([\d.e+-]+), bytes_per_patch=([\d.e+-]+)", str(setup.get("core")))
    if memory is None:
        raise PlanError(f"--encoder {file.path}: the result has no memory model (part setup, core)")
    pair_s = float(setup.get("costs", {}).get("pair_ps", 0.0)) * 1e-12
    passes = [_Pass.read(file, case, match, pair_s, shape) for case, match in _cases(file, "latency", _LATENCY)]
    if not passes:
        raise PlanError(f"--encoder {file.path}: the result has no cases of latency")

    def plain_s(row: Mapping[str, Any]) -> float:
        return row["graph_ms"] / 1e3 - pair_s * row["slots"] * shape.tower.unit * _USUAL_PATCHES

    # The ladder's times are the encoder's own quick look at its start, those of the latency part were taken with care:
    # what these say of the sizes that both have goes for the sizes between, too.
    by_slots = {int(row["slots"]): plain_s(row) for row in ladder}
    ratios: dict[int, list[float]] = {}
    for replay in passes:
        if replay.budget in by_slots:
            ratios.setdefault(replay.budget, []).append(replay.graph_s / by_slots[replay.budget])
    known = sorted((budget, statistics.fmean(found)) for budget, found in ratios.items()) or [(1, 1.0)]
    corrected = np.interp(list(by_slots), [budget for budget, _ in known], [ratio for _, ratio in known])
    overheads = [replay.encode_s - replay.graph_s for replay in passes if replay.budget and replay.replayed]
    return EncoderRates(
        budgets=tuple(
            BudgetPoint(
                slots=int(row["slots"]),
                items=int(row["items"]),
                graph_s=round(by_slots[int(row["slots"])] * float(ratio), 9),
            )
            for row, ratio in zip(ladder, corrected, strict=True)
        ),
        eager=tuple(
            EagerPoint(slots=replay.slots, seconds=round(replay.eager_s, 9))
            for replay in sorted(passes, key=lambda replay: replay.slots)
        ),
        pair_s=pair_s,
        pass_overhead_s=max(0.0, statistics.median(overheads)) if overheads else 0.0,
        graph_bytes=file.number("parts", "setup", "core", "graph_mib") * 2**20,
        fixed_bytes=float(memory[1]),
        bytes_per_patch=float(memory[2]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A case of the latency part; seconds of passes without what grows with pairs."""

    slots: int
    encode_s: float
    """Host to host, pairs included."""
    eager_s: float
    budget: int
    """Slots of the captured size; 0 if none holds it."""
    graph_s: float
    replayed: bool
    """Whether the encoder itself took the replay."""

    @classmethod
    def read(cls, file: ResultFile, case: str, match: re.Match[str], pair_s: float, shape: ModelShape) -> _Pass:
        tower = shape.tower
        side = int(match[2]) // (tower.patch * tower.merge) * tower.merge
        pairs_s = pair_s * int(match[1]) * side**4
        where = ("parts", "latency", case)
        graph = file.get(*where, "graph")
        return cls(
            slots=int(file.number(*where, "slots")),
            encode_s=file.number(*where, "encode", "median_ms") / 1e3 - pairs_s,
            eager_s=file.number(*where, "eager", "median_ms") / 1e3 - pairs_s,
            budget=int(graph["budget"]) if graph else 0,
            graph_s=graph["median_ms"] / 1e3 - pairs_s if graph else 0.0,
            replayed=all(":graph" in name for name in file.get(*where, "passes")),
        )


def _host(stages: ResultFile, transfer: ResultFile) -> HostRates:
    def seconds(name: str) -> float:
        return stages.number("ms", "new picture", name) / 1e3

    width, height = (int(side) for side in str(stages.get("size")).split("x"))
    hops = stages.get("hop_ms")
    return HostRates(
        receive_s=seconds("receive") + seconds("admission"),
        request_cpu_s=seconds("tokenize") + seconds("fetch"),
        cpu_s_per_megapixel=(seconds("decode") + seconds("preprocess")) / (width * height / 1e6),
        call_s=statistics.fmean(hops.values()) / 1e3,
        payload_bytes_per_s=transfer.number("bytes_per_s"),
    )


def _cases(file: ResultFile, part: str, pattern: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
    return [(name, match) for name in file.part_of(part) if (match := pattern.fullmatch(name))]
