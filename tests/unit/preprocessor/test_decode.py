from __future__ import annotations

import ast
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from deployments.errors import MediaError
from deployments.preprocessor import decode as decode_module
from deployments.preprocessor.decode import DecodedImage, ImageDecoder
from tests.unit.preprocessor import pictures
from tests.unit.preprocessor.pictures import encoded, noise, png_chunk, quarters

WHITE = (255, 255, 255)


@pytest.fixture(params=[True, False], ids=["simplejpeg", "pillow"])
def decoder(request: pytest.FixtureRequest) -> ImageDecoder:
    return ImageDecoder(max_pixels=1_000_000, use_simplejpeg=request.param)


def pixel(image: DecodedImage, x: int, y: int) -> tuple[int, ...]:
    return tuple(int(level) for level in image.pixels[y, x])


def refuse(decoder: ImageDecoder, data: bytes) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decoder.decode(data)
    return caught.value


# -- what comes out ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 40), (3, 17), (64, 48)])
def test_always_rgb_rows_first(decoder: ImageDecoder, picture_format: str, size: tuple[int, int]) -> None:
    data = encoded(noise(*size), picture_format)
    image = decoder.decode(data)
    assert image.mode == "RGB"
    assert image.size == size == decoder.probe(data)
    assert image.pixels.shape == (size[1], size[0], 3)
    assert image.pixels.dtype == np.uint8
    assert image.pixels.flags.c_contiguous


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_modes_without_alpha(decoder: ImageDecoder, mode: str) -> None:
    source = quarters().convert(mode)
    assert np.array_equal(decoder.decode(encoded(source)).pixels, np.asarray(source.convert("RGB")))


def test_cmyk_jpeg(decoder: ImageDecoder) -> None:
    image = decoder.decode(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(np.array(pixel(image, 8, 8)) - (255, 0, 0)).max() < 8


def test_grey_jpeg_has_three_equal_channels(decoder: ImageDecoder) -> None:
    pixels = decoder.decode(encoded(Image.new("L", (20, 10), 200), "JPEG")).pixels
    assert (pixels == 200).all()


def test_sixteen_bit_grey_is_scaled(decoder: ImageDecoder) -> None:
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16)[None].repeat(4, 0)
    pixels = decoder.decode(encoded(Image.fromarray(ramp))).pixels
    assert np.array_equal(pixels[0, :, 0], ramp[0] >> 8)


def test_sixteen_bit_tiff_is_scaled(decoder: ImageDecoder) -> None:
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16)[None].repeat(4, 0)
    assert np.array_equal(decoder.decode(encoded(Image.fromarray(ramp), "TIFF")).pixels[0, :, 1], ramp[0] >> 8)


@pytest.mark.parametrize("picture_format", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_composed_over_white(decoder: ImageDecoder, picture_format: str) -> None:
    source = noise(32, 16).convert("RGBA")
    source.paste((255, 0, 0, 128), (16, 0, 32, 16))
    source.putalpha(Image.fromarray(np.repeat([[0] * 16 + [128] * 16], 16, 0).astype(np.uint8)))
    options = {"lossless": True, "exact": True} if picture_format == "WEBP" else {}
    image = decoder.decode(encoded(source, picture_format, **options))
    assert pixel(image, 2, 2) == WHITE
    assert np.abs(np.array(pixel(image, 20, 2)) - (255, 127, 127)).max() <= 1


def test_grey_with_alpha(decoder: ImageDecoder) -> None:
    source = Image.new("LA", (8, 8), (90, 255))
    source.putpixel((7, 7), (90, 0))
    image = decoder.decode(encoded(source))
    assert pixel(image, 0, 0) == (90, 90, 90)
    assert pixel(image, 7, 7) == WHITE


@pytest.mark.parametrize("table", [b"\x00\xff", 0], ids=["alpha per entry", "one index"])
def test_palette_transparency(decoder: ImageDecoder, table: bytes | int) -> None:
    source = Image.new("P", (16, 16), 0)
    source.putpalette([9, 9, 9, 30, 170, 60])
    source.paste(1, (8, 0, 16, 16))
    image = decoder.decode(encoded(source, transparency=table))
    assert pixel(image, 0, 0) == WHITE
    assert pixel(image, 15, 0) == (30, 170, 60)


@pytest.mark.parametrize(("mode", "key", "other"), [("RGB", (9, 8, 7), (40, 60, 210)), ("L", 9, 200)])
def test_colour_key(decoder: ImageDecoder, mode: str, key: object, other: object) -> None:
    source = Image.new(mode, (16, 16), key)  # type: ignore[arg-type]
    source.paste(other, (8, 0, 16, 16))  # type: ignore[arg-type]
    image = decoder.decode(encoded(source, transparency=key))
    assert pixel(image, 0, 0) == WHITE
    assert pixel(image, 15, 0) == (other if mode == "RGB" else (200, 200, 200))


def test_background_is_configurable() -> None:
    decoder = ImageDecoder(max_pixels=1000, background=(1, 2, 3))
    assert pixel(decoder.decode(encoded(Image.new("RGBA", (4, 4), (9, 9, 9, 0)))), 0, 0) == (1, 2, 3)
    assert decoder.settings != ImageDecoder(max_pixels=1000).settings


# -- orientation ------------------------------------------------------------------------------------------------------
UNDO = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", UNDO)
@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(decoder: ImageDecoder, picture_format: str, orientation: int) -> None:
    method = UNDO[orientation]
    stored = quarters() if method is None else quarters().transpose(method)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if picture_format == "JPEG" else {"lossless": True} if picture_format == "WEBP" else {}
    data = encoded(stored, picture_format, exif=exif, **options)
    image = decoder.decode(data)
    assert image.size == (48, 32) == decoder.probe(data)
    for x, y in ((4, 4), (43, 4), (4, 27), (43, 27)):
        expected = quarters().getpixel((x, y))
        assert np.abs(np.array(pixel(image, x, y)) - expected).max() <= 12


@pytest.mark.parametrize("value", [0, 9, 77])
def test_senseless_orientation_is_ignored(decoder: ImageDecoder, value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert decoder.decode(encoded(quarters(), "JPEG", exif=exif)).size == (48, 32)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0" + bytes(range(200)),
        b"Exif\0\0",
        # one entry: the orientation tag with ASCII type
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x026\0\0\0\0\0\0\0",
    ],
)
def test_damaged_metadata_does_not_lose_the_picture(decoder: ImageDecoder, exif: bytes) -> None:
    assert decoder.decode(encoded(quarters(), "JPEG", exif=exif)).size == (48, 32)


