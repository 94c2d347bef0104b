"""Figures to compare with: a peer's on the named workloads, and the targets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.load.stages import TOLERANCE

PATH = Path(__file__).parents[1] / "reference_h200.json"
AT_LEAST = ("requests_per_s", "output_tokens_per_s")
"""Figures of which more is better; of all others less is."""


@dataclass(frozen=True, slots=True)
class Reference:
    peer: Mapping[str, Mapping[str, float]]
    """Figures by workload."""
    targets: Mapping[str, Mapping[str, float]]
    peer_provenance: str

    @classmethod
    def load(cls, path: Path = PATH) -> Reference:
        stored = json.loads(path.read_text())
        peer, targets = stored["peer"], stored["targets"]
        return cls(peer["workloads"], targets["workloads"], peer["provenance"])

    def missed(self, workload: str, run: Mapping[str, Any]) -> list[str]:
        """The targets of a workload that a run did not reach, in words; stages that do not add up are one of all."""
        found = []
        for name, target in self.targets.get(workload, {}).items():
            value = figure(run, name)
            reached = value is not None and (value >= target if name in AT_LEAST else value <= target)
            if not reached:
                shown = "none" if value is None else f"{value:g}"
                found.append(f"{name} {shown}, wanted {'at least' if name in AT_LEAST else 'at most'} {target:g}")
        stages = run.get("first_token")
        if isinstance(stages, Mapping) and not stages["adds_up"]:
            found.append(f"stages explain {stages['sum_to_client']:g} of TTFT, wanted within {TOLERANCE:.0%}")
        return found


def figure(run: Mapping[str, Any], name: str) -> float | None:
    """A run's figure by the name that it has in a reference: `ttft_p50_s` is `run["ttft_s"]["p50"]`."""
    if name in AT_LEAST:
        return run[name]
    what, percent, unit = name.split("_")
    spread = run[f"{what}_{unit}"]
    return None if spread is None else spread[percent]
