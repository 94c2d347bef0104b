"""The application's arguments, as `args:` of a Serve config file gives them: typed, merged, validated.

One section per stage holds that stage's own config dataclass. What several stages must agree on (model, revision,
dtype, load format, context length, items per prompt) stands once at the top and flows into the sections; a section may
override it where a stage really differs. An unknown or wrong option stops the start with its name, value and what is
allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from app.admission import AdmissionConfig
from app.limits import EdgeLimits
from cache_service.redis_config import RedisTierConfig
from deployments.lm_engine.config import EngineConfig
from deployments.ports import EmbeddingTransfer
from deployments.preprocessor.config import PreprocessorConfig
from deployments.telemetry_config import TelemetryConfig
from deployments.vision_encoder.config import EncoderConfig

Placement = Literal["deployment", "colocated"]

SHARED = ("model", "revision", "load_format", "dtype", "max_model_len", "limit_mm_per_prompt", "mm_processor_kwargs")
"""Top-level options copied into every section that has a field of that name and does not set it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP edge."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    limits: EdgeLimits = field(default_factory=EdgeLimits)
    """Sizes and counts of one request."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Requests at work and waiting, per ingress replica."""
    request_timeout_s: float = 600.0
    """Deadline of a request from its arrival; then 504, or an error event in a stream that has begun."""
    keep_alive_s: float = 15.0
    """A comment is written to a stream that is silent for so long; 0 writes none."""
    cors_allow_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; empty leaves CORS off."""
    enable_operator_routes: bool = False
    """Whether POST /reset_prefix_cache exists."""
    tool_call_parser: Literal["hermes"] | None = "hermes"
    """Form in which the model writes tool calls; None refuses `tools`."""
    api_keys_file: str | None = None
    """YAML or JSON file of tenants and their hashed keys; without it and without the environment variable
    SIGHTLINE_API_KEYS the server is open to all, and says so at start."""
    status_page: bool = True
    """Whether GET / shows a page to try the server by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Tiers shared by replicas. Each replica's own memory caches are options of its stage."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    redis: RedisTierConfig | None = None
    """Shared tier; None takes the URL from the environment variable `redis_url_env`, or goes without."""
    redis_url_env: str = "SIGHTLINE_REDIS_URL"
    """Environment variable with the shared tier's URL, so that a password need not stand in a file."""

    def resolve(self, environment: Mapping[str, str]) -> RedisTierConfig | None:
        """The shared tier's options, or None for no shared tier."""
        if self.redis is not None:
            return self.redis
        url = environment.get(self.redis_url_env, "")
        return RedisTierConfig(url=url) if url else None


SECTIONS: dict[str, type] = {
    "server": ServerConfig,
    "preprocessor": PreprocessorConfig,
    "vision_encoder": EncoderConfig,
    "lm_engine": EngineConfig,
    "cache": CacheConfig,
    "telemetry": TelemetryConfig,
}


class ConfigError(ValueError):
    """Start-up arguments are wrong. The message lists every problem, one a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Everything `app:build` needs. Build it with `AppConfig.parse`."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: str
    """Folder or hub id of the checkpoint."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    served_model_name: str | None = None
    """Name in the API; the model's own name if None."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` starts with random weights, for benchmarks."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    max_model_len: int | None = None
    """Context length in tokens; the model's own if None."""
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Most items of each modality in a prompt."""
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for every picture, such as min_pixels and max_pixels."""
    encoder_placement: Placement = "deployment"
    """`deployment`: an autoscaled vision encoder of its own; `colocated`: inside each LM engine replica."""
    embedding_transfer: EmbeddingTransfer = "object_store"
    """Embeddings' way from encoder to engine. `object_store` works everywhere. `nixl` reads the encoder's memory from
    the engine, over NVLink, InfiniBand or TCP, and needs the package nixl in both. `cuda_ipc` maps it, and needs both
    on one GPU (`num_gpus` below 1 for each). With these two, both alpha in Ray, embeddings stay on the encoder's device
    and its `cache_bytes` are memory of that. A colocated encoder has `object_store` only, and moves nothing."""
    server: ServerConfig
    preprocessor: PreprocessorConfig
    vision_encoder: EncoderConfig
    lm_engine: EngineConfig
    cache: CacheConfig
    telemetry: TelemetryConfig

    @classmethod
    def parse(cls, args: Mapping[str, Any]) -> AppConfig:
        """Validated configuration from plain YAML values.

        Raises:
            ConfigError: Naming each wrong option, the value given and what is allowed.
        """
        merged = dict(args)
        for section, kind in SECTIONS.items():
            values = merged.get(section)
            if values is not None and not isinstance(values, Mapping):
                raise ConfigError(f"{section}: expected a mapping of options, got {values!r}")
            merged[section] = {**_shared_values(args, kind), **(values or {})}
        try:
            return TypeAdapter(cls).validate_python(merged)
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
            # A missing shared option is reported once, not again by every section that would have taken it.
            own = [error for error in errors if len(error["loc"]) == 1 or error["loc"][-1] not in SHARED] or errors
            raise ConfigError("\n".join(_explain(error) for error in own)) from None


def _shared_values(args: Mapping[str, Any], kind: type) -> dict[str, Any]:
    names = _field_names(kind)
    return {name: args[name] for name in SHARED if name in args and name in names}


def _field_names(kind: type) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)}


def _explain(error: Any) -> str:
    """One plain line for one of pydantic's errors."""
    path = [str(part) for part in error["loc"]]
    name, value = ".".join(path), error.get("input")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        kind = SECTIONS.get(path[0], AppConfig) if len(path) > 1 else AppConfig
        allowed = sorted(_field_names(kind))
        close = difflib.get_close_matches(path[-1], allowed, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{name}: unknown option with value {value!r}{hint}; allowed: {', '.join(allowed)}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{name}: required option is missing"
    if error["type"] == "value_error":
        # The config class names option and value itself; the whole section is not shown, since it may hold a password.
        return f"{name}: {error['ctx']['error']}"
    return f"{name}: {error['msg']}, got {value!r}"
