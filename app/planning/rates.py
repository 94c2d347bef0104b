"""Measured times of every stage, as a JSON file holds them. `results.py` makes such a file from benchmark results.

All times are seconds. What was measured is kept as it was measured; `stage_times.py` makes functions of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from app.planning.errors import PlanError

Count = Annotated[int, Field(gt=0)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_STRICT: dict[str, str] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """A step of the LM engine, sampling included."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    sequences: Count
    new_tokens: Count
    """Computed for each sequence; 1 is a decode step."""
    context_tokens: Annotated[int, Field(ge=0)]
    """Of each sequence, in the KV cache before the step."""
    seconds: Above


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    steps: Annotated[tuple[StepPoint, ...], Field(min_length=1)]
    kv_bytes_per_s: Above
    """At which decode steps read the KV cache."""
    kv_from: str
    """What that is taken from."""
    attention_flop_per_s: Above
    """At which prompts attend to themselves."""
    attention_from: str
    host_step_s: AtLeast0
    """Least time between steps: the host prepares one while the device computes the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """A captured size of the vision encoder."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    slots: Count
    items: Count
    graph_s: Above
    """Of a replay, without what grows with pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerPoint:
    """An eager pass of the vision encoder."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    slots: Count
    seconds: Above
    """Without what grows with pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRates:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    budgets: tuple[BudgetPoint, ...]
    eager: Annotated[tuple[EagerPoint, ...], Field(min_length=1)]
    pair_s: AtLeast0
    """Of two patches that see each other, in the layers over whole frames."""
    pass_overhead_s: AtLeast0
    """What a pass takes on top, from pixels in host memory to rows in host memory."""
    graph_bytes: AtLeast0
    """Device memory of all captured sizes."""
    fixed_bytes: AtLeast0
    bytes_per_patch: AtLeast0
    """Activations of a pass: `fixed_bytes + bytes_per_patch * patches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    receive_s: AtLeast0
    """Until the ingress has read, checked and admitted a request."""
    request_cpu_s: AtLeast0
    """Of the preprocessor for each request: tokenizing, reading and hashing what it brings."""
    cpu_s_per_megapixel: AtLeast0
    """Decoding and resizing a picture, by its size before resizing."""
    call_s: AtLeast0
    """From one stage to another and back, without payload."""
    payload_bytes_per_s: Above
    """Through the object store: put by one process, read by another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where figures come from."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    part: str
    file: str
    machine: str
    date: str
    command: str
    commit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Everything that was measured of one model on one kind of GPU."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    format: Literal["sightline-rates/1"] = "sightline-rates/1"
    device: str
    gpu_memory_gib: Above
    model: str
    """Name of the measured model."""
    config: Mapping[str, Any]
    """Its config.json: the sizes that the rates belong to."""
    engine: EngineRates
    encoder: EncoderRates
    host: HostRates
    sources: tuple[Source, ...] = ()


def parse_rates(values: object, name: str) -> Rates:
    """Rates from JSON values.

    Args:
        name: Of the file, for messages.

    Raises:
        PlanError: Naming every field that is missing, unknown or out of range.
    """
    try:
        return TypeAdapter(Rates).validate_python(values)
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, found['loc'])) or 'the file'}: {found['msg']}, got {_short(found.get('input'))}"
            for found in error.errors(include_url=False)
        )
        raise PlanError(f"rates {name}: " + "; ".join(lines)) from None


def read_rates(path: Path) -> Rates:
    """Raises PlanError: The file cannot be read, or see parse_rates."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"rates {path}: {error}") from None
    return parse_rates(values, str(path))


def write_rates(rates: Rates, path: Path) -> None:
    path.write_text(json.dumps(asdict(rates), indent=1) + "\n", encoding="utf-8")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
