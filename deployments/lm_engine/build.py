"""Puts the engine together from a model folder. The only place here that chooses implementations and sizes the pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from cache_service.identity import EncoderFingerprint
from deployments.lm_engine.async_engine import AsyncEngine
from deployments.lm_engine.attention import AttentionBackend
from deployments.lm_engine.config import EngineConfig, ModelLimits, SchedulerConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.engine import Encodes, Engine
from deployments.lm_engine.grammar import GrammarCompiler
from deployments.lm_engine.kernel_choice import MakeBackend, choose_attention, choose_row_ops
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.model_runner import DecodeReplay, ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan
from deployments.lm_engine.sampler import Sampler
from deployments.lm_engine.scheduler import Scheduler
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
) -> AsyncEngine:
    """An engine for the model in `folder`, loaded and not yet started.

    Args:
        fingerprint: Of the encoder behind `encoder`.
        max_item_slots, max_item_patches: The worst-case item the preprocessor lets through.

    Raises:
        CheckpointError: The folder cannot be used.
        ValueError: The options do not fit the model or the device's memory.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    model = load_model(config, folder, dtype, device)
    layout = model.kv_layout(config.block_size)
    make_backend = choose_attention(config.attention_backend, layout, model.num_heads, device)
    max_model_len = config.max_model_len or model.max_position_embeddings
    limits = ModelLimits(
        max_model_len=model.max_position_embeddings,
        num_blocks=config.num_kv_blocks(layout.bytes_per_block, _free_bytes(config, model, make_backend, device)),
        # A larger item than the context holds is refused by its length.
        max_item_slots=min(max_item_slots, max_model_len),
        max_item_patches=max_item_patches,
    )
    resolved = config.resolve(limits)
    kv = KVTensors(layout, limits.num_blocks, device)
    backend = make_backend(kv)
    decodes = capture_decodes(config, model, backend, resolved.max_model_len)
    logger.info(
        "LM engine: %s on %s, %d KV blocks of %d tokens (%.1f GiB), %d embedding slots",
        dtype, device, limits.num_blocks, config.block_size, kv.num_bytes / 2**30, resolved.encoder_cache_slots,
    )  # fmt: skip
    tokenizer = load_tokenizer(folder)
    eos = eos_token_ids(folder, tokenizer)
    return AsyncEngine(
        _engine_maker(config, resolved, model, backend, decodes, TokenDecoder(tokenizer), fingerprint, eos),
        encoder,
        store,
        embed_width=model.embed_width,
        grammars=GrammarCompiler(tokenizer.to_str(), model.vocab_size, eos),
    )


def pick_device(option: str) -> torch.device:
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(option)


def pick_dtype(option: str, device: torch.device) -> torch.dtype:
    if option == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[option]


def load_model(config: EngineConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """The model, with fused layers where the options, the device and the architecture allow them."""
    model = load_language_model(folder, dtype=dtype, device=device, load_format=config.load_format)
    ops = choose_row_ops(model.hidden_size, dtype, device) if config.fuse_layers else None
    if ops is not None:
        logger.info("LM layers: %s", "fused" if model.fuse(ops) else "the library's own, for this architecture")
    return model


def capture_decodes(
    config: EngineConfig, model: LanguageModel, backend: AttentionBackend, max_model_len: int
) -> DecodeReplay | None:
    """Decode graphs; None where the device or the attention backend has none, or recording them fails."""
    if config.enforce_eager or model.device.type != "cuda" or backend.name != "triton":
        return None
    from deployments.lm_engine.decode_graphs import DecodeGraphs
    from deployments.lm_engine.triton_attention import TritonBackend

    assert isinstance(backend, TritonBackend)
    graphs = DecodeGraphs(
        model,
        backend,
        config.graph_sizes,
        block_size=config.block_size,
        max_blocks=-(-max_model_len // config.block_size),
    )
    try:
        graphs.prepare()
    except Exception as exc:  # a library's forward pass that waits for the device cannot be recorded
        logger.warning("LM decode: eager, since recording graphs failed: %s: %s", type(exc).__name__, exc)
        return None
    return graphs


def _engine_maker(
    config: EngineConfig,
    resolved: SchedulerConfig,
    model: LanguageModel,
    backend: AttentionBackend,
    decodes: DecodeReplay | None,
    decoder: TokenDecoder,
    fingerprint: EncoderFingerprint,
    eos: tuple[int, ...],
) -> Callable[[Encodes], Engine]:
    def make(encodes: Encodes) -> Engine:
        return Engine(
            make_scheduler=lambda: Scheduler(resolved),
            runner=ModelRunner(model, backend, EmbedStore(), decodes),
            sampler=Sampler(seed=config.seed, device=model.device),
            encodes=encodes,
            decoder=decoder,
            position_rule=model.position_rule,
            fingerprint=fingerprint,
            eos_token_ids=eos,
        )

    return make


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
