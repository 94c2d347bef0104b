"""What the HTTP edge accepts at most, before any stage sees a request. Knows nothing about models or media formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Sizes and counts of one request, and the bytes of all requests that are being read or prepared."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_body_bytes: int = 96 * MIB
    """Largest request body. Room for several photos as base64; above it the answer is a 413."""
    max_buffered_body_bytes: int = 1024 * MIB
    """Bodies held at once by one ingress replica, from the first byte to the first
    delta of the answer; above it 503."""
    body_timeout_s: float = 60.0
    """Time to receive a whole body; slower clients get a 408."""
    write_timeout_s: float = 60.0
    """Time a client may take to accept one write of an answer; slower clients count as gone."""
    max_header_bytes: int = 32 << 10
    """All header names and values together; above it 431."""
    max_url_bytes: int = 8 << 10
    """Path and query; above it 414."""
    max_json_depth: int = 64
    """Nesting of arrays and objects in a body."""
    max_json_values: int = 262_144
    """Commas and opening brackets in a body: an upper bound of its values, and so of the memory and time that
    parsing takes. Object keys cost most: half a microsecond each, in which no other request of the replica moves."""
    max_json_containers: int = 32_768
    """Arrays and objects in a body; checking one costs about 10 µs on the event loop."""
    max_messages: int = 2048
    """Turns of one chat request."""
    max_content_parts: int = 4096
    """Content parts of one chat request, over all turns."""
    limit_mm_per_prompt: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({"image": 256, "video": 16})
    )
    """Pictures and videos of one request."""
    max_video_frames: int = 1024
    """Frames of one video that is given as a list of pictures."""
    max_n: int = 16
    """Choices of one request (`n`)."""
    max_prompts: int = 64
    """Prompts of one /v1/completions request."""
    max_stop_strings: int = 16
    """Entries of `stop`."""
    max_stop_chars: int = 1024
    """Characters of one entry of `stop`."""
    max_stop_token_ids: int = 256
    """Entries of `stop_token_ids`."""
    max_logit_bias: int = 1024
    """Entries of `logit_bias`."""
    max_logprobs: int = 20
    """Alternatives per position (`top_logprobs`, `logprobs`)."""
    max_tools: int = 128
    """Entries of `tools`."""
    max_schema_bytes: int = 64 << 10
    """JSON text of one schema or grammar (`response_format`, `tools[].function.parameters`, `structured_outputs`); the
    engine's grammar compiler takes no larger one."""
    max_uuid_chars: int = 256
    """Characters of a media part's `uuid`."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "limit_mm_per_prompt":
                _check_media(value)
            elif isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"limits.{name} is {value!r}; allowed: a number greater than 0")
        if self.max_json_depth > 512:
            raise ValueError(f"limits.max_json_depth is {self.max_json_depth}; allowed: 1 to 512")


def _check_media(limits: Mapping[str, int]) -> None:
    for modality, count in limits.items():
        if modality not in ("image", "video"):
            raise ValueError(f"limits.limit_mm_per_prompt names {modality!r}; allowed: image, video")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"limits.limit_mm_per_prompt[{modality!r}] is {count!r}; allowed: a whole number from 0")
