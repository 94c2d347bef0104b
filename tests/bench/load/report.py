"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.load.reference import Reference, figure
from tests.bench.load.stages import TOLERANCE

COMPARED = ("requests_per_s", "ttft_p50_s", "tpot_p50_ms")
SPREADS = {"ttft_s": "TTFT, s", "tpot_ms": "TPOT, ms", "itl_ms": "ITL, ms", "e2e_s": "whole answer, s"}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    )


def describe(run: Mapping[str, Any]) -> str:
    """Everything about one run."""
    load = run["workload"]
    shape = f"{load['images']} x {load['sizes']}" if load["images"] else "no picture"
    pace = f"{load['rate_per_s']:g} requests/s (Poisson)" if load["rate_per_s"] else f"{load['concurrency']} at once"
    blocks = [
        f"{load['name']}: {run['requests']} requests, {pace}, {shape}, {load['out_tokens']} tokens out, "
        f"{run['cache']} caches",
        f"{run['requests_per_s']:.2f} requests/s, {run['output_tokens_per_s']:.0f} tokens/s in {run['wall_s']:.2f} s",
        _spreads(run),
    ]
    if run["itl_p99_to_p50"] is not None:
        blocks.append(f"ITL p99 is {run['itl_p99_to_p50']:.2f} times p50; {run['tokens_per_piece']} tokens a piece")
    if run["answers_of_other_length"]:
        blocks.append(f"{run['answers_of_other_length']} answers have another length than asked for")
    blocks += [f"ERRORS {count} x {kind}: {run['error_examples'][kind]}" for kind, count in run["errors"].items()]
    blocks.append(first_token(run["first_token"]))
    return "\n".join(blocks)


def _spreads(run: Mapping[str, Any]) -> str:
    rows = [["", "mean", "p50", "p95", "p99", "max"]]
    for name, title in SPREADS.items():
        if spread := run[name]:
            digits = 4 if name.endswith("_s") else 2
            rows.append([title, *(f"{spread[key]:.{digits}f}" for key in ("mean", "p50", "p95", "p99", "max"))])
    return table(rows)


def first_token(found: Mapping[str, Any] | str | None) -> str:
    """Where the time to the first token goes."""
    if found is None:
        return "TTFT by stage: the server shows no such metrics"
    if isinstance(found, str):
        return f"TTFT by stage: none, since {found}"
    rows = [["TTFT by stage", "mean, ms"], *([name, f"{ms:.2f}"] for name, ms in found["stage_ms"].items())]
    rows += [
        ["sum of the stages", f"{found['sum_of_stages_ms']:.2f}"],
        ["on the server's clock", f"{found['server_ttft_ms']:.2f}"],
        ["on the client's clock", f"{found['client_ttft_ms']:.2f}"],
        ["sum / client", f"{found['sum_to_client']:.3f}"],
    ]
    return table(rows) + ("" if found["adds_up"] else f"\nThe stages do not add up to within {TOLERANCE:.0%}.")


def comparison(runs: Mapping[str, Mapping[str, Any]], reference: Reference) -> str:
    """Runs of the named workloads beside the peer's figures, with the targets that they miss."""
    rows = [["", "requests/s", "peer", "x", "TTFT p50, s", "peer", "TPOT p50, ms", "peer", "stages / TTFT", "errors"]]
    missed = []
    for name, run in runs.items():
        peer = reference.peer.get(name, {})
        ours = [figure(run, key) for key in COMPARED]
        theirs = [peer.get(key) for key in COMPARED]
        times = f"{ours[0] / theirs[0]:.2f}" if ours[0] is not None and theirs[0] else ""
        rows.append(
            [
                name, _show(ours[0], 2), _show(theirs[0], 1), times, _show(ours[1], 3), _show(theirs[1], 3),
                _show(ours[2], 2), _show(theirs[2], 1), _show(_explained(run), 3), str(sum(run["errors"].values())),
            ]
        )  # fmt: skip
        missed += [f"{name}: {text}" for text in reference.missed(name, run)]
    verdict = "\n".join(["Targets missed:", *missed]) if missed else "All targets are reached."
    return f"{table(rows)}\nPeer: {reference.peer_provenance}\n{verdict}"


def _explained(run: Mapping[str, Any]) -> float | None:
    """Share of the clients' time to first token that the server's stages explain."""
    found = run["first_token"]
    return found["sum_to_client"] if isinstance(found, Mapping) else None


def _show(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
