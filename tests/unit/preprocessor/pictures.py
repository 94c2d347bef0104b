"""Small pictures made on the spot, sound and unsound ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

RED = (220, 30, 30)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth random colours: compresses like a photo, and every region differs."""
    coarse = np.random.default_rng(seed).integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def quarters(width: int = 48, height: int = 32) -> Image.Image:
    """Red, green / blue, white: shows every turn and flip."""
    image = Image.new("RGB", (width, height), (255, 255, 255))
    image.paste(RED, (0, 0, width // 2, height // 2))
    image.paste((30, 170, 60), (width // 2, 0, width, height // 2))
    image.paste((40, 60, 210), (0, height // 2, width // 2, height))
    return image


def encoded(image: Image.Image, picture_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, picture_format, **options)
    return buffer.getvalue()


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0" * 64)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def gif_claiming(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0" + b"," + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0;"


def bmp_claiming(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 70, 0, 0, 54) + header + b"\0" * 16


def jpeg_claiming(width: int, height: int) -> bytes:
    """A real JPEG with another size written into its frame header."""
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_claiming(width: int, height: int) -> bytes:
    """An extended WebP header with a canvas of this size and no frame."""
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0"
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tiff_claiming(width: int, height: int) -> bytes:
    """A one-strip RGB TIFF header with far too little data."""
    entries = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 200),
        (277, 3, 1),
        (278, 4, height),
        (279, 4, 16),
    ]
    directory = struct.pack("<H", len(entries))
    for tag, kind, value in entries:
        directory += struct.pack("<HHII", tag, kind, 1, value)
    return (b"II*\0" + struct.pack("<I", 8) + directory + b"\0\0\0\0").ljust(200, b"\0") + b"\0" * 16


def clip(
    num_frames: int = 8,
    fps: int = 4,
    size: tuple[int, int] = (64, 48),
    container: str = "mp4",
    codec: str = "mpeg4",
) -> bytes:
    """A video whose frames get brighter one by one."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for index in range(num_frames):
            level = 20 + index * 200 // max(1, num_frames)
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), level, np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()
