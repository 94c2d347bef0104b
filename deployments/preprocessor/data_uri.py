"""`data:` URIs by their grammar (RFC 2397), as lenient about the payload's dress as clients need and no more.

    data:[type/subtype][;name=value]*[;base64],payload

The last token before the comma decides the encoding, in any case. Base64 may be folded, unpadded, URL-safe or
percent-encoded. The size is known, and judged, before anything is decoded. Messages give lengths, never the payload.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from deployments.errors import MediaError

_WHITESPACE = " \t\r\n\f\v"
_SCHEME = "data:"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_MAX_HEADER_CHARS = 1024


@dataclass(frozen=True, slots=True)
class DataUri:
    """A `data:` URI whose header is understood and whose payload is still encoded."""

    media_type: str
    """Lower-case `type/subtype` as declared, without parameters; empty if none. A hint only."""
    is_base64: bool
    payload: str

    @property
    def max_decoded_bytes(self) -> int:
        """Upper bound of the payload's decoded size; exact but for padding and percent escapes."""
        if not self.is_base64:
            return len(self.payload)
        return (len(self.payload) - sum(self.payload.count(char) for char in _WHITESPACE)) * 3 // 4


def is_data_uri(url: str) -> bool:
    return url[: len(_SCHEME)].lower() == _SCHEME


def parse_data_uri(url: str) -> DataUri:
    """Understand the header; cheap, whatever the payload's length.

    Raises:
        MediaError: `invalid_data_uri` for no comma, an overlong header or a prefix inside the payload.
    """
    comma = url.find(",", len(_SCHEME), len(_SCHEME) + _MAX_HEADER_CHARS)
    if comma < 0:
        raise MediaError(
            f"the data: URI ({len(url)} characters) has no comma between its header and its data",
            code="invalid_data_uri",
        )
    tokens = [token.strip() for token in url[len(_SCHEME) : comma].split(";")]
    payload = url[comma + 1 :]
    if is_data_uri(payload.lstrip(_WHITESPACE)[: len(_SCHEME)]):
        raise MediaError("the data: URI holds a second data: prefix in its data", code="invalid_data_uri")
    is_base64 = len(tokens) > 1 and tokens[-1].lower() == "base64"
    return DataUri(tokens[0].lower(), is_base64, payload)


def decode_data_uri(uri: DataUri, max_bytes: int) -> bytes:
    """The payload's bytes.

    Raises:
        MediaError: `media_too_large` (before decoding), `empty_media`, or `invalid_base64` with the length received.
    """
    if uri.max_decoded_bytes - 2 > max_bytes and (uri.is_base64 or "%" not in uri.payload):
        raise _too_large(uri.max_decoded_bytes, max_bytes)
    data = _decode_base64(uri.payload) if uri.is_base64 else _decode_percent(uri.payload)
    if not data:
        raise MediaError("the data: URI holds no data", code="empty_media")
    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes)
    return data


def _too_large(num_bytes: int, max_bytes: int) -> MediaError:
    return MediaError(f"the media is {num_bytes} bytes long; at most {max_bytes} are allowed", code="media_too_large")


def _decode_percent(payload: str) -> bytes:
    try:
        return unquote_to_bytes(payload.encode("ascii"))
    except UnicodeEncodeError:
        raise MediaError(
            "the data: URI holds characters outside ASCII that are not percent-encoded", code="invalid_data_uri"
        ) from None


def _decode_base64(payload: str) -> bytes:
    try:
        raw = payload.encode("ascii")
        if b"%" in raw:
            raw = unquote_to_bytes(raw)
        raw = raw.translate(_URL_SAFE, _WHITESPACE.encode()).rstrip(b"=")
        if len(raw) % 4 == 1:
            raise MediaError(
                f"the base64 data is incomplete: {len(raw)} characters were received, no whole number of bytes",
                code="invalid_base64",
            )
        return binascii.a2b_base64(raw + b"=" * (-len(raw) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise MediaError(
            f"the data is not valid base64 ({len(payload)} characters received)", code="invalid_base64"
        ) from None