def test_damaged_colour_profile_does_not_lose_the_picture(decoder: ImageDecoder) -> None:
    image = decoder.decode(encoded(quarters(), "PNG", icc_profile=b"garbage" * 9))
    assert np.array_equal(image.pixels, np.asarray(quarters()))


# -- several frames ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("picture_format", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("PNG", {})]
)
def test_the_first_frame_counts(decoder: ImageDecoder, picture_format: str, options: dict[str, object]) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in (pictures.RED, (0, 255, 0), (0, 0, 255))]
    data = encoded(frames[0], picture_format, save_all=True, append_images=frames[1:], **options)
    assert pixel(decoder.decode(data), 5, 5) == pictures.RED


def test_multi_picture_jpeg(decoder: ImageDecoder) -> None:
    data = encoded(quarters(), "MPO", save_all=True, append_images=[Image.new("RGB", (12, 8))])
    assert decoder.decode(data).size == (48, 32)


# -- faults -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.97])
@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_truncated_files_are_refused(decoder: ImageDecoder, picture_format: str, keep: float) -> None:
    data = encoded(noise(160, 120), picture_format)
    data = data[: int(len(data) * keep)]
    error = refuse(decoder, data)
    assert error.code == "invalid_image"
    assert str(len(data)) in error.message


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", b"abc"),
        pictures.png_claiming(0, 0),
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a\x10\0\x10\0",
        b"RIFF\x20\0\0\0WEBPVP8 junkjunkjunk",
        b"II*\0\xff\xff\xff\xff",
        b"BM" + b"\xff" * 60,
    ],
)
def test_damaged_headers_are_refused(decoder: ImageDecoder, data: bytes) -> None:
    assert refuse(decoder, data).code in ("invalid_image", "image_too_large")


def test_broken_compressed_stream(decoder: ImageDecoder) -> None:
    header = struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", b"\x78\x9c" + b"\xff" * 40) + png_chunk(b"IEND", b"")
    assert refuse(decoder, b"\x89PNG\r\n\x1a\n" + body).code == "invalid_image"


@pytest.mark.parametrize(
    "data", [b"<html>", b"{}", b"%!PS-Adobe", b"<svg/>", b"plain words", b"\0\0\0\x18ftypheic\0\0\0\0"]
)
def test_other_formats_are_named(decoder: ImageDecoder, data: bytes) -> None:
    error = refuse(decoder, data)
    assert error.code == "unsupported_image_format"
    assert "JPEG, PNG" in error.message


def test_empty(decoder: ImageDecoder) -> None:
    assert refuse(decoder, b"").code == "empty_media"


