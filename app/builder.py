"""The composition root: from arguments to a bound Serve application. Nothing else in the project knows all parts.

    serve run serve_configs/dev.yaml     ──▶ `import_path: app:build`, `args:` ──▶ build(args)

Replica counts, CPUs and GPUs are Serve's own options: they stand in the config file's `deployments:` and win over the
defaults bound here.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application

from app.config import AppConfig, ConfigError
from app.deployment import Ingress, IngressOptions
from app.model_card import ModelCard, read_model_card
from app.settings import ApiSettings
from cache_service.identity import EncoderFingerprint
from deployments.checkpoint import read_json, resolve_model, weights_revision
from deployments.colocated import ColocatedLMEngine
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.deployment import EngineOptions, LMEngine
from deployments.lm_engine.tensor_parallel.shards import DecoderShape, Shards
from deployments.preprocessor.build import worst_case_item
from deployments.preprocessor.deployment import Preprocessor
from deployments.tracing import check_tracing
from deployments.vision_encoder.config import ENCODER_REVISION
from deployments.vision_encoder.deployment import EncoderOptions, VisionEncoder

# Streams are long and cheap to hold; the stages' own queues refuse what is too much, with a proper error. Serve's
# limit only has to be out of the way.
MAX_ONGOING_REQUESTS = 4096

DRAIN_MARGIN_S = 10.0

# Of the bundles of a tensor-parallel engine. What `ray_actor_options` of the replica asks for must fit the first.
LEADER_CPUS = 2.0
RANK_CPUS = 1.0

AFFINITY_ROUTER = "deployments.request_router:AffinityRouter"
# Below `min_bound` calls a replica is never passed over, so that a quiet cluster keeps pictures and prefixes together.
# Serve takes the import path too, as its documentation says; only the annotation does not.
ENCODER_ROUTER = RequestRouterConfig(
    request_router_class=AFFINITY_ROUTER,  # type: ignore[arg-type]
    request_router_kwargs={"min_bound": 8},
)
ENGINE_ROUTER = RequestRouterConfig(
    request_router_class=AFFINITY_ROUTER,  # type: ignore[arg-type]
    request_router_kwargs={"min_bound": 16},
)


def build(args: dict[str, Any]) -> Application:
    """The application for a config file's `args:`.

    Raises:
        ConfigError: An option is unknown or wrong; the message names it, its value and what is allowed.
    """
    config = AppConfig.parse(args)
    _check_telemetry(config)
    folder = resolve_model(config.model, config.revision, config_only=True)
    card = read_model_card(folder, config.served_model_name or Path(config.model).name)
    slots, patches = worst_case_item(config.preprocessor, folder)
    _check_worst_case(config, slots, patches)
    config = _with_dtype(_absolute(config, folder), card)
    _check_quantization(config)
    _check_transfer(config)
    _check_tensor_parallel(config.lm_engine.tensor_parallel_size, folder)
    fingerprint = encoder_fingerprint(config, folder)
    redis = config.cache.resolve(os.environ)
    preprocessor = _deployment(Preprocessor).bind(
        config.preprocessor, config.model, config.revision, config.telemetry, redis
    )
    encoder_options = EncoderOptions(
        config=config.vision_encoder,
        fingerprint=fingerprint,
        telemetry=config.telemetry,
        redis=redis,
        transfer=config.embedding_transfer,
    )
    engine_options = EngineOptions(
        config=config.lm_engine,
        fingerprint=fingerprint,
        telemetry=config.telemetry,
        max_item_slots=slots,
        max_item_patches=patches,
        transfer=config.embedding_transfer,
    )
    # These two hold streams, and a replica that leaves lets them finish.
    drain_s = config.server.request_timeout_s + DRAIN_MARGIN_S
    others: dict[str, Application] = {}
    engine_class = _deployment(
        ColocatedLMEngine if config.encoder_placement == "colocated" else LMEngine,
        name="LMEngine",
        request_router_config=ENGINE_ROUTER,
        graceful_shutdown_timeout_s=drain_s,
        **_gang_options(config.lm_engine),
    )
    if config.encoder_placement == "colocated":
        engine = engine_class.bind(engine_options, encoder_options, preprocessor)
    else:
        encoder_class = _deployment(VisionEncoder, request_router_config=ENCODER_ROUTER)
        others["VisionEncoder"] = encoder_class.bind(encoder_options, preprocessor)
        engine = engine_class.bind(engine_options, others["VisionEncoder"])
    ingress = _deployment(serve.ingress()(Ingress), name="Ingress", graceful_shutdown_timeout_s=drain_s)
    return ingress.bind(_ingress_options(config, card), preprocessor, engine, others)


def encoder_fingerprint(config: AppConfig, folder: Path) -> EncoderFingerprint:
    """Of the encoder that a configuration with a decided `dtype` serves."""
    return EncoderFingerprint(
        model_id=config.model,
        weights_revision=weights_revision(folder, config.load_format),
        dtype=config.vision_encoder.dtype,
        quantization=config.vision_encoder.quantization or "",
        encoder_revision=ENCODER_REVISION,
    )


def _deployment(cls: type, name: str | None = None, **options: Any) -> Any:
    return serve.deployment(
        cls,
        name=name or cls.__name__,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        **options,
    )


def _check_telemetry(config: AppConfig) -> None:
    try:
        check_tracing(config.telemetry)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_worst_case(config: AppConfig, slots: int, patches: int) -> None:
    """Every picture that the preprocessor lets through must fit the encoder, or it would be refused much later."""
    encoder = config.vision_encoder
    for name, needed in (("max_batch_patches", patches), ("max_batch_slots", slots)):
        if getattr(encoder, name) < needed:
            raise ConfigError(
                f"vision_encoder.{name} is {getattr(encoder, name)}, but the largest picture needs {needed}; raise it, "
                "or lower mm_processor_kwargs.max_pixels"
            )


def _check_quantization(config: AppConfig) -> None:
    """A stage without a GPU, or in another precision, would find out only after its replica has started."""
    for section in ("vision_encoder", "lm_engine"):
        stage = getattr(config, section)
        if stage.quantization and (stage.dtype != "bfloat16" or stage.device == "cpu"):
            raise ConfigError(
                f"{section}.quantization is {stage.quantization!r}, which needs a GPU and dtype bfloat16; device is "
                f"{stage.device!r} and dtype {stage.dtype!r}"
            )


def _check_transfer(config: AppConfig) -> None:
    """What only a replica can find out, such as an absent package, stops that replica; see direct_store.py."""
    transfer, encoder = config.embedding_transfer, config.vision_encoder
    if transfer == "object_store":
        return
    if config.encoder_placement == "colocated":
        raise ConfigError(
            f"embedding_transfer is {transfer!r}, but encoder_placement is 'colocated': embeddings stay in the replica"
        )
    if transfer == "cuda_ipc":
        for section in ("vision_encoder", "lm_engine"):
            if getattr(config, section).device == "cpu":
                raise ConfigError(f"embedding_transfer is 'cuda_ipc', but {section}.device is 'cpu'")
        if encoder.data_parallel_size > 1:
            raise ConfigError(
                f"embedding_transfer is 'cuda_ipc', but vision_encoder.data_parallel_size is"
                f" {encoder.data_parallel_size}; allowed: 1"
            )


def _check_tensor_parallel(size: int, folder: Path) -> None:
    """Replicas would find out only after their processes have started."""
    options = read_json(folder, "config.json")
    text = options.get("text_config", options)
    if size > 1 and "num_attention_heads" in text:
        try:
            Shards(DecoderShape.of(text), 0, size)
        except ValueError as error:
            raise ConfigError(f"lm_engine.{error}") from None


def _gang_options(engine: EngineConfig) -> dict[str, Any]:
    """A bundle for each rank of the engine, all on one node: ranks add up their sums twice a layer."""
    if engine.tensor_parallel_size == 1:
        return {}
    gpu = {"GPU": 1.0} if engine.device == "cuda" or (engine.device == "auto" and _has_gpu()) else {}
    cpus = [LEADER_CPUS] + [RANK_CPUS] * (engine.tensor_parallel_size - 1)
    return {
        "ray_actor_options": {"num_cpus": LEADER_CPUS, "num_gpus": gpu.get("GPU", 0)},
        "placement_group_bundles": [{"CPU": amount, **gpu} for amount in cpus],
        "placement_group_strategy": "STRICT_PACK",
    }


def _absolute(config: AppConfig, folder: Path) -> AppConfig:
    """The same configuration with a model folder that means the same in every replica's working directory."""
    if not Path(config.model).expanduser().is_dir():
        return config
    model = str(folder.resolve())
    return replace(
        config,
        model=model,
        vision_encoder=replace(config.vision_encoder, model=model),
        lm_engine=replace(config.lm_engine, model=model),
    )


