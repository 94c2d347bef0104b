"""Options of the LM engine, and what the scheduler makes of them once the model's limits are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from deployments.hedging import HedgingConfig

LoadFormat = Literal["auto", "safetensors", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
AttentionBackend = Literal["auto", "sdpa", "triton"]
Quantization = Literal["fp8"]

WATERMARK_FRACTION = 0.01
"""Share of the KV blocks kept free for the growth of running sequences when another one is admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the loaded model and the device allow; known only after start-up has looked at both."""

    max_model_len: int
    """Longest sequence the model was made for, in tokens."""
    num_blocks: int
    """KV blocks that fit the device (see `EngineConfig.num_kv_blocks`)."""
    max_item_slots: int = 0
    """Rows of encoder output of the worst-case item; 0 for a model without an encoder."""
    max_item_patches: int = 0
    """Input patches of the worst-case item; 0 for a model without an encoder."""

    def __post_init__(self) -> None:
        _at_least(self.max_model_len, 1, "max_model_len")
        _at_least(self.num_blocks, 1, "num_blocks")
        _at_least(self.max_item_slots, 0, "max_item_slots")
        _at_least(self.max_item_patches, 0, "max_item_patches")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Every number the scheduler works with; nothing left to be guessed."""

    max_num_batched_tokens: int
    """Tokens of one step, over all sequences."""
    max_num_seqs: int
    """Sequences that may run at once, those waiting for an embedding included."""
    max_prefill_tokens_while_decoding: int = 0
    """Prefill tokens of a step that also decodes; 0 means no limit of its own."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    block_size: int
    """Token positions of one KV block."""
    num_blocks: int
    """KV blocks of the pool."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes."""
    disable_chunked_mm_input: bool = False
    """End a chunk before an item instead of inside it."""
    encoder_cache_slots: int = 0
    """Embedding slots: rows of encoder output that may be resident or on their way."""
    max_encoder_slots_per_step: int = 0
    """Slots of the encodes that one step may start."""
    max_encoder_patches_per_step: int = 0
    """Input patches of the encodes that one step may start; peak memory follows these."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Order inside a tenant's queue and among running sequences."""
    priority_aging_s: float = 60.0
    """Seconds of waiting that outweigh one level of priority; 0 never does."""
    max_queued_requests: int = 0
    """Waiting sequences beyond which requests are refused; 0 means no limit."""
    max_queue_s: float = 0.0
    """Longest wait for the first step; 0 means no limit."""
    request_timeout_s: float = 0.0
    """Deadline of requests that bring none; 0 means none."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks"):
            _at_least(getattr(self, name), 1, name)
        for name in ("encoder_cache_slots", "max_encoder_slots_per_step", "max_encoder_patches_per_step"):
            _at_least(getattr(self, name), 0, name)
        for name in ("priority_aging_s", "max_queued_requests", "max_queue_s", "request_timeout_s"):
            _at_least(getattr(self, name), 0, name)
        _at_least(self.max_prefill_tokens_while_decoding, 0, "max_prefill_tokens_while_decoding")

    @property
    def watermark_blocks(self) -> int:
        return int(self.num_blocks * WATERMARK_FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one LM engine replica. Names and meanings are vLLM's where it has the option."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: str
    """Model folder or hub id."""
    revision: str | None = None
    """Hub branch, tag or commit; ignored for a folder."""
    load_format: LoadFormat = "auto"
    """`dummy` makes random weights of the right shapes."""
    dtype: Dtype = "auto"
    """Precision of weights and KV cache; `auto` is the checkpoint's on a GPU and float32 on the CPU."""
    quantization: Quantization | None = None
    """`fp8` turns the layers' weights to 8 bits at start and their products' inputs as they come (W8A8, e4m3, a scale a
    row), on GPUs of CUDA capability 8.9 and higher with dtype bfloat16. Embedding, head and KV cache stay in `dtype`,
    as everything does with None."""
    device: Device = "auto"
    """`auto` takes a GPU if there is one."""
    tensor_parallel_size: int = 1
    """Devices over which the model is spread, one process each. Must divide its attention heads and MLP width, and
    divide its KV heads or be a multiple of them."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's own."""
    max_num_batched_tokens: int = 8192
    """Tokens of one step, over all sequences."""
    max_num_seqs: int = 256
    """Sequences that may run at once."""
    max_prefill_tokens_while_decoding: int = 0
    """Prefill tokens of a step that also decodes, which bounds the pause between streamed tokens; 0 is no limit."""
    block_size: int = 16
    """Token positions of one KV block."""
    num_gpu_blocks_override: int | None = None
    """KV blocks of the pool, whatever the memory; None sizes it by `kv_cache_bytes` or the memory at hand."""
    kv_cache_bytes: int | None = None
    """Bytes of the KV pool; None takes what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights, activations and KV pool may fill together."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes (tokens, pictures, tenant and salt all equal)."""
    disable_chunked_mm_input: bool = False
    """End a prefill chunk before an item instead of inside it."""
    encoder_cache_slots: int = 0
    """Embedding slots kept on the device; 0 is `max_num_batched_tokens`. Never below the worst-case item."""
    max_encoder_slots_per_step: int = 0
    """Slots of the encodes one step may start; 0 is `max_num_batched_tokens`. Never below the worst-case item."""
    max_encoder_patches_per_step: int = 0
    """Patches of the encodes one step may start; 0 follows the slots. Never below the worst-case item."""
    embed_pool_bytes: int = 0
    """Host memory through which embeddings pass on their way to the device, page-locked where there is a GPU; what does
    not fit waits. 0 takes room for four worst-case items, at least 64 MiB. At least one worst-case item."""
    embed_pool_ttl_s: float = 60.0
    """After which such memory, taken and never used, is given back: a guard against leaks."""
    hedging: HedgingConfig = field(default_factory=HedgingConfig)
    """When an encoder replica that does not answer is passed over; see hedging.py."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """`priority` honours the request's `priority` (lower runs earlier); `fcfs` ignores it."""
    priority_aging_s: float = 60.0
    """Seconds of waiting that outweigh one level of priority, so that nobody starves; 0 is strict priority."""
    max_queued_requests: int = 1024
    """Waiting sequences beyond which requests are refused; 0 means no limit."""
    max_queue_s: float = 60.0
    """Longest wait for the first step, after which the request is refused; 0 means no limit."""
    request_timeout_s: float = 600.0
    """Deadline of requests that bring none; 0 means none."""
    attention_backend: AttentionBackend = "auto"
    """`sdpa` runs anywhere, `triton` on GPUs; `auto` takes triton where it agrees with sdpa at start."""
    fuse_layers: bool = True
    """Stack q, k, v and gate, up weights and fuse what runs between them, on GPUs and for known architectures."""
    enforce_eager: bool = False
    """Never replay steps from CUDA graphs."""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Batch sizes of decode graphs; a step takes the next larger one. Empty picks a ladder up to `max_num_seqs`."""
    async_scheduling: bool | None = None
    """Prepare a step while the one before is computed; a sequence that ends has then one row computed in vain. None
    does so on a GPU. Steps with grammars or penalties wait in any case: their next token depends on the last."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must name a folder or a hub id; it is empty")
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "tensor_parallel_size"):
            _at_least(getattr(self, name), 1, name)
        for name in ("max_model_len", "num_gpu_blocks_override", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _at_least(getattr(self, name), 1, name)
        for name in ("encoder_cache_slots", "max_encoder_slots_per_step", "max_encoder_patches_per_step"):
            _at_least(getattr(self, name), 0, name)
        _at_least(self.embed_pool_bytes, 0, "embed_pool_bytes")
        if self.embed_pool_ttl_s <= 0:
            raise ValueError(f"embed_pool_ttl_s must be above 0; it is {self.embed_pool_ttl_s}")
        for name in ("priority_aging_s", "max_queued_requests", "max_queue_s", "request_timeout_s"):
            _at_least(getattr(self, name), 0, name)
        _at_least(self.max_prefill_tokens_while_decoding, 0, "max_prefill_tokens_while_decoding")
        for size in self.cudagraph_capture_sizes:
            _at_least(size, 1, "cudagraph_capture_sizes")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1; it is {self.gpu_memory_utilization}"
            )
        if self.quantization not in (None, "fp8"):
            raise ValueError(f"quantization must be 'fp8' or None; it is {self.quantization!r}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy must be 'fcfs' or 'priority'; it is {self.scheduling_policy!r}")

    @property
    def mixed_graph_sizes(self) -> tuple[int, ...]:
        """Rows of the graphs of steps that prefill, ascending. Above, a step computes for longer than it takes to
        launch."""
        return (*range(64, 513, 64), *range(640, 1025, 128))

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes of decode graphs, ascending: steps of an eighth to a quarter, so that little is padding."""
        sizes = self.cudagraph_capture_sizes or (
            *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128),
            *range(160, 257, 32),
            *range(320, 513, 64),
            *range(640, self.max_num_seqs + 128, 128),
        )
        return tuple(sorted({min(size, self.max_num_seqs) for size in sizes}))

    def num_kv_blocks(self, block_bytes: int, free_bytes: int) -> int:
        """KV blocks of the pool: the override, else `kv_cache_bytes`, else what fits `free_bytes`.

        Args:
            block_bytes: Bytes of one block over all layers.
            free_bytes: Bytes left for the pool after weights and the largest step, within `gpu_memory_utilization`.

        Raises:
            ValueError: Not one block fits.
        """
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override
        pool_bytes = free_bytes if self.kv_cache_bytes is None else self.kv_cache_bytes
        if pool_bytes < block_bytes:
            option = "gpu_memory_utilization" if self.kv_cache_bytes is None else "kv_cache_bytes"
            raise ValueError(f"one KV block needs {block_bytes} bytes but {option} leaves {pool_bytes}")
        return pool_bytes // block_bytes

    def resolve(self, limits: ModelLimits) -> SchedulerConfig:
        """Fill every automatic value from the model's limits.

        Raises:
            ValueError: The options cannot serve this model; the message names option, value and limit.
        """
        max_model_len = self.max_model_len or limits.max_model_len
        if max_model_len > limits.max_model_len:
            raise ValueError(f"max_model_len {max_model_len} is above the model's own {limits.max_model_len}")
        if self.disable_chunked_mm_input and self.max_num_batched_tokens < limits.max_item_slots:
            raise ValueError(
                f"disable_chunked_mm_input needs max_num_batched_tokens of at least the worst-case item's "
                f"{limits.max_item_slots} slots; it is {self.max_num_batched_tokens}"
            )
        slots_per_step = max(self.max_encoder_slots_per_step or self.max_num_batched_tokens, limits.max_item_slots)
        patches_per_slot = -(-limits.max_item_patches // max(1, limits.max_item_slots))
        patches_per_step = self.max_encoder_patches_per_step or slots_per_step * max(1, patches_per_slot)
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_prefill_tokens_while_decoding=self.max_prefill_tokens_while_decoding,
            max_model_len=max_model_len,
            block_size=self.block_size,
            num_blocks=limits.num_blocks,
            enable_prefix_caching=self.enable_prefix_caching,
            disable_chunked_mm_input=self.disable_chunked_mm_input,
            encoder_cache_slots=max(self.encoder_cache_slots or self.max_num_batched_tokens, limits.max_item_slots),
            max_encoder_slots_per_step=slots_per_step,
            max_encoder_patches_per_step=max(patches_per_step, limits.max_item_patches),
            scheduling_policy=self.scheduling_policy,
            priority_aging_s=self.priority_aging_s,
            max_queued_requests=self.max_queued_requests,
            max_queue_s=self.max_queue_s,
            request_timeout_s=self.request_timeout_s,
        )


def _at_least(value: float, minimum: int, name: str) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; it is {value}")
