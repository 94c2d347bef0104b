"""What a cached value looks like as bytes: a self-describing header and the raw payload. No pickle, ever.

    offset  size  field (little-endian)
         0     4  magic `SLCV`
         4     2  format version
         6     2  header length in bytes, meta and padding included; a multiple of 64
         8    32  blake3 over everything after this field (rest of the header, and the payload)
        40     1  kind: 1 array, 2 record
        41     1  dtype code (0 for a record)
        42     1  dimensions, 0 to 4
        43     1  zero
        44     4  meta length in bytes
        48     8  payload length in bytes
        56     8  created, Unix seconds
        64    32  identity: the key that the value was made for
        96     8  namespace label, for the operator's tools (`label`); not a key
       104     8  model label, likewise
       112    32  shape, 4 x u64, unused ones zero
       144    12  grid (time, height, width), 3 x u32
       156     4  zero
       160     .  meta as canonical JSON, zero padding up to the header length
         .     .  payload: the array in C order, or the record as canonical JSON

A reader accepts a value only whole: lengths, dtype, shape against payload, identity against the key it asked for, and
the checksum. Whatever is wrong is one error, `CorruptValueError`; the caller deletes the value and counts a miss.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from cache_service.identity import DIGEST_BYTES

MAGIC = b"SLCV"
FORMAT_VERSION = 1
LABEL_BYTES = 8
FIXED_HEADER_BYTES = 160
MAX_HEADER_BYTES = 16 * 1024
"""Bounds `meta`; the length field would allow four times as much."""

_PREFIX = struct.Struct("<4sHH32s")
_BODY = struct.Struct("<BBBxIQQ32s8s8s4Q3I4x")
_ALIGN = 64
_MAX_DIMS = 4
_KIND_ARRAY, _KIND_RECORD = 1, 2

_DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "float32": (1, np.dtype("<f4")),
    "float16": (2, np.dtype("<f2")),
    "bfloat16": (3, np.dtype("<u2")),  # NumPy has none: the same bits as uint16
    "uint8": (4, np.dtype("u1")),
    "int32": (5, np.dtype("<i4")),
    "int64": (6, np.dtype("<i8")),
}
_DTYPE_NAMES = {code: name for name, (code, _) in _DTYPES.items()}

assert _PREFIX.size + _BODY.size == FIXED_HEADER_BYTES


class CorruptValueError(Exception):
    """A cached value is not what its key promises. Never reaches a request: the cache treats it as a miss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedArray:
    array: np.ndarray
    """Read-only, without a copy: a view of the value's bytes, which it keeps alive. bfloat16 is viewed as uint16."""
    dtype: str
    grid: tuple[int, int, int]
    meta: Mapping[str, Any]
    created_s: int
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRecord:
    record: Mapping[str, Any]
    created_s: int
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHeader:
    """The fixed part of a header, enough for an operator's tools; nothing in it has been verified."""

    kind: str
    """`array` or `record`."""
    dtype: str
    """Empty for a record."""
    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    created_s: int
    identity: bytes
    namespace_label: bytes
    model_label: bytes
    header_bytes: int
    meta_bytes: int
    payload_bytes: int
    checksum: bytes


def label(text: str) -> bytes:
    """8 bytes that stand for a namespace or model id in headers, so that an operator can select by it. Never a key."""
    return blake3(b"sightline label\0" + text.encode("utf-8", "surrogatepass")).digest(length=LABEL_BYTES)