def _with_dtype(config: AppConfig, card: ModelCard) -> AppConfig:
    """`auto` decided once for the whole application: replicas that chose by their own device would not agree, and the
    encoder's precision is part of every embedding's key."""
    dtype = card.dtype if _has_gpu() else "float32"
    encoder, engine = config.vision_encoder, config.lm_engine
    return replace(
        config,
        vision_encoder=replace(encoder, dtype=dtype) if encoder.dtype == "auto" else encoder,
        lm_engine=replace(engine, dtype=dtype) if engine.dtype == "auto" else engine,
    )


def _has_gpu() -> bool:
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0


def _ingress_options(config: AppConfig, card: ModelCard) -> IngressOptions:
    server = config.server
    limits: Mapping[str, Any] = (
        {"limit_mm_per_prompt": config.limit_mm_per_prompt} if config.limit_mm_per_prompt else {}
    )
    return IngressOptions(
        settings=ApiSettings(
            served_model_name=(card.name,),
            max_model_len=min(config.lm_engine.max_model_len or card.max_model_len, card.max_model_len),
            vocab_size=card.vocab_size,
            created_s=card.created_s,
            version=_version(),
            sampling_defaults=card.sampling_defaults,
            limits=replace(server.limits, **limits),
            tool_call_parser=server.tool_call_parser,
            request_timeout_s=server.request_timeout_s,
            keep_alive_s=server.keep_alive_s,
            cors_allow_origins=server.cors_allow_origins,
            enable_operator_routes=server.enable_operator_routes,
        ),
        admission=server.admission,
        api_keys_file=server.api_keys_file,
        status_page=server.status_page,
        telemetry=config.telemetry,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("sightline")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree, as a Ray `working_dir` is
        return "0+source"
