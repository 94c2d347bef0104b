"""Pictures that cost a codec what photos do. Imports no torch, since pools of processes make them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def photo_like_jpeg(width: int, height: int, *, seed: int = 7, grain_levels: float = 6.0) -> bytes:
    """Smooth areas, edges and grain, so that the file is as large as a photo's."""
    rng = np.random.default_rng(seed)
    field = rng.integers(0, 256, (max(1, height // 40), max(1, width // 40), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = rng.normal(0, grain_levels, (height, width, 1)).astype(np.float32)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