def encode_array(
    identity: bytes,
    array: np.ndarray,
    *,
    dtype: str,
    grid: tuple[int, int, int] = (0, 0, 0),
    meta: Mapping[str, Any] | None = None,
    namespace: str = "",
    model: str = "",
    created_s: float | None = None,
) -> bytes:
    """An array of up to 4 dimensions as a cache value. Copies the array once.

    Args:
        identity: 32-byte key that the value belongs to.
        dtype: `float32 float16 bfloat16 uint8 int32 int64`; a bfloat16 array is given as uint16.
        grid: Patches along time, height and width, if the array is an item's.
        meta: Small JSON-able facts.
        namespace: With `model`, only labels the value for the operator's tools.
        created_s: Unix time; now if None.

    Raises:
        ValueError: The array doesn't have the dtype it is said to have, or `meta` is too large or no JSON.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}: {dtype = }")
    code, expected = _DTYPES[dtype]
    if array.dtype != expected:
        raise ValueError(f"a {dtype} value needs an array of {expected}: {array.dtype = }")
    if array.ndim > _MAX_DIMS:
        raise ValueError(f"at most {_MAX_DIMS} dimensions: {array.ndim = }")
    payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    shape = array.shape + (0,) * (_MAX_DIMS - array.ndim)
    return _encode(
        identity, _KIND_ARRAY, code, array.ndim, shape, grid, meta or {}, namespace, model, created_s, payload
    )


def encode_record(
    identity: bytes,
    record: Mapping[str, Any],
    *,
    namespace: str = "",
    model: str = "",
    created_s: float | None = None,
) -> bytes:
    """A small mapping of JSON values (a processed item's metadata) as a cache value. Tuples come back as lists."""
    payload = memoryview(_canonical_json(record))
    return _encode(identity, _KIND_RECORD, 0, 0, (0,) * _MAX_DIMS, (0, 0, 0), {}, namespace, model, created_s, payload)


def decode_array(value: bytes | memoryview, *, identity: bytes, verify_checksum: bool = True) -> DecodedArray:
    """The array in a value, or CorruptValueError.

    Args:
        identity: The key that was asked for; a value made for another one is refused.
        verify_checksum: False only for values that were verified before and have not left this process since.
    """
    view = _bytes_view(value)
    header = read_header(view)
    payload = _verify(view, header, identity, verify_checksum)
    if header.kind != "array":
        raise CorruptValueError("value is a record, not an array")
    expected = _DTYPES[header.dtype][1]
    if math.prod(header.shape) * expected.itemsize != header.payload_bytes:
        raise CorruptValueError("shape and payload length differ")
    try:
        array = np.frombuffer(payload, dtype=expected).reshape(header.shape)
    except ValueError as error:  # dimensions beyond what an array can have, with a zero among them
        raise CorruptValueError("impossible shape") from error
    array.flags.writeable = False
    meta = _parse_object(view[FIXED_HEADER_BYTES : FIXED_HEADER_BYTES + header.meta_bytes])
    return DecodedArray(array=array, dtype=header.dtype, grid=header.grid, meta=meta, created_s=header.created_s)


def decode_record(value: bytes | memoryview, *, identity: bytes, verify_checksum: bool = True) -> DecodedRecord:
    """The mapping in a value, or CorruptValueError. See `decode_array`."""
    view = _bytes_view(value)
    header = read_header(view)
    payload = _verify(view, header, identity, verify_checksum)
    if header.kind != "record":
        raise CorruptValueError("value is an array, not a record")
    return DecodedRecord(record=_parse_object(payload), created_s=header.created_s)


def verify_value(value: bytes | memoryview, *, identity: bytes) -> ValueHeader:
    """Everything that `decode_array` or `decode_record` would check, whichever the value is. For tools."""
    header = read_header(value)
    (decode_array if header.kind == "array" else decode_record)(value, identity=identity)
    return header


def read_header(value: bytes | memoryview) -> ValueHeader:
    """The header of a value, or of its first `FIXED_HEADER_BYTES`; CorruptValueError if it cannot be one.

    Checks form only, not the checksum.
    """
    view = _bytes_view(value)
    if view.nbytes < FIXED_HEADER_BYTES:
        raise CorruptValueError("shorter than a header")
    magic, version, header_bytes, checksum = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise CorruptValueError("not a cache value")
    if version != FORMAT_VERSION:
        raise CorruptValueError(f"unknown format version: {version = }")
    kind, code, ndim, meta_bytes, payload_bytes, created_s, identity, namespace, model, *rest = _BODY.unpack_from(
        view, _PREFIX.size
    )
    shape, grid = tuple(rest[:_MAX_DIMS]), (rest[4], rest[5], rest[6])
    known = code in _DTYPE_NAMES if kind == _KIND_ARRAY else (kind == _KIND_RECORD and code == 0 and ndim == 0)
    if not known or ndim > _MAX_DIMS or any(shape[ndim:]):
        raise CorruptValueError("unknown kind, dtype or dimensions")
    if header_bytes != _padded(FIXED_HEADER_BYTES + meta_bytes) or header_bytes > MAX_HEADER_BYTES:
        raise CorruptValueError("impossible header length")
    return ValueHeader(
        kind="array" if kind == _KIND_ARRAY else "record",
        dtype=_DTYPE_NAMES.get(code, ""),
        shape=shape[:ndim],
        grid=grid,
        created_s=created_s,
        identity=identity,
        namespace_label=namespace,
        model_label=model,
        header_bytes=header_bytes,
        meta_bytes=meta_bytes,
        payload_bytes=payload_bytes,
        checksum=checksum,
    )


def _encode(
    identity: bytes,
    kind: int,
    code: int,
    ndim: int,
    shape: tuple[int, ...],
    grid: tuple[int, int, int],
    meta: Mapping[str, Any],
    namespace: str,
    model: str,
    created_s: float | None,
    payload: memoryview,
) -> bytes:
    if len(identity) != DIGEST_BYTES:
        raise ValueError(f"an identity has {DIGEST_BYTES} bytes: {len(identity) = }")
    meta_json = _canonical_json(meta) if meta else b""
    header_bytes = _padded(FIXED_HEADER_BYTES + len(meta_json))
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"meta is too large for a header of {MAX_HEADER_BYTES} bytes: {len(meta_json) = }")
    created = int(time.time() if created_s is None else created_s)
    body = _BODY.pack(
        kind,
        code,
        ndim,
        len(meta_json),
        payload.nbytes,
        created,
        identity,
        label(namespace),
        label(model),
        *shape,
        *grid,
    )
    rest = (body + meta_json).ljust(header_bytes - _PREFIX.size, b"\0")
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, header_bytes, blake3(rest).update(payload).digest())
    return b"".join((prefix, rest, payload))


def _verify(view: memoryview, header: ValueHeader, identity: bytes, verify_checksum: bool) -> memoryview:
    if view.nbytes != header.header_bytes + header.payload_bytes:
        raise CorruptValueError("truncated, or longer than its header says")
    if header.identity != identity:
        raise CorruptValueError("made for another key")
    if verify_checksum and blake3(view[_PREFIX.size :]).digest() != header.checksum:
        raise CorruptValueError("checksum differs")
    return view[header.header_bytes :]


def _bytes_view(value: bytes | memoryview) -> memoryview:
    return memoryview(value).cast("B").toreadonly()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _canonical_json(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(record), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except TypeError as error:
        raise ValueError("only JSON values can be cached in a record") from error


def _parse_object(raw: memoryview) -> Mapping[str, Any]:
    if not raw.nbytes:
        return {}
    try:
        parsed = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise CorruptValueError("metadata is no JSON") from error
    if not isinstance(parsed, dict):
        raise CorruptValueError("metadata is no JSON object")
    return parsed
