"""Draws marks with Pillow: shapes, text in two faces, seven-segment digits, and what disturbs a picture.

Knows nothing of questions. Uses only the fonts that come inside Pillow, so a picture is the same everywhere.
"""

from __future__ import annotations

import functools
import io
import math
import random

import numpy as np
from palette import RGB
from PIL import Image, ImageChops, ImageDraw, ImageFont

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross", "diamond")

# Which of the segments a..g (top, top right, bottom right, bottom, bottom left, top left, middle) light up.
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def outline(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    """The corners of a shape whose bounding box is about 2r wide, centred on (x, y)."""
    if shape == "square":
        s = r * 0.88
        return [(x - s, y - s), (x + s, y - s), (x + s, y + s), (x - s, y + s)]
    if shape == "triangle":
        return [(x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)]
    if shape == "diamond":
        return [(x, y - r), (x + 0.78 * r, y), (x, y + r), (x - 0.78 * r, y)]
    if shape == "cross":
        a = 0.34 * r
        return [
            (x - a, y - r),
            (x + a, y - r),
            (x + a, y - a),
            (x + r, y - a),
            (x + r, y + a),
            (x + a, y + a),
            (x + a, y + r),
            (x - a, y + r),
            (x - a, y + a),
            (x - r, y + a),
            (x - r, y - a),
            (x - a, y - a),
        ]
    if shape == "star":
        turns = [(i * math.pi / 5 - math.pi / 2, r if i % 2 == 0 else 0.42 * r) for i in range(10)]
        return [(x + d * math.cos(t), y + d * math.sin(t)) for t, d in turns]
    raise ValueError(f"unknown {shape = }")


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: RGB, edge: RGB | None) -> None:
    """One filled shape, with a thin edge if `edge` is given."""
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=edge)
    else:
        pen.polygon(outline(shape, x, y, r), fill=fill, outline=edge)


@functools.lru_cache(maxsize=256)
def smooth_font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own outline font at `size` pixels."""
    return ImageFont.load_default(size)


def text_mask(text: str, face: str, height: int, stroke: int) -> Image.Image:
    """An L-mode picture of `text`, its ink about `height` pixels tall, cropped to the ink.

    Faces: "smooth" (outline font), "pixel" (Pillow's bitmap font enlarged), "segment" (digits only).
    """
    if face == "segment":
        return segment_mask(text, height, (0.09, 0.11, 0.14)[min(stroke, 2)])
    if face == "pixel":
        font = ImageFont.load_default_imagefont()
        left, top, right, bottom = font.getbbox(text)
        small = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
        ImageDraw.Draw(small).text((1, 1), text, fill=255, font=font)
        small = small.crop(small.getbbox() or (0, 0, 1, 1))
        scale = max(2, round(height / small.height))
        return small.resize((small.width * scale, small.height * scale), Image.Resampling.NEAREST)
    font = smooth_font(max(8, round(height / 0.72)))
    left, top, right, bottom = font.getbbox(text, stroke_width=stroke)
    mask = Image.new("L", (int(right - left) + 4, int(bottom - top) + 4))
    ImageDraw.Draw(mask).text((2 - left, 2 - top), text, fill=255, font=font, stroke_width=stroke)
    return mask.crop(mask.getbbox() or (0, 0, 1, 1))


def segment_mask(digits: str, height: int, weight: float) -> Image.Image:
    """Digits as a clock's display draws them; a one keeps its full cell, as on a display."""
    h = max(height, 14)
    w, t, gap = round(h * 0.52), max(2, round(h * weight)), max(3, round(h * 0.16))
    mask = Image.new("L", (len(digits) * (w + gap) - gap, h))
    pen = ImageDraw.Draw(mask)
    mid = h // 2
    for i, digit in enumerate(digits):
        x = i * (w + gap)
        boxes = {
            "a": (x, 0, x + w - 1, t - 1),
            "d": (x, h - t, x + w - 1, h - 1),
            "g": (x, mid - t // 2, x + w - 1, mid - t // 2 + t - 1),
            "f": (x, 0, x + t - 1, mid),
            "b": (x + w - t, 0, x + w - 1, mid),
            "e": (x, mid, x + t - 1, h - 1),
            "c": (x + w - t, mid, x + w - 1, h - 1),
        }
        for name in SEGMENTS[int(digit)]:
            pen.rectangle(boxes[name], fill=255)
    return mask


def disturb(rng: random.Random, image: Image.Image) -> Image.Image:
    """Adds noise or a slope of light, as cameras and scanners do; never enough to change a colour's name."""
    roll = rng.random()
    if roll < 0.12:
        strength = rng.randint(4, 12)
        gen = np.random.default_rng(rng.getrandbits(32))
        noise = gen.integers(-strength, strength + 1, (image.height, image.width, 3), dtype=np.int16)
        return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    if roll < 0.22:
        slope = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(image.size)
        depth = rng.randint(8, 20)
        slope = slope.point([round(i * depth / 255) for i in range(256)])
        layer = Image.merge("RGB", (slope, slope, slope))
        return ImageChops.add(image, layer) if rng.random() < 0.5 else ImageChops.subtract(image, layer)
    return image


def as_jpeg(image: Image.Image, quality: int) -> bytes:
    """The picture as JPEG bytes."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def as_png(image: Image.Image) -> bytes:
    """The picture as PNG bytes."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
