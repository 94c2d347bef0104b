"""A choice as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from app.planning.choose import Candidate, Choice, Targets
from app.planning.estimate import PREPROCESSOR_CPUS
from app.planning.rates import Rates
from app.planning.serve_fragment import preprocessors_for
from app.planning.stage_times import StageTimes
from app.planning.workload import Demand

_TITLES = (
    "split", "GPUs", "max/s", "good/s", "encoder", "LM", "limit", "TTFT p50", "p95 s", "TPOT p50", "p95 ms",
    "GPU-s/1000", "at best", "CPUs", "by",
)  # fmt: skip


_SHARES = (0.125, 0.25, 0.5)
"""Of a GPU, as `num_gpus` may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    rates: Rates
    times: StageTimes
    demand: Demand
    """Behind the caches of the recommended split."""
    rate_per_s: float
    targets: Targets
    choice: Choice

    # -- for people ----------------------------------------------------------------------------------------------------
    def text(self, *, every_split: bool = False) -> str:
        lines = [*self._head(), "", *self._table(every_split), "", *self._legend(), "", *self._verdict()]
        return "\n".join(lines) + "\n"

    def _head(self) -> list[str]:
        demand, requests = self.demand, self.demand.requests
        encoded = sum(len(request.encode) for request in requests)
        slots = sum(sum(request.encode) for request in requests)
        prompt, cached = _mean(r.prompt_tokens for r in requests), _mean(r.cached_tokens for r in requests)
        lines = [
            f"{self.model}: {len(requests)} requests at {self.rate_per_s:.3g}/s (burstiness {demand.burstiness:.2g}), "
            f"each of {prompt:.0f} prompt tokens ({cached:.0f} cached), "
            f"{_mean(r.output_tokens for r in requests):.0f} output tokens and {encoded / len(requests):.2f} pictures "
            "to encode" + (f" of {slots / encoded:.0f} slots" if encoded else ""),
            f"rates: {self.rates.model} on {self.rates.device}; KV reads from {self.rates.engine.kv_from}, prompts' "
            f"attention from {self.rates.engine.attention_from}; "
            + "; ".join(f"{s.part}: {s.file}, {s.machine}, {s.date[:10]}" for s in self.rates.sources),
        ]
        scaling = self.times.scaling
        if not scaling.is_none:
            lines.append(
                f"NOT MEASURED for this model: scaled by arithmetic, {scaling.flops_per_token:.3g} of the measured "
                f"model's FLOPs a token and {scaling.flops_per_slot:.3g} a slot of a picture"
            )
        return lines

    def _table(self, every_split: bool) -> list[str]:
        shown = [c for c in self.choice.candidates if every_split or self._is_of_interest(c)]
        rows = [_TITLES, *(self._row(candidate) for candidate in shown)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        marks = ["", *("  <==" if candidate is self.choice.recommended else "" for candidate in shown)]
        return [line + mark for line, mark in zip(lines, marks, strict=True)]

    def _is_of_interest(self, candidate: Candidate) -> bool:
        """Every split of all GPUs, and of fewer the best and what was compared with the recommended one."""
        choice = self.choice
        most = max(other.split.gpus for other in choice.candidates)
        compared = any(candidate in pair for pair in choice.rivals)
        peers = [other for other in choice.candidates if other.split.gpus == candidate.split.gpus]
        best = max(peers, key=lambda other: other.good_rate_per_s)
        return (
            candidate.split.gpus == most
            or compared
            or candidate in (best, choice.nearest)
            or candidate.played is not None
        )

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        use, latency = candidate.use, candidate.latency
        cpus = preprocessors_for(candidate.estimate.preprocess_cpu_s(), self.rate_per_s) * PREPROCESSOR_CPUS
        return (
            str(candidate.split),
            str(candidate.split.gpus),
            f"{candidate.capacity_per_s:.3g}",
            f"{candidate.good_rate_per_s:.3g}",
            f"{use.encoder:.0%}",
            f"{use.engine:.0%}",
            use.bottleneck,
            f"{latency.ttft_p50_s:.3f}",
            f"{latency.ttft_p95_s:.3f}",
            f"{latency.tpot_p50_s * 1e3:.2f}",
            f"{latency.tpot_p95_s * 1e3:.2f}",
            f"{self._gpu_s(candidate, self.rate_per_s):.3g}",
            f"{self._gpu_s(candidate, candidate.good_rate_per_s):.3g}" if candidate.good_rate_per_s else "-",
            str(cpus),
            "estimate" if candidate.played is None else "replay",
        )

    @staticmethod
    def _gpu_s(candidate: Candidate, rate_per_s: float) -> float:
        """GPU seconds of 1,000 requests, idle time included."""
        return 1000 * candidate.split.gpus / rate_per_s

    def _legend(self) -> list[str]:
        return [
            "split: encoders + LM replicas, a GPU each. max/s: requests at which a backlog starts to grow. good/s: at "
            f"most within the targets and {self.targets.max_use:.0%} of max/s.",
            "encoder, LM: share of their capacity that the trace takes (colocated: LM is all of the GPU's time, "
            "encoder its part of that). GPU-s/1000: for 1,000 requests at the trace's rate; at best: at good/s. CPUs: "
            "of preprocessors.",
        ]

    def _verdict(self) -> list[str]:
        choice = self.choice
        found = choice.recommended
        if found is None:
            near = choice.nearest
            lines = [
                f"No split of up to {max(c.split.gpus for c in choice.candidates)} GPUs meets the targets. Nearest is "
                f"{_name(near)}: " + ", ".join(self.targets.misses(near.latency, near.total_use)) + f" ({_by(near)})."
            ]
        else:
            lines = [f"Recommended: {_name(found)} ({_by(found)}). {self._why(found)}"]
            lines += self._room(found)
        lines += [self._compare(together, apart) for together, apart in choice.rivals]
        return lines

    def _why(self, found: Candidate) -> str:
        fewer = [c for c in self.choice.candidates if c.split.gpus < found.split.gpus]
        if not fewer:
            return "It is the smallest there is, and meets the targets."
        nearest = min(fewer, key=lambda candidate: candidate.shortfall(self.targets))
        misses = ", ".join(self.targets.misses(nearest.latency, nearest.total_use))
        return f"With fewer GPUs the best is {_name(nearest)}: {misses} ({_by(nearest)})."

    def _room(self, found: Candidate) -> list[str]:
        """That a sole encoder leaves."""
        needed = found.use.encoder / self.targets.max_use
        if found.split.encoders != 1 or needed > _SHARES[-1]:
            return []
        share = next(part for part in _SHARES if part >= needed)
        return [
            f"Its encoder takes {found.use.encoder:.0%} of a GPU: num_gpus: {share:g} would leave the rest to "
            "something else (bound its memory with vision_encoder.batch_memory_bytes)."
        ]

    def _compare(self, together: Candidate, apart: Candidate) -> str:
        a, b = together.good_rate_per_s, apart.good_rate_per_s
        head = (
            f"On {together.split.gpus} GPUs within the targets: {_name(together)} {a:.3g}/s, {_name(apart)} {b:.3g}/s"
        )
        if max(a, b) == 0:
            verdict = "neither meets them at any rate"
        elif abs(a - b) <= 0.02 * max(a, b):
            verdict = "as good as equal, and colocated is simpler"
        elif a > b:
            verdict = f"colocated is better ({_more(a, b)})"
        else:
            verdict = f"encoders of their own are better ({_more(b, a)})"
        first, second = together.latency, apart.latency
        times = (
            f"TTFT p95 {first.ttft_p95_s:.3f} s ({_by(together)}) against {second.ttft_p95_s:.3f} ({_by(apart)}), "
            f"TPOT p95 {first.tpot_p95_s * 1e3:.2f} ms against {second.tpot_p95_s * 1e3:.2f}"
        )
        return f"{head}: {verdict}. At the trace's rate {times}."

    # -- for programs --------------------------------------------------------------------------------------------------
    def as_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "model": self.model,
            "rates": {"model": self.rates.model, "device": self.rates.device},
            "scaling": asdict(self.times.scaling),
            "requests": len(self.demand.requests),
            "rate_per_s": self.rate_per_s,
            "targets": asdict(self.targets),
            "recommended": None if choice.recommended is None else self._split_json(choice.recommended),
            "nearest": self._split_json(choice.nearest),
            "comparisons": [
                {
                    "gpus": together.split.gpus,
                    "colocated": self._split_json(together),
                    "separate": self._split_json(apart),
                    "better": "colocated" if together.good_rate_per_s >= apart.good_rate_per_s else "separate",
                }
                for together, apart in choice.rivals
            ],
            "splits": [self._candidate_json(candidate) for candidate in choice.candidates],
        }

    @staticmethod
    def _split_json(candidate: Candidate) -> dict[str, Any]:
        return {"encoders": candidate.split.encoders, "engines": candidate.split.engines}

    def _candidate_json(self, candidate: Candidate) -> dict[str, Any]:
        played = candidate.played
        return {
            **self._split_json(candidate),
            "gpus": candidate.split.gpus,
            "placement": "colocated" if candidate.split.colocated else "deployment",
            "capacity_per_s": candidate.capacity_per_s,
            "good_rate_per_s": candidate.good_rate_per_s,
            "encoder_use": candidate.use.encoder,
            "engine_use": candidate.use.engine,
            "bottleneck": candidate.use.bottleneck,
            "estimated": asdict(candidate.estimated),
            "replayed": None
            if played is None
            else {
                **asdict(played.latency()),
                "requests": played.requests,
                "refused": played.refused,
                "requests_per_s": played.requests_per_s,
                "engine_busy_share": played.engine_busy_s / played.duration_s / candidate.split.engines,
                "encoder_busy_share": played.encoder_busy_s
                / played.duration_s
                / (candidate.split.encoders or candidate.split.engines),
                "preemptions": played.preemptions,
            },
            "gpu_s_per_1000": self._gpu_s(candidate, self.rate_per_s),
            "gpu_s_per_1000_at_best": self._gpu_s(candidate, candidate.good_rate_per_s)
            if candidate.good_rate_per_s
            else None,
            "preprocessor_cpus": preprocessors_for(candidate.estimate.preprocess_cpu_s(), self.rate_per_s)
            * PREPROCESSOR_CPUS,
            "misses": self.targets.misses(candidate.latency, candidate.total_use),
        }


def _name(candidate: Candidate) -> str:
    split = candidate.split
    if split.colocated:
        return f"{split.engines} colocated LM replica{'s' * (split.engines > 1)}"
    return (
        f"{split.encoders} encoder{'s' * (split.encoders > 1)} + {split.engines} LM replica{'s' * (split.engines > 1)}"
    )


def _by(candidate: Candidate) -> str:
    return "estimate" if candidate.played is None else "replay"


def _more(more: float, less: float) -> str:
    return f"{more / less - 1:+.0%}" if less else "the other does not meet them at any rate"


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
