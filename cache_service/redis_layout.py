"""What lies in Redis: names of keys, and how a large value is split. Pure bytes in, bytes out.

For prefix `sightline`, schema 1, kind `embedding` and a 32-byte key written as hex:

    sightline:1:embedding:{<hex>}                   the value, or a manifest with the value's first part
    sightline:1:embedding:{<hex>}:c:<write id>:<n>  n-th further part of a large value, n from 1
    sightline:1:lease:embedding:{<hex>}             who computes the value now: a fencing token, expires by itself
    sightline:1:fence:embedding:{<hex>}             the newest fencing token handed out

- The schema is part of the name, so a new schema never reads old entries, and old ones go by their TTL.
- The braces are a hash tag: in a cluster all keys of an entry live on one node.
- The namespace is not readable here: it is hashed into the 32-byte key. For the operator, the value's own header holds
  8-byte labels of namespace and model, its shape and the time of creation (codec.py). That header is the start of a
  plain value and follows a manifest at a fixed offset, so one short GETRANGE tells what is needed to count and purge.
- The write id is random: parts of two writes never mix. A manifest that names a part which is gone, or one of another
  length, is a miss: an entry is read whole or not at all.

    manifest: 16 bytes magic | u16 version | u16 zero | u32 parts | u64 total bytes | u32 part bytes | 12 bytes write id
              | 16 bytes zero | first part of the value
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from cache_service.identity import SCHEMA_VERSION

MANIFEST_BYTES = 64
_MAGIC = bytes.fromhex("d3a1c07e5b9442f8a60f1e2d71c8b935")  # random: no other value begins like this
_MANIFEST = struct.Struct("<16sHHIQI12s16x")
_VERSION = 1
_WRITE_ID_BYTES = 12

assert _MANIFEST.size == MANIFEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLayout:
    kind: str
    """What the values are: `embedding`, `item`."""
    prefix: str = "sightline"
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for option, text in (("kind", self.kind), ("prefix", self.prefix)):
            if not text or not text.isascii() or not text.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"a key's {option} must be letters, digits, - and _: {text!r}")
        if self.kind in ("lease", "fence"):
            raise ValueError(f"the kind is reserved: {self.kind = }")

    def value(self, key: bytes) -> bytes:
        return f"{self.prefix}:{self.schema}:{self.kind}:{{{key.hex()}}}".encode()

    def part(self, key: bytes, write_id: bytes, number: int) -> bytes:
        return self.value(key) + f":c:{write_id.hex()}:{number}".encode()

    def lease(self, key: bytes) -> bytes:
        return f"{self.prefix}:{self.schema}:lease:{self.kind}:{{{key.hex()}}}".encode()

    def fence(self, key: bytes) -> bytes:
        return f"{self.prefix}:{self.schema}:fence:{self.kind}:{{{key.hex()}}}".encode()

    def pattern(self) -> str:
        """SCAN pattern of all values of this kind; parts don't match."""
        return f"{self.prefix}:{self.schema}:{self.kind}:{{*}}"

    def key_of(self, name: bytes) -> bytes | None:
        """The 32-byte key behind a value's name; None if it is not one of ours."""
        head, tail = f"{self.prefix}:{self.schema}:{self.kind}:{{".encode(), b"}"
        if not (name.startswith(head) and name.endswith(tail)):
            return None
        try:
            return bytes.fromhex(name[len(head) : -1].decode("ascii"))
        except ValueError:
            return None


class ManifestError(Exception):
    """Bytes that begin like a manifest but are none; the entry is corrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """How a large value was split: part 0 follows the manifest, the others have keys of their own."""

    parts: int
    total_bytes: int
    part_bytes: int
    """Length of every part but the last."""
    write_id: bytes

    def part_range(self, number: int) -> tuple[int, int]:
        """(start, end) of a part within the value."""
        return number * self.part_bytes, min((number + 1) * self.part_bytes, self.total_bytes)


@dataclass(frozen=True, slots=True)
class SplitValue:
    manifest: Manifest
    head: bytes
    """Manifest and part 0: what is stored under the value's own name."""
    rest: tuple[memoryview, ...]
    """Parts 1, 2, …"""


def is_manifest(value: bytes | memoryview) -> bool:
    return bytes(value[: len(_MAGIC)]) == _MAGIC


def split_value(
    value: bytes | memoryview, max_value_bytes: int, new_id: Callable[[int], bytes] = os.urandom
) -> SplitValue:
    """A value in parts, so that nothing stored is longer than `max_value_bytes` (at least 128)."""
    view = memoryview(value)
    part_bytes = max_value_bytes - MANIFEST_BYTES
    parts = -(-view.nbytes // part_bytes)
    manifest = Manifest(parts=parts, total_bytes=view.nbytes, part_bytes=part_bytes, write_id=new_id(_WRITE_ID_BYTES))
    packed = _MANIFEST.pack(_MAGIC, _VERSION, 0, parts, view.nbytes, part_bytes, manifest.write_id)
    ranges = [manifest.part_range(number) for number in range(parts)]
    return SplitValue(
        manifest, b"".join((packed, view[: ranges[0][1]])), tuple(view[start:end] for start, end in ranges[1:])
    )


def parse_manifest(head: bytes | memoryview, *, max_bytes: int) -> Manifest:
    """The manifest at the start of `head`, checked against its own arithmetic; ManifestError otherwise."""
    if len(head) < MANIFEST_BYTES or not is_manifest(head):
        raise ManifestError("too short, or no manifest")
    _, version, _, parts, total_bytes, part_bytes, write_id = _MANIFEST.unpack_from(head)
    if version != _VERSION:
        raise ManifestError(f"unknown version: {version = }")
    if not 0 < total_bytes <= max_bytes or part_bytes == 0 or parts != -(-total_bytes // part_bytes):
        raise ManifestError("lengths contradict each other")
    return Manifest(parts=parts, total_bytes=total_bytes, part_bytes=part_bytes, write_id=write_id)


def join_parts(manifest: Manifest, head: bytes | memoryview, rest: list[bytes]) -> bytes:
    """The value whole; ManifestError if a part has another length than the manifest says."""
    parts: list[bytes | memoryview] = [memoryview(head)[MANIFEST_BYTES:], *rest]
    for number, part in enumerate(parts):
        start, end = manifest.part_range(number)
        if len(part) != end - start:
            raise ManifestError(f"a part has the wrong length: {number = }")
    return b"".join(parts)
