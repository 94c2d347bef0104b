"""A request's `mm_processor_kwargs` and `detail`, as MediaOptions within the server's bounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployments.errors import InvalidRequestError
from deployments.preprocessor.media import MediaOptions
from deployments.preprocessor.resize import PixelLimits

LOW_DETAIL_PIXELS = 512 * 512
"""Area that `detail: low` allows; `high` and `auto` allow what the server does."""

_PARAM = "mm_processor_kwargs"
_COUNTS = ("min_pixels", "max_pixels", "num_frames")
_NAMES = (*_COUNTS, "fps")
_MAX_FPS = 60


def parse_media_options(kwargs: Mapping[str, Any], defaults: MediaOptions) -> MediaOptions:
    """The request's options; `defaults` are the server's and bound the area.

    A larger `max_pixels` is clamped to the server's. `fps` and `num_frames` concern videos only.

    Raises:
        InvalidRequestError: Unknown names, values of the wrong kind, min_pixels above max_pixels, or both `fps` and
            `num_frames`.
    """
    _check_values(kwargs)
    asks_pixels = "min_pixels" in kwargs or "max_pixels" in kwargs
    image_limits = _limits(kwargs, defaults.image_limits)
    return MediaOptions(
        image_limits=image_limits,
        frame_limits=image_limits if asks_pixels else defaults.frame_limits,
        fps=float(kwargs.get("fps", defaults.fps)),
        num_frames=kwargs.get("num_frames", defaults.num_frames),
    )


def apply_detail(options: MediaOptions, detail: str) -> MediaOptions:
    """`detail: low` caps a picture's area at 512 x 512 pixels."""
    if detail != "low":
        return options
    limits = options.image_limits
    max_pixels = min(limits.max_pixels, LOW_DETAIL_PIXELS)
    return replace(options, image_limits=PixelLimits(min(limits.min_pixels, max_pixels), max_pixels))


def server_pixel_limits(options: Mapping[str, int], checkpoint: PixelLimits) -> PixelLimits:
    """The operator's bounds, with the checkpoint's own where an option is left out.

    Raises:
        ValueError: The two don't fit together.
    """
    max_pixels = options.get("max_pixels", max(checkpoint.max_pixels, options.get("min_pixels", 1)))
    min_pixels = options.get("min_pixels", min(checkpoint.min_pixels, max_pixels))
    return PixelLimits(min_pixels, max_pixels)


def _check_values(kwargs: Mapping[str, Any]) -> None:
    if unknown := sorted(set(kwargs) - set(_NAMES)):
        raise InvalidRequestError(
            f"unknown names in mm_processor_kwargs: {', '.join(unknown)[:200]}; allowed: {', '.join(_NAMES)}",
            param=_PARAM,
        )
    for name in _COUNTS:
        value = kwargs.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequestError(f"{name} must be a whole number of at least 1", param=f"{_PARAM}.{name}")
    fps = kwargs.get("fps", 1)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= _MAX_FPS:
        raise InvalidRequestError(f"fps must be a number above 0 and at most {_MAX_FPS}", param=f"{_PARAM}.fps")
    if "fps" in kwargs and "num_frames" in kwargs:
        raise InvalidRequestError("fps and num_frames exclude each other", param=_PARAM)


def _limits(kwargs: Mapping[str, Any], bounds: PixelLimits) -> PixelLimits:
    max_pixels = min(kwargs.get("max_pixels", bounds.max_pixels), bounds.max_pixels)
    # A smaller maximum alone takes the server's own minimum down with it.
    min_pixels = kwargs.get("min_pixels", min(bounds.min_pixels, max_pixels))
    if min_pixels > max_pixels:
        raise InvalidRequestError(
            f"min_pixels ({min_pixels}) is above max_pixels ({max_pixels}; the server allows up to "
            f"{bounds.max_pixels})",
            param=_PARAM,
        )
    return PixelLimits(min_pixels, max_pixels)
