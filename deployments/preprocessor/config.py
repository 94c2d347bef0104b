"""Options of the preprocessor stage, validated when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """What may be fetched, and at what cost at most."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    allowed_media_domains: tuple[str, ...] = ()
    """If not empty, only these hosts are fetched. `example.com` is that host, `*.example.com` all below it."""
    denied_media_domains: tuple[str, ...] = ()
    """Hosts that are never fetched, in the same notation; stronger than every other list."""
    internal_media_hosts: tuple[str, ...] = ()
    """`host` or `host:port` that may be reached although its address is not public."""
    total_timeout_s: float = 15.0
    """Bound on one fetch with all its redirects, waiting for a place included."""
    connect_timeout_s: float = 5.0
    """Bound on name resolution and on one connection attempt, TLS included."""
    idle_timeout_s: float = 10.0
    """Bound on the silence between two pieces of an answer."""
    max_redirects: int = 3
    """Redirects followed before the fetch fails; each hop is checked like the first URL."""
    max_in_flight: int = 1024
    """Fetches that run at once; further ones wait within their own time-out. Large, since a fetch that waits for a
    silent host costs a socket only, and many silent hosts must not take every place."""
    max_in_flight_per_host: int = 16
    """Fetches that run at once against one host and port."""
    contact: str = ""
    """URL or mail address shown to media hosts in the User-Agent; many refuse clients without one."""

    def __post_init__(self) -> None:
        for name in ("total_timeout_s", "connect_timeout_s", "idle_timeout_s"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        _check("max_redirects", self.max_redirects, 0 <= self.max_redirects <= 10, "0 to 10")
        _check("max_in_flight", self.max_in_flight, self.max_in_flight >= 1, "at least 1")
        per_host = self.max_in_flight_per_host
        _check("max_in_flight_per_host", per_host, per_host >= 1, "at least 1")
        clean = self.contact.isascii() and self.contact.isprintable()
        _check("contact", self.contact, clean, "printable ASCII")
        for name in ("allowed_media_domains", "denied_media_domains", "internal_media_hosts"):
            for entry in getattr(self, name):
                bare = bool(entry) and "/" not in entry and "@" not in entry and not entry.isspace()
                _check(name, entry, bare, "a host such as example.com, without scheme or path")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessorConfig:
    """Limits and choices of fetching, decoding, resizing and caching."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=lambda: {"image": 64, "video": 4})
    """Items of each modality a request may carry; a modality left out or at 0 is refused."""
    mm_processor_kwargs: Mapping[str, int] = field(default_factory=dict)
    """`min_pixels` and `max_pixels` after resizing; the checkpoint's own values where left out. A request's
    `max_pixels` above this one is clamped to it."""
    resample: Literal["torch", "pillow"] = "torch"
    """Bicubic resize: `torch` is faster and within two grey levels of `pillow`, which equals the transformers
    image processors exactly."""
    background: tuple[int, int, int] = (255, 255, 255)
    """Colour under transparent pixels; part of every cache key."""
    max_image_bytes: int = 32 * MEBIBYTE
    """Largest encoded picture."""
    max_image_pixels: int = 100_000_000
    """Largest decoded picture, judged from its header before any pixel is decoded."""
    max_video_bytes: int = 128 * MEBIBYTE
    """Largest encoded video."""
    max_video_frames: int = 64
    """Frames taken from one video; longer videos are sampled evenly over their whole length."""
    max_video_seconds: float = 600.0
    """Longest video that is opened."""
    video_fps: float = 2.0
    """Frames taken per second of video, unless the request's `mm_processor_kwargs` name `fps`."""
    decode_threads: int = 0
    """Pictures decoded at once; 0 means one per CPU core."""
    decode_isolation: Literal["thread", "process"] = "thread"
    """`process` decodes in worker processes, so that a crash of a codec costs one request."""
    decode_worker_memory_bytes: int = 4096 * MEBIBYTE
    """Address space of a decode worker process; a picture that needs more fails alone."""
    decode_timeout_s: float = 20.0
    """Wall and CPU time of one decode in a worker process before the worker is replaced."""
    alias_cache_bytes: int = 16 * MEBIBYTE
    """Memory for digests and sizes of pictures seen before (about 300 bytes each)."""
    source_cache_bytes: int = 256 * MEBIBYTE
    """Memory for encoded pictures that a caller named by `uuid`, so that the uuid alone can stand for them."""
    fetch: FetchConfig = field(default_factory=FetchConfig)
    """Rules for `http:` and `https:` URLs."""
    allowed_local_media_path: str = ""
    """Folder on the preprocessor's host from which `file:` URLs are read; empty refuses them all. Every caller can
    read every picture below it."""

    def __post_init__(self) -> None:
        for modality, limit in self.limit_mm_per_prompt.items():
            known = modality in ("image", "video") and limit >= 0
            _check("limit_mm_per_prompt", {modality: limit}, known, "image and video with numbers of 0 or more")
        for name, value in self.mm_processor_kwargs.items():
            known = name in ("min_pixels", "max_pixels") and value >= 1
            _check("mm_processor_kwargs", {name: value}, known, "min_pixels and max_pixels, at least 1")
        low, high = (self.mm_processor_kwargs.get(name) for name in ("min_pixels", "max_pixels"))
        ordered = low is None or high is None or low <= high
        _check("mm_processor_kwargs", dict(self.mm_processor_kwargs), ordered, "min_pixels up to max_pixels")
        _check("resample", self.resample, self.resample in ("torch", "pillow"), "torch or pillow")
        isolation = self.decode_isolation
        _check("decode_isolation", isolation, isolation in ("thread", "process"), "thread or process")
        in_range = len(self.background) == 3 and all(0 <= level <= 255 for level in self.background)
        _check("background", self.background, in_range, "three levels from 0 to 255")
        for name in (
            "max_image_bytes",
            "max_image_pixels",
            "max_video_bytes",
            "max_video_frames",
            "max_video_seconds",
            "video_fps",
            "decode_worker_memory_bytes",
            "decode_timeout_s",
            "alias_cache_bytes",
            "source_cache_bytes",
        ):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        local = self.allowed_local_media_path
        own_folder = not local or (local.startswith("/") and local.strip("/") not in ("", ".") and "\0" not in local)
        _check("allowed_local_media_path", local, own_folder, "an absolute path other than /, or empty")
        _check("decode_threads", self.decode_threads, self.decode_threads >= 0, "0 or more")


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
