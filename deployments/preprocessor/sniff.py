"""What a file is and how large its picture claims to be, from its first bytes alone. Pure; trusts no declared type.

Sizes are read here, before any decoder sees the file, since some decoders allocate a canvas on opening.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PICTURE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats that are decoded, by Pillow's names. An MPO file is a JPEG here."""

_HEAD_BYTES = 512
_SOF_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True, slots=True)
class Sniffed:
    format: str
    """One of PICTURE_FORMATS, or a name for the message: `HEIC`, `SVG`, `HTML`, `MP4`, ...; empty if unknown."""

    @property
    def is_picture(self) -> bool:
        return self.format in PICTURE_FORMATS

    @property
    def is_video(self) -> bool:
        return self.format in ("MP4", "AVI", "WebM/Matroska", "MPEG")


def sniff(data: bytes) -> Sniffed:
    """Judge a file by its first bytes."""
    return Sniffed(_binary_format(data) or _text_format(data[:_HEAD_BYTES]))


def _binary_format(data: bytes) -> str:
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF":
        return {b"WEBP": "WEBP", b"AVI ": "AVI", b"WAVE": "WAV"}.get(data[8:12], "")
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:2] == b"BM" and len(data) >= 26:
        return "BMP"
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if data[4:8] == b"ftyp":
        return _iso_media_format(data)
    return _other_binary_format(data)


def _iso_media_format(data: bytes) -> str:
    size = min(int.from_bytes(data[:4], "big"), 256)
    brands = {data[8:12], *(data[i : i + 4] for i in range(16, size, 4))}
    if brands & {b"avif", b"avis"}:
        return "AVIF"
    if brands & {b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"}:
        return "HEIC"
    return "MP4"


def _other_binary_format(data: bytes) -> str:
    magics = {
        b"\x1aE\xdf\xa3": "WebM/Matroska",
        b"\x00\x00\x01\xba": "MPEG",
        b"\x00\x00\x01\xb3": "MPEG",
        b"\x00\x00\x01\x00": "ICO",
        b"%PDF": "PDF",
        b"8BPS": "PSD",
        b"\xff\x0a": "JPEG XL",
        b"\x00\x00\x00\x0cJXL ": "JPEG XL",
        b"\x00\x00\x00\x0cjP  ": "JPEG 2000",
        b"\xc5\xd0\xd3\xc6": "EPS",
        b"%!PS": "EPS",
        b"PK\x03\x04": "ZIP",
        b"\x1f\x8b": "gzip",
    }
    return next((name for magic, name in magics.items() if data.startswith(magic)), "")


def _text_format(head: bytes) -> str:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        return "SVG" if b"<svg" in text else "XML"
    if text.startswith((b"{", b"[")):
        return "JSON"
    if head[:2] in (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7") and head[2:3].isspace():
        return "PPM"
    return "text" if len(head) > 1 and all(byte >= 32 or byte in b"\t\r\n\f" for byte in head) else ""


def header_size(data: bytes, picture_format: str) -> tuple[int, int] | None:
    """(width, height) that the header claims; None where it can't be read here (TIFF, AVIF, damaged headers)."""
    reader = {
        "PNG": _png_size,
        "GIF": _gif_size,
        "BMP": _bmp_size,
        "WEBP": _webp_size,
        "JPEG": _jpeg_size,
    }.get(picture_format)
    if reader is None:
        return None
    try:
        return reader(data)
    except (struct.error, IndexError):
        return None


def _png_size(data: bytes) -> tuple[int, int] | None:
    if data[8:16] != b"\0\0\0\x0dIHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _gif_size(data: bytes) -> tuple[int, int] | None:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _bmp_size(data: bytes) -> tuple[int, int] | None:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)


def _webp_size(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """The frame header's size; walks the segments before it without looking inside."""
    position = 2
    while position + 9 <= len(data):
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _SOF_MARKERS:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return width, height
        elif marker in (0x01, *range(0xD0, 0xD8)):  # markers without a segment
            position += 2
        elif marker in (0xD9, 0xDA):  # end or scan before any frame
            return None
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None
