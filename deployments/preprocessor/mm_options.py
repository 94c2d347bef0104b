"""A request's `mm_processor_kwargs` and `detail`, as bounds on the resized area. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.errors import InvalidRequestError
from deployments.preprocessor.resize import PixelLimits

LOW_DETAIL_PIXELS = 512 * 512
"""Area that `detail: low` allows; `high` and `auto` allow what the server does."""

_PARAM = "mm_processor_kwargs"
_NAMES = ("min_pixels", "max_pixels")


def parse_pixel_limits(kwargs: Mapping[str, Any], bounds: PixelLimits) -> PixelLimits:
    """The request's limits within the server's `bounds`; a larger `max_pixels` is clamped to the server's.

    Raises:
        InvalidRequestError: Unknown names, values that are no positive whole numbers, or min_pixels above max_pixels.
    """
    if unknown := sorted(set(kwargs) - set(_NAMES)):
        raise InvalidRequestError(
            f"unknown names in mm_processor_kwargs: {', '.join(unknown)[:200]}; allowed: {', '.join(_NAMES)}",
            param=_PARAM,
        )
    for name, value in kwargs.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequestError(f"{name} must be a whole number of at least 1", param=f"{_PARAM}.{name}")
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


def apply_detail(limits: PixelLimits, detail: str) -> PixelLimits:
    """`detail: low` caps the area at 512 x 512 pixels."""
    if detail != "low":
        return limits
    max_pixels = min(limits.max_pixels, LOW_DETAIL_PIXELS)
    return PixelLimits(min(limits.min_pixels, max_pixels), max_pixels)


def server_pixel_limits(options: Mapping[str, int], checkpoint: PixelLimits) -> PixelLimits:
    """The operator's bounds, with the checkpoint's own where an option is left out.

    Raises:
        ValueError: The two don't fit together.
    """
    max_pixels = options.get("max_pixels", max(checkpoint.max_pixels, options.get("min_pixels", 1)))
    min_pixels = options.get("min_pixels", min(checkpoint.min_pixels, max_pixels))
    return PixelLimits(min_pixels, max_pixels)
