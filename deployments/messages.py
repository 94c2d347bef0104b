"""What crosses a process: small frozen dataclasses, and nothing else.

Tensors never travel inside a message. A message holds a `Ref` to a NumPy array in the object store (bf16 viewed as
uint16), and whoever consumes the array drops the message soon after, which frees the array. Messages that hold refs go
over Ray's default handle transport only: a ref serialised into a gRPC handle's arguments is pinned for ever.

    ingress ──PrepareRequest──▶ preprocessor ──PreparedPrompt──▶ ingress ──GenerateRequest──▶ LM engine
                                                        LM engine ──EncodeRequest──▶ encoder ──EncodedItem──▶ LM engine
                                                                        LM engine ──SequenceDelta…──▶ ingress
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cache_service.identity import ItemIdentity
from deployments.errors import SightlineError

Modality = Literal["image", "video"]
FinishReason = Literal["stop", "length", "abort", "error"]

# Handle to a value in the object store: `ray.ObjectRef` in production, any token in tests (see ports.ObjectStore).
Ref = Any


# ---------------------------------------------------------------------------------------------------------------------
# ingress -> preprocessor
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInput:
    """One picture or video as the caller named it, in prompt order."""

    modality: Modality
    param: str
    """Where it stands in the request, for error messages: `messages[0].content[1].image_url`."""
    url: str | None = None
    """`data:`, `http:` or `https:` URL; None if only a uuid was given."""
    frames: tuple[str, ...] = ()
    """Video as a list of picture URLs instead of one `url`."""
    uuid: str | None = None
    """Caller's hint for the content; trusted only inside the caller's namespace."""
    detail: Literal["auto", "low", "high"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Template-ready turns. Media parts are bare `{"type": "image"}` / `{"type": "video"}`; their n-th belongs to
    the n-th `PrepareRequest.media`. All text is the caller's: special tokens in it stay text."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Raw prompt of `/v1/completions` and `/tokenize`: a string, or token ids as given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRequest:
    request_id: str
    prompt: ChatPrompt | TextPrompt
    media: tuple[MediaInput, ...] = ()
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    """Tenant namespace; enters every cache key."""
    deadline_s: float | None = None
    """Unix time after which the caller no longer wants an answer."""
    max_prompt_tokens: int | None = None
    """Reject a longer prompt here, before any patches are made."""
    cache_salt: str = ""
    """Caller's own division of its namespace; enters every cache key as the namespace does."""
    max_item_bytes: int | None = None
    """Tenant's own limit on the encoded size of one picture or video, below the server's."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """The request's id and W3C trace context, for logs and spans; see tracing.py."""


# ---------------------------------------------------------------------------------------------------------------------
# preprocessor -> ingress -> LM engine -> encoder
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One processed picture or video: metadata, its span in the prompt, and where its pixels can be had.

    `patches` is None on a repeat: metadata is enough while the embedding is in some cache tier. Whoever needs the
    pixels after all asks the preprocessor's `make_patches(item)`, which decodes `source` again.
    """

    modality: Modality
    identity: ItemIdentity
    grid: tuple[int, int, int]
    """Patches along time, height and width, before spatial merging."""
    offset: int
    """First placeholder position in the prompt's token ids."""
    num_slots: int
    """Placeholder positions = rows of encoder output."""
    num_patches: int
    param: str = ""
    patches: Ref | None = None
    """uint8 array [num_patches, channels * patch * patch] (video: [..., temporal, ...]; see the family)."""
    source: Ref | None = None
    """Encoded bytes as received (`bytes`), so that patches can be made again. None where only a `uuid` came and another
    replica has the bytes: the embedding's cache entry is then all there is."""
    uuid_key: bytes | None = None
    """Of an item without source: the shared record that vouched for it, forgotten once its patches are missed."""
    processing: Mapping[str, Any] = field(default_factory=dict)
    """Effective processing (resized height and width, frames, ...), enough for `make_patches`."""
    seconds_per_grid: float = 0.0
    """Video: seconds between temporal grid steps, for M-RoPE."""

    @property
    def end(self) -> int:
        return self.offset + self.num_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...] = ()
    """In prompt order; spans are disjoint and hold only the family's placeholder id."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent in fetch, decode, preprocess, tokenize."""
    cache_results: Mapping[str, int] = field(default_factory=dict)
    """Look-ups by `tier:result`, summed into metrics by the shim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """Constraint on the output text."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    value: str = ""
    """The schema (JSON text), pattern, JSON list of choices or Lark grammar; empty for json_object."""
    param: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; names and meaning follow vLLM's SamplingParams."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less keeps all."""
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: no log-probabilities; k >= 0: the chosen token's and the k most likely."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    items: tuple[MediaItem, ...] = ()
    namespace: str = ""
    cache_salt: str = ""
    priority: int = 0
    """Lower runs earlier (vLLM's meaning)."""
    deadline_s: float | None = None
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """The request's id and W3C trace context, for logs and spans; see tracing.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """Items the LM engine can hold right now, and no others."""

    request_id: str
    items: tuple[MediaItem, ...]
    namespace: str = ""
    deadline_s: float | None = None
    refresh: bool = False
    """A ref that was handed out for these items could not be read: don't hand out the same one again."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """The request's id and W3C trace context, for logs and spans; see tracing.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """One item's embeddings, aligned with the request's items by position."""

    identity: ItemIdentity
    num_slots: int
    width: int
    """Columns of a row: hidden size, times (1 + deepstack levels) where the family has them."""
    dtype: Literal["float32", "bfloat16", "float16"]
    embeddings: Ref
    """Array [num_slots, width]; bfloat16 viewed as uint16."""
    origin: Literal["computed", "joined", "memory", "redis"] = "computed"


# ---------------------------------------------------------------------------------------------------------------------
# LM engine -> ingress
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    token: str
    logprob: float
    utf8: bytes = b""
    """The token's own bytes, which may be part of a character only."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the most likely ones at the same position, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Sent once, with the last delta of a sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    image_tokens: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """queue, encode (waiting for embeddings), prefill, generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """What one choice gained since its last delta; several steps may be folded into one."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the sequence, if one did."""
    stats: GenerationStats | None = None
    error: SightlineError | None = None


DeltaBatch = Sequence[SequenceDelta]
"""One item of the token stream: the cost of a stream is per item, so deltas ready together travel together."""
