"""Puts the engine together from a model folder. The only place here that chooses implementations and sizes the pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache_service.identity import EncoderFingerprint
from deployments.fp8 import Fp8Ops, choose_fp8
from deployments.lm_engine.async_engine import AsyncEngine
from deployments.lm_engine.attention import AttentionBackend
from deployments.lm_engine.config import EngineConfig, ModelLimits, SchedulerConfig
from deployments.lm_engine.embed_pool import EmbedPool
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.embed_upload import EmbedUploader, pool_bytes
from deployments.lm_engine.engine import Encodes, Engine
from deployments.lm_engine.grammar import GrammarCompiler
from deployments.lm_engine.kernel_choice import MakeBackend, choose_attention, choose_row_ops
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.model_runner import DecodeReplay, MixedReplay, ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan
from deployments.lm_engine.sampler import Sampler
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.tensor_parallel.group import TensorParallelGroup
from deployments.lm_engine.tensor_parallel.leader import CheckedSampler, Leader, LeaderRunner
from deployments.lm_engine.tokenizer import TokenDecoder, eos_token_ids, load_tokenizer
from deployments.ports import ObjectStore, VisionEncoder

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 4 << 30
"""KV pool on a CPU unless an option says otherwise; never more than a quarter of the memory that is free."""


def build_engine(
    config: EngineConfig,
    folder: Path,
    *,
    encoder: VisionEncoder,
    store: ObjectStore,
    fingerprint: EncoderFingerprint,
    max_item_slots: int,
    max_item_patches: int,
    leader: Leader | None = None,
) -> AsyncEngine:
    """An engine for the model in `folder`, loaded and not yet started.

    Args:
        leader: The other ranks if `tensor_parallel_size` is above 1; they must be building their device side, too.
        fingerprint: Of the encoder behind `encoder`.
        max_item_slots, max_item_patches: The worst-case item the preprocessor lets through.

    Raises:
        CheckpointError: The folder cannot be used.
        ValueError: The options do not fit the model or the device's memory.
    """
    side = build_device_side(config, folder, None if leader is None else leader.group)
    model = side.model
    limits = ModelLimits(
        max_model_len=model.max_position_embeddings,
        num_blocks=side.num_blocks,
        # A larger item than the context holds is refused by its length.
        max_item_slots=min(max_item_slots, config.max_model_len or model.max_position_embeddings),
        max_item_patches=max_item_patches,
    )
    resolved = config.resolve(limits)
    logger.info("LM engine: %d embedding slots", resolved.encoder_cache_slots)
    tokenizer = load_tokenizer(folder)
    eos = eos_token_ids(folder, tokenizer)
    if leader is not None:
        leader.start()
    return AsyncEngine(
        _engine_maker(config, resolved, side, leader, TokenDecoder(tokenizer), fingerprint, eos),
        encoder,
        store,
        _uploader(config, limits, model, fingerprint),
        embed_width=model.embed_width,
        grammars=GrammarCompiler(tokenizer.to_str(), model.vocab_size, eos),
        on_thread_start=lambda: _prefer_this_thread(model.device),
    )


def _uploader(
    config: EngineConfig, limits: ModelLimits, model: LanguageModel, fingerprint: EncoderFingerprint
) -> EmbedUploader:
    num_bytes = pool_bytes(
        config.embed_pool_bytes,
        max_item_slots=limits.max_item_slots,
        width=model.embed_width,
        itemsize=pick_dtype(fingerprint.dtype, model.device).itemsize,
    )
    logger.info("LM engine: %.0f MiB of host memory for embeddings on their way", num_bytes / 2**20)
    return EmbedUploader(EmbedPool(num_bytes, ttl_s=config.embed_pool_ttl_s), model.device, model.dtype)


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """What runs steps on one device."""

    model: LanguageModel
    backend: AttentionBackend
    decodes: DecodeReplay | None
    mixed: MixedReplay | None
    num_blocks: int
    """KV blocks, the same on every rank."""


def build_device_side(config: EngineConfig, folder: Path, group: TensorParallelGroup | None = None) -> DeviceSide:
    """The model, its KV pool and its decode graphs on this process's device.

    Args:
        group: Of which this is one rank. All ranks must be here at the same time: the largest step and the graphs'
            warm-up need them all.

    Raises:
        CheckpointError: The folder cannot be used.
        ValueError: The options do not fit the model or the device's memory.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    model = load_model(config, folder, dtype, device, group=group)
    layout = model.kv_layout(config.block_size)
    make_backend = choose_attention(config.attention_backend, layout, model.num_heads, device)
    if group is not None:
        group.minimum(0)  # one rank may load for minutes longer than another, and a collective waits less
    num_blocks = config.num_kv_blocks(layout.bytes_per_block, _free_bytes(config, model, make_backend, device))
    if group is not None:
        num_blocks = group.minimum(num_blocks)
    kv = KVTensors(layout, num_blocks, device)
    backend = make_backend(kv)
    max_model_len = config.max_model_len or model.max_position_embeddings
    decodes = capture_decodes(config, model, backend, max_model_len)
    mixed = capture_mixed(config, model, backend, max_model_len)
    if group is not None and not group.minimum(decodes is not None):
        decodes = None  # a rank that pads its batch and one that does not would exchange sums of other shapes
    logger.info(
        "LM engine: %s on %s, %d KV blocks of %d tokens (%.1f GiB)",
        dtype, device, num_blocks, config.block_size, kv.num_bytes / 2**30,
    )  # fmt: skip
    return DeviceSide(model, backend, decodes, mixed, num_blocks)


