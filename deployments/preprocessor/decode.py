"""Encoded bytes -> RGB pixels, by one guarded way that every picture passes, wherever it came from.

Each kind of file has one outcome:

    transparency (RGBA, LA, palette, colour key)  composed over the background colour (white unless configured)
    EXIF orientation                              applied; values that make no sense are ignored
    16 bits per channel                           scaled (v >> 8), not clipped
    CMYK, grey, palette, one bit                  converted to RGB
    colour profiles (ICC)                         ignored, as the models' own processors do
    several frames or pages, MPO                  the first
    progressive, declared type and bytes disagree decoded; the bytes decide
    truncated or damaged                          400 invalid_image
    float, LAB and other exotic modes             400 unsupported_image_mode
    over the pixel limit                          400 image_too_large, from the header, before any pixel buffer

Everything here blocks; run it off the event loop. Foreign exceptions end here.
"""

from __future__ import annotations

import ctypes
import functools
import io
import re
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageFile, _imaging

from deployments.errors import MediaError
from deployments.preprocessor.resize import check_aspect_ratio
from deployments.preprocessor.sniff import PICTURE_FORMATS, header_size, sniff

ACCEPTED = "JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF"

_PILLOW_FORMATS = (*PICTURE_FORMATS, "MPO")
_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DIRECT_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
_DEEP_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels after every normalisation of this module."""

    mode: Literal["RGB"]
    size: tuple[int, int]
    """(width, height), orientation applied."""
    pixels: np.ndarray
    """uint8 [height, width, 3]."""


class ImageDecoder:
    """Decodes under fixed limits. Holds no state; safe to share among threads.

    Pillow's own decompression guard is process-wide state; it is set to the same limit here, and raised as an error,
    as a second line. The first line is this module's own check.

    Args:
        max_pixels: Largest picture, width times height.
        background: Colour under transparent pixels.
        use_simplejpeg: Decode plain JPEGs by the faster library if it is installed; the pixels are the same.
    """

    def __init__(
        self, *, max_pixels: int, background: tuple[int, int, int] = (255, 255, 255), use_simplejpeg: bool = True
    ) -> None:
        self._max_pixels = max_pixels
        self._background = background
        self._simplejpeg = use_simplejpeg and _has_simplejpeg()
        Image.MAX_IMAGE_PIXELS = max_pixels
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        # Pillow warns of damage in texts that vary without end, and each would be a line on stderr.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        _silence_libtiff()

    def assert_guards(self) -> None:
        """Call once everything is imported: libraries have been seen to lift Pillow's limit on import.

        Raises:
            RuntimeError: Pillow's process-wide guards are no longer as this decoder set them.
        """
        if self._max_pixels != Image.MAX_IMAGE_PIXELS or ImageFile.LOAD_TRUNCATED_IMAGES:
            raise RuntimeError("an imported library has changed Pillow's process-wide limits")

    @property
    def settings(self) -> str:
        """Names whatever changes decoded pixels; part of the alias keys."""
        return f"decode/1 background={self._background}"

    def probe(self, data: bytes) -> tuple[int, int]:
        """(width, height) with the orientation applied as far as the header tells, without decoding pixels.

        Raises:
            MediaError: As `decode` does, for all that a header can tell.
        """
        image = self._open(data)
        try:
            width, height = image.size
            return (height, width) if _orientation(image) >= 5 and image.format != "TIFF" else (width, height)
        finally:
            image.close()

    def decode(self, data: bytes) -> DecodedImage:
        """All pixels of the (first) picture.

        Raises:
            MediaError: `empty_media`, `unsupported_image_format`, `unsupported_image_mode`, `image_too_large`,
                `image_aspect_ratio` or `invalid_image`.
        """
        image = self._open(data)
        try:
            if self._simplejpeg and (pixels := _fast_jpeg(image, data)) is not None:
                return _decoded(pixels)
            _load(image, len(data))
            self._check_size(*image.size)
            upright = _apply_orientation(image)
            return _decoded(_to_rgb(upright, self._background))
        except MemoryError:
            raise _out_of_memory() from None
        finally:
            image.close()

    def _open(self, data: bytes) -> ImageFile.ImageFile:
        """The one guarded open: known formats only, limits judged from the header."""
        if not data:
            raise MediaError("the picture is empty (0 bytes)", code="empty_media")
        sniffed = sniff(data)
        if not sniffed.is_picture:
            seen = f"is {sniffed.format}" if sniffed.format else "is of no known picture format"
            raise MediaError(
                f"the file ({len(data)} bytes) {seen}; accepted are {ACCEPTED}", code="unsupported_image_format"
            )
        if size := header_size(data, sniffed.format):
            self._check_size(*size)
        try:
            image = Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as exc:
            raise self._too_large(str(exc)) from None
        except MemoryError:
            raise _out_of_memory() from None
        except Exception:  # Pillow's plugins raise OSError, ValueError, SyntaxError, struct.error, KeyError and more
            raise _invalid(len(data)) from None
        self._check_size(*image.size)
        return image

    def _check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise MediaError(f"the picture is {width}x{height} pixels; it has no pixels at all")
        if width * height > self._max_pixels:
            raise MediaError(
                f"the picture is {width}x{height} = {width * height} pixels; at most {self._max_pixels} are allowed",
                code="image_too_large",
            )
        check_aspect_ratio(height, width)

    def _too_large(self, library_text: str) -> MediaError:
        found = re.search(r"\((\d+) pixels\)", library_text)
        seen = f"has {found[1]}" if found else "has too many"
        return MediaError(f"the picture {seen} pixels; at most {self._max_pixels} are allowed", code="image_too_large")


def _load(image: ImageFile.ImageFile, num_bytes: int) -> None:
    try:
        image.load()
    except (Image.DecompressionBombWarning, Image.DecompressionBombError, MemoryError):
        raise MediaError("the picture has more pixels than its header says", code="image_too_large") from None
    except Exception:  # codecs raise many unrelated types
        raise _invalid(num_bytes) from None


def _out_of_memory() -> MediaError:
    return MediaError("the picture needs more memory than one request may use", code="image_too_large")


def _invalid(num_bytes: int) -> MediaError:
    return MediaError(f"the picture is damaged or incomplete ({num_bytes} bytes received)")


def _decoded(pixels: np.ndarray) -> DecodedImage:
    return DecodedImage("RGB", (pixels.shape[1], pixels.shape[0]), pixels)


@functools.cache
def _silence_libtiff() -> None:
    """Damaged TIFFs would write lines of their own to stderr, as fast as callers send them; the error says enough."""
    try:
        library = ctypes.CDLL(_imaging.__file__)  # finds what Pillow's extension is linked with
        handlers = [library[f"TIFFSet{kind}Handler"] for kind in ("Error", "Warning")]
    except (OSError, AttributeError):  # a Pillow that is linked in another way: nothing lost but quiet
        return
    for handler in handlers:
        handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        handler(None)


# -- orientation ------------------------------------------------------------------------------------------------------
def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 for all that makes no sense, since metadata damage must not lose the picture."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # the EXIF parser raises many unrelated types
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _apply_orientation(image: Image.Image) -> Image.Image:
    # Asked after loading: a PNG may carry its EXIF after the pixels, and a TIFF is turned by Pillow itself.
    method = _TRANSPOSE.get(_orientation(image))
    if method is None:
        return image
    turned = image.transpose(method)
    turned.info = image.info
    return turned


# -- colour -----------------------------------------------------------------------------------------------------------
def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    if image.mode in _DEEP_MODES:
        return _deep_grey_to_rgb(image, background)
    if image.mode in _ALPHA_MODES or (image.mode in _DIRECT_MODES and "transparency" in image.info):
        layer = image if image.mode == "RGBA" else _convert(image, "RGBA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        return _array(Image.alpha_composite(canvas, layer).convert("RGB"))
    if image.mode in _DIRECT_MODES:
        return _array(image if image.mode == "RGB" else _convert(image, "RGB"))
    raise MediaError(
        f"pictures of mode {image.mode} are not supported; convert the picture to RGB", code="unsupported_image_mode"
    )


def _convert(image: Image.Image, mode: str) -> Image.Image:
    try:
        if image.mode in ("La", "PA"):  # no direct way to RGBA
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        return image.convert(mode)
    except ValueError:
        raise MediaError(
            f"pictures of mode {image.mode} are not supported; convert the picture to RGB",
            code="unsupported_image_mode",
        ) from None


def _array(image: Image.Image) -> np.ndarray:
    return np.array(image, dtype=np.uint8)


def _deep_grey_to_rgb(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    """16-bit grey, scaled; a colour key becomes the background."""
    values = np.asarray(image)
    if image.mode == "I" and values.size and (values.min() < 0 or values.max() > 0xFFFF):
        raise MediaError("32-bit pictures are not supported; convert the picture to RGB", code="unsupported_image_mode")
    grey = (values >> 8).astype(np.uint8)
    pixels = np.repeat(grey[:, :, None], 3, axis=2)
    key = image.info.get("transparency")
    if isinstance(key, int):
        pixels[values == key] = background
    return pixels


# -- the fast path for plain JPEGs ------------------------------------------------------------------------------------
def _has_simplejpeg() -> bool:
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return True


def _fast_jpeg(image: ImageFile.ImageFile, data: bytes) -> np.ndarray | None:
    """Pixels of a plain JPEG by simplejpeg; None hands anything out of the ordinary, damage included, to Pillow."""
    if image.format not in ("JPEG", "MPO") or image.mode not in ("L", "RGB"):
        return None
    import simplejpeg

    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except (ValueError, MemoryError):
        return None
    if pixels.shape[:2] != (image.size[1], image.size[0]):
        return None
    return _turn(pixels, _orientation(image))


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What `_apply_orientation` does, on an array."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    flip_rows = orientation in (3, 4, 7, 8)
    flip_columns = orientation in (2, 3, 6, 7)
    turned = pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]
    return np.ascontiguousarray(turned)
