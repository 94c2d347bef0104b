from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.preprocessor.sniff import PICTURE_FORMATS, header_size, sniff
from tests.unit.preprocessor.pictures import encoded, noise

SIZED = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


@pytest.mark.parametrize("picture_format", PICTURE_FORMATS)
def test_pictures_are_known_by_their_bytes(picture_format: str) -> None:
    found = sniff(encoded(noise(40, 30), picture_format))
    assert found.format == picture_format
    assert found.is_picture


@pytest.mark.parametrize("picture_format", SIZED)
@pytest.mark.parametrize("size", [(1, 1), (40, 30), (300, 7)])
def test_header_size(picture_format: str, size: tuple[int, int]) -> None:
    assert header_size(encoded(noise(*size), picture_format), picture_format) == size


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 50}, {"exif": Image.Exif()}])
def test_every_kind_of_webp_header(options: dict[str, object]) -> None:
    image = noise(61, 33).convert("RGBA")
    assert header_size(encoded(image, "WEBP", **options), "WEBP") == (61, 33)


def test_jpeg_size_behind_long_segments() -> None:
    data = encoded(noise(50, 20), "JPEG", comment=b"\xff\xc0" * 30000, exif=b"Exif\0\0" + b"\xff" * 5000)
    assert header_size(data, "JPEG") == (50, 20)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<!DOCTYPE html><title>hi", "HTML"),
        (b"\xef\xbb\xbf  <html>", "HTML"),
        (b'{"error": 1}', "JSON"),
        (b'<svg xmlns="x">', "SVG"),
        (b'<?xml version="1.0"?><svg>', "SVG"),
        (b'<?xml version="1.0"?><rss>', "XML"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "EPS"),
        (b"%PDF-1.7", "PDF"),
        (b"P6\n2 2\n255\n", "PPM"),
        (b"hello there", "text"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0isommp42", "MP4"),
        (b"RIFF\0\0\0\0AVI LIST", "AVI"),
        (b"\x1aE\xdf\xa3\0", "WebM/Matroska"),
        (b"\x00\x01\x02", ""),
        (b"x", ""),
        (b"", ""),
    ],
)
def test_other_things_have_names_for_the_message(data: bytes, name: str) -> None:
    found = sniff(data)
    assert found.format == name
    assert not found.is_picture
    assert found.is_video == (name in ("MP4", "AVI", "WebM/Matroska"))


@given(data=st.binary(max_size=80), picture_format=st.sampled_from(PICTURE_FORMATS))
def test_damaged_headers_never_raise(data: bytes, picture_format: str) -> None:
    sniff(data)
    header_size(data, picture_format)
