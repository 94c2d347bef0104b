"""What the API needs to know about the served model and its operator's choices; plain data, built by the root."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from app.limits import EdgeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Used where a request is silent: the checkpoint's generation_config.json, or OpenAI's defaults."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass, over 0 and up to 1."""
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """Least probability relative to the best token's."""
    repetition_penalty: float = 1.0
    """Over 0; 1 is none."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 2, "temperature", self.temperature, "0 to 2")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "over 0 and up to 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1, 0 or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "over 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    served_model_name: tuple[str, ...]
    """Names under which the model is served; the first one stands in answers."""
    max_model_len: int
    """Context length in tokens, prompt and answer together."""
    vocab_size: int
    """Token ids from a caller must be below it."""
    created_s: int = 0
    """Unix time shown as `created` by /v1/models."""
    version: str = "0"
    """Shown by /version."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """For what a request leaves out."""
    limits: EdgeLimits = field(default_factory=EdgeLimits)
    """Sizes and counts of one request."""
    tool_call_parser: Literal["hermes"] | None = "hermes"
    """Form in which the model writes tool calls; None refuses `tools`."""
    request_timeout_s: float = 600.0
    """Deadline of a request from its arrival; then 504, or an error event in a stream that has begun."""
    keep_alive_s: float = 15.0
    """A comment is written to a stream that is silent for so long; 0 writes none."""
    cors_allow_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; empty leaves CORS off."""
    enable_operator_routes: bool = False
    """Whether POST /reset_prefix_cache exists."""
    operator_tenants: frozenset[str] = frozenset({"open"})
    """Tenants that may use the operators' routes; `open` is everybody on a server without keys."""

    def __post_init__(self) -> None:
        _require(
            bool(self.served_model_name) and all(self.served_model_name),
            "served_model_name",
            self.served_model_name,
            "at least one name",
        )
        _require(self.max_model_len >= 2, "max_model_len", self.max_model_len, "2 or more")
        _require(self.vocab_size >= 1, "vocab_size", self.vocab_size, "1 or more")
        _require(self.request_timeout_s > 0, "request_timeout_s", self.request_timeout_s, "over 0")
        _require(self.keep_alive_s >= 0, "keep_alive_s", self.keep_alive_s, "0 or more")

    @property
    def model(self) -> str:
        return self.served_model_name[0]


def _require(good: bool, option: str, value: object, allowed: str) -> None:
    if not good:
        raise ValueError(f"{option} is {value!r}; allowed: {allowed}")
