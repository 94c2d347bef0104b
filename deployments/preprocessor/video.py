"""Videos: frames chosen evenly over the whole length, decoded one after the other, resized as they come.

    file ──demux──▶ frames counted ──choose──▶ indices       (no pixel is decoded for this)
    file ──decode──▶ chosen frames ──digest, resize──▶ ──patchify──▶ uint8 patches, both frames of a temporal pair kept

A container is opened by the format that its bytes show and nothing else, so that no playlist or script format can name
other files; a picture count in a header is never believed. Frames given as single pictures go through the guarded
picture decoder. All blocks; foreign exceptions end here.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from cache_service.identity import content_digest
from deployments.errors import MediaError, SightlineError
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode import ImageDecoder
from deployments.preprocessor.families.base import Family, Layout
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.mm_options import server_pixel_limits
from deployments.preprocessor.resize import PixelLimits, Resizer, check_aspect_ratio
from deployments.preprocessor.sniff import sniff

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

ACCEPTED = "MP4, WebM/Matroska, AVI and MPEG"

_DEMUXERS = {"MP4": "mp4", "AVI": "avi", "WebM/Matroska": "matroska", "MPEG": "mpeg"}
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg")
_MIN_FRAMES = 4
_FALLBACK_FPS = 25.0


def choose_frames(total: int, wanted: float, max_frames: int, multiple: int) -> tuple[int, ...]:
    """Indices of about `wanted` out of `total` frames, evenly spaced; a multiple of `multiple` where that many exist.

    At least four frames are taken from videos that have them.
    """
    count = int(min(max(wanted, _MIN_FRAMES), max_frames, total))
    count = max(count // multiple * multiple, min(total, multiple))
    return tuple(index * total // count for index in range(count))


class VideoProcessor:
    """Holds no state between calls; safe to share among threads."""

    def __init__(self, config: PreprocessorConfig, family: Family, decoder: ImageDecoder, resizer: Resizer) -> None:
        self._config = config
        self._family = family
        self._decoder = decoder
        self._resizer = resizer
        self._max_pixels = server_pixel_limits(config.mm_processor_kwargs, family.limits).max_pixels

    def inspect(self, data: EncodedMedia, options: MediaOptions) -> Inspection:
        """Size and the frames that will be taken. Raises MediaError."""
        multiple = self._family.geometry.temporal_patch_size
        limit = self._config.max_video_frames
        if not isinstance(data, bytes):
            sizes = {self._decoder.probe(picture) for picture in data}
            total, fps = len(data), options.fps
            size = _common_size(sizes)
            wanted = float(options.num_frames or total)
        else:
            with _opened(data) as (container, stream):
                size = self._checked_size(stream)
                fps = float(stream.average_rate or stream.guessed_rate or _FALLBACK_FPS)
                total = sum(1 for packet in container.demux(stream) if packet.size)
            if total / fps > self._config.max_video_seconds:
                raise MediaError(
                    f"the video is {total / fps:.0f} s long; at most {self._config.max_video_seconds:g} s are allowed",
                    code="video_too_long",
                )
            wanted = options.num_frames or total / fps * options.fps
        if total == 0:
            raise MediaError("the video has no frames", code="invalid_video")
        indices = choose_frames(total, wanted, limit, multiple)
        return Inspection(
            size=size,
            frame_indices=indices,
            frame_seconds=tuple(index / fps for index in indices),
            seconds_per_frame=total / fps / len(indices),
        )

    def layout(self, inspection: Inspection, options: MediaOptions) -> Layout:
        """All frames share one size, such that a video takes no more slots than the largest picture."""
        steps = -(-inspection.num_frames // self._family.geometry.temporal_patch_size)
        share = max(1, min(options.frame_limits.max_pixels, self._max_pixels // steps))
        limits = PixelLimits(min(options.frame_limits.min_pixels, share), share)
        return self._family.layout(*inspection.size, limits, inspection.num_frames)

    def process(self, data: EncodedMedia, inspection: Inspection, options: MediaOptions) -> ProcessedMedia:
        """Everything about a video seen for the first time. Raises MediaError."""
        start = time.perf_counter()
        planned = self.layout(inspection, options)
        digests, frames = [], []
        for pixels in self._frames(data, inspection.frame_indices):
            digests.append(blake3(pixels.data.cast("B")).digest())
            frames.append(self._resizer(pixels, planned.resized_height, planned.resized_width))
        if not frames:
            raise MediaError("no frame of the video can be decoded", code="invalid_video")
        decoded = time.perf_counter()
        found = _shortened(inspection, len(frames))
        # Size and indices are part of the digest, so digests of frames stand for the frames.
        content = content_digest(
            "RGB",
            found.size,
            b"".join(digests),
            frame_indices=found.frame_indices,
            frame_seconds=found.frame_seconds,
        )
        height, width = planned.resized_height, planned.resized_width
        exact = PixelLimits(height * width, height * width)
        layout = self._family.layout(width, height, exact, found.num_frames)
        patches = self._family.patchify(np.stack(frames), "video")
        return ProcessedMedia(
            content=content,
            inspection=found,
            layout=layout,
            patches=patches,
            decode_s=decoded - start,
            preprocess_s=time.perf_counter() - decoded,
        )

    def remake(self, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        """Patches of a video whose effective processing is known. Raises MediaError."""
        height, width = processing["resized_height"], processing["resized_width"]
        frames = [self._resizer(pixels, height, width) for pixels in self._frames(data, processing["frame_indices"])]
        return self._family.patchify(np.stack(frames), "video")

    def _frames(self, data: EncodedMedia, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """The chosen frames, RGB uint8 [H, W, 3]; fewer if the file ends early."""
        if not isinstance(data, bytes):
            for index in indices:
                yield self._decoder.decode(data[index]).pixels
            return
        wanted = set(indices)
        deadline_s = time.monotonic() + self._config.decode_timeout_s
        with _opened(data) as (container, stream):
            size = self._checked_size(stream)
            for index, frame in enumerate(_decodable(container, stream)):
                if time.monotonic() > deadline_s:
                    raise MediaError(
                        f"decoding the video took longer than {self._config.decode_timeout_s:g} s",
                        code="video_too_long",
                    )
                if index in wanted:
                    if (frame.width, frame.height) != size:
                        raise MediaError("the video's frames change their size", code="invalid_video")
                    yield frame.to_ndarray(format="rgb24")
                if index >= indices[-1]:
                    return

    def _checked_size(self, stream: VideoStream) -> tuple[int, int]:
        width, height = stream.codec_context.width, stream.codec_context.height
        if width < 1 or height < 1:
            raise MediaError("the video's frames have no size", code="invalid_video")
        if width * height > self._config.max_image_pixels:
            raise MediaError(
                f"the video's frames are {width}x{height} = {width * height} pixels; at most "
                f"{self._config.max_image_pixels} are allowed",
                code="image_too_large",
            )
        check_aspect_ratio(height, width)
        return width, height


def _common_size(sizes: set[tuple[int, int]]) -> tuple[int, int]:
    if len(sizes) == 1:
        return next(iter(sizes))
    raise MediaError("the frames of a video must all have the same size", code="invalid_video")


def _shortened(inspection: Inspection, num_frames: int) -> Inspection:
    return Inspection(
        size=inspection.size,
        frame_indices=inspection.frame_indices[:num_frames],
        frame_seconds=inspection.frame_seconds[:num_frames],
        seconds_per_frame=inspection.seconds_per_frame,
    )


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The one guarded open of videos: known containers and codecs only, one thread."""
    if not data:
        raise MediaError("the video is empty (0 bytes)", code="empty_media")
    demuxer = _DEMUXERS.get(sniff(data).format)
    if demuxer is None:
        seen = sniff(data).format
        kind = f"is {seen}" if seen else "is of no known video format"
        raise MediaError(f"the file ({len(data)} bytes) {kind}; accepted are {ACCEPTED}", code="unsupported_video")
    try:
        import av
    except ImportError:
        raise MediaError(
            "videos are not accepted by this server; accepted are pictures", code="unsupported_video"
        ) from None
    try:
        with av.open(io.BytesIO(data), mode="r", format=demuxer) as container:
            if not container.streams.video:
                raise MediaError("the file holds no video stream", code="invalid_video")
            stream = container.streams.video[0]
            if stream.codec_context is None or stream.codec_context.name not in _CODECS:
                raise MediaError(
                    f"the video's codec is not supported; accepted are {', '.join(_CODECS)}", code="unsupported_video"
                )
            stream.codec_context.thread_count = 1
            yield container, stream
    except SightlineError:
        raise
    except Exception:  # damaged containers raise many types; absurd sizes in them are a MemoryError
        raise MediaError(
            f"the video is damaged or incomplete ({len(data)} bytes received)", code="invalid_video"
        ) from None


def _decodable(container: InputContainer, stream: VideoStream) -> Iterator[Any]:
    """Frames up to the first damage; what was read until then is used."""
    import av

    try:
        yield from container.decode(stream)
    except (av.FFmpegError, EOFError):
        return