def pick_device(option: str) -> torch.device:
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(option)


def pick_dtype(option: str, device: torch.device) -> torch.dtype:
    if option == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[option]


def load_model(
    config: EngineConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    fp8: Fp8Ops | None = None,
    group: TensorParallelGroup | None = None,
) -> LanguageModel:
    """The model, with fused layers where the options, the device and the architecture allow them.

    Args:
        fp8: What `quantization: fp8` computes with; what the device has if None.
        group: Ranks over which the model is spread.

    Raises:
        CheckpointError: The folder cannot be used.
        ValueError: The device cannot honour `quantization`.
    """
    if config.quantization and fp8 is None:
        fp8 = choose_fp8(dtype, device)
    model = load_language_model(folder, dtype=dtype, device=device, load_format=config.load_format, group=group)
    ops = choose_row_ops(model.hidden_size, dtype, device) if config.fuse_layers else None
    if ops is not None:
        logger.info("LM layers: %s", "fused" if model.fuse(ops) else "the library's own, for this architecture")
    if config.quantization and fp8 is not None:
        logger.info("LM products: %d in fp8 (%s)", model.quantize(fp8), fp8.name)
    return model


def capture_decodes(
    config: EngineConfig, model: LanguageModel, backend: AttentionBackend, max_model_len: int
) -> DecodeReplay | None:
    """Decode graphs; None where the device or the attention backend has none, or recording them fails."""
    if not _records_graphs(config, model, backend):
        return None
    from deployments.lm_engine.decode_graphs import DecodeGraphs

    return _recorded(DecodeGraphs, "decode", config, model, backend, config.graph_sizes, max_model_len)


def capture_mixed(
    config: EngineConfig, model: LanguageModel, backend: AttentionBackend, max_model_len: int
) -> MixedReplay | None:
    """Graphs of small steps that prefill; None as for `capture_decodes`, and where the model is spread over devices."""
    if not _records_graphs(config, model, backend) or config.tensor_parallel_size > 1:
        return None
    from deployments.lm_engine.mixed_graphs import MixedGraphs

    return _recorded(MixedGraphs, "mixed", config, model, backend, config.mixed_graph_sizes, max_model_len)


def _records_graphs(config: EngineConfig, model: LanguageModel, backend: AttentionBackend) -> bool:
    return not config.enforce_eager and model.device.type == "cuda" and backend.name == "triton"


