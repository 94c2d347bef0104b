"""Options of the vision encoder stage. Names follow vLLM where the meaning is equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

ENCODER_REVISION = "2"
"""Part of every embedding's fingerprint; changes whenever our forward pass changes its results."""

LoadFormat = Literal["auto", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
AttentionBackend = Literal["auto", "sdpa_segments", "sdpa_masked", "varlen", "triton_frames", "triton_windows"]
Packing = Literal["planned", "smallest_first"]
Quantization = Literal["fp8"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "mm_encoder_attn_backend": get_args(AttentionBackend),
    "packing": ("planned", "smallest_first"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """One encoder replica. Every limit is checked here, so a wrong option fails at start with its name."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: str
    """Model folder, or hub id such as `Qwen/Qwen2.5-VL-7B-Instruct`."""
    revision: str | None = None
    """Hub branch, tag or commit; ignored for folders."""
    load_format: LoadFormat = "auto"
    """`auto` reads safetensors; `dummy` starts with random weights in the model's shape."""
    dtype: Dtype = "auto"
    """Precision of weights and results; `auto` is float32 on CPU and the checkpoint's own on CUDA."""
    quantization: Quantization | None = None
    """`fp8` turns the blocks' weights to 8 bits at start and their products' inputs as they come (W8A8, e4m3, a scale a
    row), on GPUs of CUDA capability 8.9 and higher with dtype bfloat16. The first projection and the mergers stay in
    `dtype`, as everything does with None."""
    device: Device = "auto"
    """`auto` takes CUDA where there is a GPU."""
    num_threads: int = 0
    """CPU threads of the forward pass on a CPU; 0 leaves torch's default."""

    data_parallel_size: int = 1
    """Devices of this replica that share the items of a round, each with its own weights and graphs; give the replica
    as many GPUs. On CPU: encoders side by side."""

    max_batch_patches: int = 65_536
    """Input patches in one forward pass; also the most that one item may have."""
    max_batch_slots: int = 16_384
    """Output rows in one forward pass; also the most that one item may have."""
    max_batch_items: int = 256
    """Items in one forward pass."""
    max_batch_frames: int = 1_024
    """Frames (temporal grid steps; a picture counts one) in one forward pass."""
    max_wait_s: float = 0.0
    """How long the first item of an idle encoder waits for company beyond what arrives together with it. Company forms
    by itself behind a running batch, so waiting pays only where passes are much longer than arrivals are apart."""
    max_queued_items: int = 4_096
    """Items waiting for the encoder; more are refused as overload."""
    colocated_share: float | None = None
    """With `encoder_placement: colocated`, the share of the GPU's time that the encoder may take while answers are
    decoded, above 0 and at most 1: rounds are then held to `colocated_pass_s`, with gaps between them, so that a burst
    of pictures does not hold up tokens. Nothing is held back while nothing decodes. None sets no limit."""
    colocated_pass_s: float = 0.02
    """Predicted seconds of one round under `colocated_share`; an item that alone takes longer goes alone."""
    packing: Packing = "planned"
    """`planned` minimises measured replay time; `smallest_first` is the plain greedy way."""

    cudagraph_mm_encoder: bool = True
    """Replay captured CUDA graphs. On CPU: run the same ladder with static padded buffers, without capture, if
    `static_buffers_on_cpu` asks for it."""
    static_buffers_on_cpu: bool = False
    """Use the ladder's padded buffers on CPU too, which costs padded work; for tests of the graph path."""
    encoder_cudagraph_token_budgets: tuple[int, ...] = ()
    """Slot budgets to capture; empty derives a ladder from the model's range."""
    encoder_cudagraph_steps_per_octave: int = 8
    """Steps of the derived ladder between one power of two and the next: 1, 2, 4 or 8. With 8 at most an eighth of a
    pass is padding, and 224, 336, 448 and 672 pixels square at 28 to the slot fit a budget exactly."""
    encoder_cudagraph_usual_sizes: bool = True
    """Add budgets that fit pictures of usual sizes exactly (squares of 224 to 1,280 pixels, common screens): such
    pictures, sent one at a time, are then computed without padding."""
    encoder_cudagraph_max_budget: int = 4_096
    """Top of the derived ladder, in slots; larger batches are compute-bound and gain nothing from a graph."""
    encoder_cudagraph_max_vision_items_per_batch: int = 0
    """Items per captured batch; 0 derives it from budget and the model's smallest usual item."""
    encoder_cudagraph_max_frames_per_batch: int | None = None
    """Frames per captured batch; None derives it, 0 captures no video path."""
    capture_progress: bool = True
    """Show a progress bar while capturing."""

    mm_encoder_attn_backend: AttentionBackend = "auto"
    """Attention kernels; `auto` times those that pass their check at start and takes the fastest for each size of pass.
    `varlen` is one for everything; `triton_frames` names the one for whole frames; `triton_windows` is `varlen` with a
    kernel of its own for windows. On CPU `auto` is `sdpa_segments`."""
    fused_kernels: bool = True
    """Use fused Triton kernels for norms, rotary and gates on CUDA; each is checked against plain torch at start."""
    mlp_width_multiple: int = 128
    """Pad the MLP's inner width with zeros to a multiple of this on CUDA: odd widths run several times slower."""

    cache_bytes: int = 2 << 30
    """Embeddings kept by reference in this replica, in bytes of object store."""
    batch_memory_bytes: int = 0
    """Activation memory of one forward pass; 0 takes `batch_memory_fraction` of what is free after loading on CUDA, and
    sets no limit on CPU."""
    batch_memory_fraction: float = 0.5
    """Share of free device memory that one forward pass may take, if `batch_memory_bytes` is 0."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        if self.quantization not in (None, "fp8"):
            raise ValueError(f"quantization is {self.quantization!r}; allowed: fp8, None")
        for name in (
            "max_batch_patches",
            "max_batch_slots",
            "max_batch_items",
            "max_batch_frames",
            "max_queued_items",
            "encoder_cudagraph_max_budget",
            "mlp_width_multiple",
            "data_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "num_threads",
            "cache_bytes",
            "batch_memory_bytes",
            "max_wait_s",
            "encoder_cudagraph_max_vision_items_per_batch",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.colocated_share is not None and not 0 < self.colocated_share <= 1:
            raise ValueError(f"colocated_share is {self.colocated_share}; it must be above 0 and at most 1")
        if self.colocated_pass_s <= 0:
            raise ValueError(f"colocated_pass_s is {self.colocated_pass_s}; it must be above 0")
        if not 0 < self.batch_memory_fraction <= 1:
            raise ValueError(f"batch_memory_fraction is {self.batch_memory_fraction}; it must be above 0 and at most 1")
        if self.encoder_cudagraph_steps_per_octave not in (1, 2, 4, 8):
            raise ValueError(
                f"encoder_cudagraph_steps_per_octave is {self.encoder_cudagraph_steps_per_octave}; allowed: 1, 2, 4, 8"
            )
        object.__setattr__(self, "encoder_cudagraph_token_budgets", tuple(self.encoder_cudagraph_token_budgets))
        budgets = self.encoder_cudagraph_token_budgets
        if any(budget < 1 for budget in budgets) or len(set(budgets)) != len(budgets):
            raise ValueError(
                f"encoder_cudagraph_token_budgets is {list(budgets)}; it must hold distinct positive slot counts"
            )
        frames = self.encoder_cudagraph_max_frames_per_batch
        if frames is not None and frames < 0:
            raise ValueError(f"encoder_cudagraph_max_frames_per_batch is {frames}; it must not be negative")
