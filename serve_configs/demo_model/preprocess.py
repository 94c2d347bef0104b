"""From a picture to patches, as a server does it: Pillow's bicubic resize to multiples of 28, 14-pixel patches.

Patches stay uint8 and hold one frame; the second of the two frames a patch spans is the same and costs nothing here.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image
from shape import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH

FACTOR = PATCH * MERGE


def fitted(height: int, width: int) -> tuple[int, int]:
    """The height and width a picture is resized to, by the published rule."""
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"aspect ratio over 200: {height = }, {width = }")
    h, w = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR  # zero for slivers: enlarged below
    if h * w > MAX_PIXELS:
        beta = math.sqrt(height * width / MAX_PIXELS)
        return (
            max(FACTOR, math.floor(height / beta / FACTOR) * FACTOR),
            max(FACTOR, math.floor(width / beta / FACTOR) * FACTOR),
        )
    if h * w < MIN_PIXELS:
        beta = math.sqrt(MIN_PIXELS / (height * width))
        return math.ceil(height * beta / FACTOR) * FACTOR, math.ceil(width * beta / FACTOR) * FACTOR
    return h, w


def patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    """uint8 patches [rows * columns, 3 * 14 * 14], in merge-block order, and the grid (rows, columns)."""
    height, width = fitted(image.height, image.width)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    rows, columns = height // PATCH, width // PATCH
    x = np.asarray(image).reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return x.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * PATCH * PATCH), (rows, columns)