def _recorded(
    kind: Any,
    what: str,
    config: EngineConfig,
    model: LanguageModel,
    backend: AttentionBackend,
    sizes: tuple[int, ...],
    max_model_len: int,
) -> Any:
    """Graphs of a kind, recorded; None if that fails."""
    try:
        graphs = kind(
            model,
            backend,
            sizes,
            block_size=config.block_size,
            max_blocks=-(-max_model_len // config.block_size),
        )
        graphs.prepare()
    except Exception as exc:  # a library's forward pass that waits for the device cannot be recorded
        logger.warning("LM %s steps: eager, since recording graphs failed: %s: %s", what, type(exc).__name__, exc)
        return None
    return graphs


def _engine_maker(
    config: EngineConfig,
    resolved: SchedulerConfig,
    side: DeviceSide,
    leader: Leader | None,
    decoder: TokenDecoder,
    fingerprint: EncoderFingerprint,
    eos: tuple[int, ...],
) -> Callable[[Encodes], Engine]:
    model, parts = side.model, (side.model, side.backend, EmbedStore(), side.decodes, side.mixed)

    def make(encodes: Encodes) -> Engine:
        if leader is None:
            runner, sampler = ModelRunner(*parts), Sampler(seed=config.seed, device=model.device)
        else:
            # Twice what can run: a sequence that waits in between keeps its block table.
            runner = LeaderRunner(*parts, leader=leader, max_tables=2 * config.max_num_seqs)
            sampler = CheckedSampler(leader=leader, seed=config.seed, device=model.device)
        return Engine(
            make_scheduler=lambda: Scheduler(resolved),
            runner=runner,
            sampler=sampler,
            encodes=encodes,
            decoder=decoder,
            position_rule=model.position_rule,
            fingerprint=fingerprint,
            eos_token_ids=eos,
            overlap=_overlaps(config, model.device),
        )

    return make


def _prefer_this_thread(device: torch.device) -> None:
    """Let the calling thread's work go before other streams' on the device: an encoder in the same process computes for
    long, and takes what decode steps, which wait for memory, leave of the processors."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)  # weights and pools were made on another stream
    torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))


def _overlaps(config: EngineConfig, device: torch.device) -> bool:
    if config.async_scheduling is None:
        return device.type == "cuda"
    return config.async_scheduling


def _free_bytes(config: EngineConfig, model: LanguageModel, make_backend: MakeBackend, device: torch.device) -> int:
    """Bytes the KV pool may take beside weights and the largest step."""
    if device.type != "cuda":
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(CPU_KV_BYTES, available // 4)
    peak = _peak_step_bytes(config, model, make_backend, device)
    free, total = torch.cuda.mem_get_info(device)
    # What others hold on this device can't be had, whatever the option says.
    obtainable = free + torch.cuda.memory_reserved(device)
    return min(int(total * config.gpu_memory_utilization), obtainable) - peak


def _peak_step_bytes(
    config: EngineConfig, model: LanguageModel, make_backend: MakeBackend, device: torch.device
) -> int:
    """Device memory in use at the height of the largest step, weights included: measured by running one."""
    num_tokens = min(config.max_num_batched_tokens, config.max_model_len or model.max_position_embeddings)
    num_blocks = -(-num_tokens // config.block_size)
    kv = KVTensors(model.kv_layout(config.block_size), num_blocks, device)
    chunk = SequenceChunk(
        "profile", 0, (0,) * num_tokens, model.position_rule.positions(num_tokens, ()).slice(0, num_tokens),
        range(num_blocks), True,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats(device)
    ModelRunner(model, make_backend(kv), EmbedStore()).run(StepPlan(chunks=(chunk,)))
    torch.cuda.synchronize(device)
    # A step samples for up to max_num_seqs sequences, in the model's precision, as float32 and in the sampler's copy.
    logits_bytes = config.max_num_seqs * model.vocab_size * (4 + 4 + model.dtype.itemsize)
    peak = torch.cuda.max_memory_allocated(device) - kv.num_bytes + logits_bytes
    del kv
    torch.cuda.empty_cache()
    return peak
