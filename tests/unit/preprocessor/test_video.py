from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import MediaError
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode import ImageDecoder
from deployments.preprocessor.media import Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.resize import PixelLimits, make_resizer
from deployments.preprocessor.video import VideoProcessor, choose_frames
from tests.unit.preprocessor.pictures import clip, encoded, noise
from tests.unit.preprocessor.test_families import FAMILY

LIMITS = PixelLimits(1, 200_000)
OPTIONS = MediaOptions(image_limits=LIMITS, frame_limits=LIMITS, fps=2.0)


def processor(**options: object) -> VideoProcessor:
    config = PreprocessorConfig(**options)  # type: ignore[arg-type]
    decoder = ImageDecoder(max_pixels=config.max_image_pixels)
    return VideoProcessor(config, FAMILY, decoder, make_resizer("pillow"))


def run(data: bytes, options: MediaOptions = OPTIONS, **config: object) -> ProcessedMedia:
    videos = processor(**config)
    return videos.process(data, videos.inspect(data, options), options)


def refused(data: bytes, options: MediaOptions = OPTIONS, **config: object) -> MediaError:
    with pytest.raises(MediaError) as caught:
        run(data, options, **config)
    return caught.value


# -- which frames -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("total", "wanted", "expected"),
    [
        (10, 4.0, (0, 2, 5, 7)),
        (10, 1.0, (0, 2, 5, 7)),
        (8, 5.9, (0, 2, 4, 6)),
        (3, 9.0, (0, 1)),
        (2, 1.0, (0, 1)),
        (1, 1.0, (0,)),
    ],
)
def test_choice(total: int, wanted: float, expected: tuple[int, ...]) -> None:
    assert choose_frames(total, wanted, 64, 2) == expected


@given(st.integers(1, 5000), st.floats(0.1, 5000), st.integers(1, 100), st.integers(1, 4))
def test_choice_is_even_bounded_and_increasing(total: int, wanted: float, max_frames: int, multiple: int) -> None:
    indices = choose_frames(total, wanted, max_frames, multiple)
    assert 1 <= len(indices) <= max(max_frames, multiple)
    assert len(indices) % multiple == 0 or len(indices) == total
    assert list(indices) == sorted(set(indices))
    assert indices[0] == 0
    assert indices[-1] < total
    gaps = np.diff([*indices, total])
    assert gaps.max() - gaps.min() <= 1


# -- decoding ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "mpeg4"), ("avi", "mjpeg"), ("avi", "mpeg4"), ("matroska", "mpeg4"), ("mp4", "h264")],
)
def test_containers_and_codecs(container: str, codec: str) -> None:
    video = run(clip(num_frames=12, fps=4, container=container, codec=codec))
    assert video.inspection.size == (64, 48)
    assert video.inspection.frame_indices == (0, 2, 4, 6, 8, 10)
    assert video.inspection.frame_seconds == pytest.approx((0, 0.5, 1, 1.5, 2, 2.5))
    assert video.inspection.seconds_per_frame == pytest.approx(0.5)
    assert video.layout.grid[0] == 3
    assert video.patches.shape == (video.layout.num_patches, 3 * 2 * 14 * 14)


def test_the_right_frames_in_order() -> None:
    video = run(clip(num_frames=20, fps=4), MediaOptions(image_limits=LIMITS, frame_limits=LIMITS, fps=2, num_frames=4))
    levels = video.patches.reshape(2, -1, 3, 2, 14, 14).mean(axis=(1, 2, 4, 5)).ravel()
    assert np.abs(levels - [20 + 10 * index for index in (0, 5, 10, 15)]).max() < 4


def test_max_video_frames() -> None:
    assert run(clip(num_frames=30, fps=2), max_video_frames=6).inspection.num_frames == 6


def test_content_depends_on_frames_and_times() -> None:
    slow, fast = run(clip(num_frames=8, fps=2)), run(clip(num_frames=8, fps=2, size=(48, 64)))
    assert slow.content != fast.content
    assert slow.content == run(clip(num_frames=8, fps=2)).content
    other = MediaOptions(image_limits=LIMITS, frame_limits=LIMITS, fps=2, num_frames=4)
    assert slow.content != run(clip(num_frames=8, fps=2), other).content


def test_a_video_takes_no_more_slots_than_the_largest_picture() -> None:
    videos = processor(mm_processor_kwargs={"max_pixels": 28 * 28 * 64})
    for num_frames in (1, 2, 8, 64):
        seen = Inspection(size=(1920, 1080), frame_indices=tuple(range(num_frames)))
        assert videos.layout(seen, OPTIONS).num_slots <= 64


def test_remake_gives_the_same_patches() -> None:
    data = clip(num_frames=9, fps=3)
    video = run(data)
    processing = {
        "resized_height": video.layout.resized_height,
        "resized_width": video.layout.resized_width,
        "frame_indices": video.inspection.frame_indices,
    }
    assert np.array_equal(processor().remake(data, processing), video.patches)


# -- faults -----------------------------------------------------------------------------------------------------------
def test_video_that_ends_early_gives_what_can_be_read() -> None:
    data = clip(num_frames=24, fps=2, container="avi", codec="mjpeg")
    video = run(data[: len(data) // 2])
    assert 2 <= video.inspection.num_frames < 24
    assert video.layout.num_patches == len(video.patches)


def test_frames_that_do_not_decode() -> None:
    data = clip(num_frames=12, fps=2, container="avi", codec="mpeg4")
    assert refused(data.replace(b"\0\0\x01\xb6", b"\0\0\0\0")).code == "invalid_video"  # no frame starts


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_media"),
        (b"<html>", "unsupported_video"),
        (b"#EXTM3U\nfile:///etc/passwd", "unsupported_video"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "unsupported_video"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0isommp42", "invalid_video"),
        (b"RIFF\x20\0\0\0AVI LISTjunkjunk", "invalid_video"),
        (encoded(noise(20, 20)), "unsupported_video"),
    ],
)
def test_what_is_no_video(data: bytes, code: str) -> None:
    assert refused(data).code == code


def test_limits() -> None:
    assert refused(clip(num_frames=30, fps=1), max_video_seconds=20).code == "video_too_long"
    error = refused(clip(), max_image_pixels=1000)
    assert error.code == "image_too_large"
    assert "64x48" in error.message


def test_frames_of_different_sizes() -> None:
    frames = (encoded(noise(30, 20)), encoded(noise(20, 30)))
    with pytest.raises(MediaError, match="same size"):
        processor().inspect(frames, OPTIONS)


@pytest.mark.parametrize("cut", range(0, 2000, 97))
def test_damage_anywhere_gives_a_video_or_a_media_error(cut: int) -> None:
    data = bytearray(clip(num_frames=8, fps=4))
    data[cut % len(data) : cut % len(data) + 30] = b"\xff" * 30
    with contextlib.suppress(MediaError):
        run(bytes(data))