def test_float_and_lab_are_refused_by_name(decoder: ImageDecoder) -> None:
    for mode in ("F", "LAB"):
        error = refuse(decoder, encoded(Image.new(mode, (8, 8)), "TIFF"))
        assert error.code == "unsupported_image_mode"
        assert mode in error.message


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (2010, 10)])
def test_aspect_ratio_over_200(decoder: ImageDecoder, size: tuple[int, int]) -> None:
    assert refuse(decoder, encoded(Image.new("L", size))).code == "image_aspect_ratio"


@pytest.mark.parametrize("size", [(200, 1), (1, 200), (2000, 10)])
def test_aspect_ratio_of_200(decoder: ImageDecoder, size: tuple[int, int]) -> None:
    assert decoder.decode(encoded(Image.new("L", size))).size == size


@pytest.mark.parametrize("step", ["open", "load"])
def test_lack_of_memory_costs_one_request(decoder: ImageDecoder, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError

    data = encoded(noise(20, 20))
    if step == "open":
        monkeypatch.setattr(Image, "open", fail)
    else:
        monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert refuse(decoder, data).code == "image_too_large"


# -- bombs ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", ["png", "gif", "bmp", "jpeg", "webp", "tiff"])
@pytest.mark.parametrize("size", [(1001, 1001), (12000, 12000), (16000, 16000)])
def test_bombs_are_refused_from_their_header(
    decoder: ImageDecoder, make: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    data = getattr(pictures, f"{make}_claiming")(*size)
    for method in (decoder.probe, decoder.decode):
        with pytest.raises(MediaError) as caught:
            method(data)
        assert caught.value.code == "image_too_large"
        assert str(size[0] * size[1]) in caught.value.message
        assert "1000000" in caught.value.message


def test_webp_bomb_never_reaches_the_library(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The WebP plugin allocates its canvas when it opens a file."""
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: pytest.fail("opened"))
    assert refuse(decoder, pictures.webp_claiming(16000, 16000)).code == "image_too_large"


def test_a_compressed_bomb_of_one_bit(decoder: ImageDecoder) -> None:
    header = struct.pack(">IIBBBBB", 30000, 30000, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (3751 * 300))
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    assert refuse(decoder, data).code == "image_too_large"


def test_librarys_own_guard_stands_at_the_same_limit() -> None:
    ImageDecoder(max_pixels=123_456)
    import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl  # noqa: F401 - importing must not move it

    assert Image.MAX_IMAGE_PIXELS == 123_456
    with pytest.raises((Image.DecompressionBombWarning, Image.DecompressionBombError)):
        Image.open(io.BytesIO(pictures.png_claiming(400, 400)))


def test_there_is_one_guarded_open() -> None:
    """Every other way to open a picture would need these guards again."""
    stage = Path(decode_module.__file__).parent
    found = []
    for path in sorted(stage.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Image.open":
                found.append(path.name)
    assert found == ["decode.py"]


# -- the fast path ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"quality": 50}, {"progressive": True}, {"subsampling": 0}, {"quality": 100}])
@pytest.mark.parametrize("size", [(64, 64), (161, 119), (17, 33), (1, 1)])
def test_both_jpeg_paths_give_the_same_pixels(size: tuple[int, int], options: dict[str, object]) -> None:
    data = encoded(noise(*size), "JPEG", **options)
    fast = ImageDecoder(max_pixels=10**6, use_simplejpeg=True).decode(data).pixels
    plain = ImageDecoder(max_pixels=10**6, use_simplejpeg=False).decode(data).pixels
    assert np.array_equal(fast, plain)


# -- anything at all --------------------------------------------------------------------------------------------------
SEEDS = [
    encoded(noise(24, 18), picture_format) for picture_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_files_give_pixels_or_a_media_error(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decoder = ImageDecoder(max_pixels=100_000)
    try:
        image = decoder.decode(bytes(raw))
    except MediaError:
        return
    assert image.pixels.shape == (image.size[1], image.size[0], 3)


def test_no_library_lifts_the_process_wide_limits() -> None:
    """In a process of its own: everything a worker imports, then what other libraries are known to do."""
    script = (
        "from deployments.preprocessor.config import PreprocessorConfig as C\n"
        "from deployments.preprocessor.processor import MediaProcessor\n"
        "from tests.unit.preprocessor.test_families import FAMILY\n"
        "from PIL import Image, ImageFile\n"
        "MediaProcessor(C(max_image_pixels=12345), FAMILY)\n"
        "import av, simplejpeg, torch, transformers.image_utils\n"
        "assert Image.MAX_IMAGE_PIXELS == 12345 and not ImageFile.LOAD_TRUNCATED_IMAGES\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_lifted_limits_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ImageDecoder(max_pixels=1000)
    decoder.assert_guards()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(RuntimeError, match="limits"):
        decoder.assert_guards()
