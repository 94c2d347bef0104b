"""Keys: what makes two pictures, two embeddings or two KV blocks the same. Knows nothing about storage.

Each digest is blake3-256 over typed, length-prefixed fields, so that no two different field lists give the same bytes,
and starts with a domain word and the schema version, so that keys of different kinds or schemas never meet.

    encoded bytes ─alias─▶ content digest ─+ namespace, effective processing─▶ item identity
                                            item identity ─+ encoder fingerprint─▶ embedding identity
         (parent, token ids, [(embedding identity, offset)], adapter, salt) ──▶ KV block key

Digests are compared whole (256 bits) and never truncated.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, SupportsIndex

from blake3 import blake3

SCHEMA_VERSION = 1
DIGEST_BYTES = 32

EncodedDigest = NewType("EncodedDigest", bytes)
"""Of a file's bytes as received; only ever an alias for a content digest."""
ContentDigest = NewType("ContentDigest", bytes)
"""Of decoded mode, size and pixels (video: frame indices and timing too)."""
ItemIdentity = NewType("ItemIdentity", bytes)
"""Of content, effective processing and tenant namespace."""
EmbeddingIdentity = NewType("EmbeddingIdentity", bytes)
"""Of an item seen by one encoder with one set of weights in one precision."""
BlockKey = NewType("BlockKey", bytes)
"""Of a KV block and everything before it."""

Field = str | bytes | memoryview | int | float | bool | None

_SALT_MARK = "\0"

_INLINE_BYTES = 4096
"""Fields up to this size are gathered and hashed in one call, which for short keys costs more than the hashing."""


def _digest(domain: str, fields: Iterable[Field | Sequence[Field]]) -> bytes:
    hasher = blake3()
    parts: list[bytes] = []
    _append(parts, hasher, domain)
    _append(parts, hasher, SCHEMA_VERSION)
    for value in fields:
        if isinstance(value, (list, tuple)):
            parts.append(b"(" + struct.pack("<Q", len(value)))
            for element in value:
                _append(parts, hasher, element)
        else:
            _append(parts, hasher, value)  # type: ignore[arg-type]
    return hasher.update(b"".join(parts)).digest()


def _append(parts: list[bytes], hasher: blake3, value: Field) -> None:
    """One field: a type byte, a length where it varies, the value. -0.0 and 0.0 are one value; NaN is refused.

    NumPy's integers and floats count as the Python numbers they equal.
    """
    if value is None:
        parts.append(b"n")
    elif isinstance(value, bool):
        parts.append(b"t" if value else b"f")
    elif isinstance(value, float):  # np.float64 is one, too
        if value != value:
            raise ValueError(f"NaN cannot be part of a key: {value = }")
        parts.append(b"d" + struct.pack("<d", value + 0.0))
    elif isinstance(value, str):
        parts.append(_str_field(value))
    elif hasattr(value, "__index__"):
        parts.append(_int_field(value))  # type: ignore[arg-type]
    else:
        view = memoryview(value).cast("B")  # type: ignore[arg-type]
        parts.append(b"b" + struct.pack("<Q", view.nbytes))
        if view.nbytes <= _INLINE_BYTES:
            parts.append(bytes(view))
        else:
            hasher.update(b"".join(parts))
            parts.clear()
            hasher.update(view)


def encoded_digest(data: bytes | memoryview, *, decode_settings: str = "", namespace: str = "") -> EncodedDigest:
    """Alias key of a file.

    Args:
        data: All bytes as received; a prefix would let two files of one renderer meet.
        decode_settings: Names whatever changes decoded pixels (background colour, decoder and its options).
        namespace: Tenant namespace, so that no tenant can tell by speed what another one has sent.
    """
    return EncodedDigest(_digest("encoded", (namespace, decode_settings, data)))


def uuid_key(namespace: str, uuid: str) -> bytes:
    """Key under which replicas tell each other what a caller's `uuid` stands for inside its namespace."""
    return _digest("uuid", (namespace, uuid))


def salted_namespace(namespace: str, cache_salt: str) -> str:
    """The namespace of a request with a `cache_salt`: in every key, requests with other salts are other tenants.

    `unsalted_namespace` gives back the tenant's part, which operators select by.
    """
    if _SALT_MARK in namespace:
        raise ValueError(f"a namespace has no NUL character: {namespace!r}")
    return f"{namespace}{_SALT_MARK}{cache_salt}" if cache_salt else namespace


def unsalted_namespace(namespace: str) -> str:
    return namespace.partition(_SALT_MARK)[0]


def content_digest(
    mode: str,
    size: tuple[int, int],
    pixels: bytes | memoryview,
    *,
    palette: bytes = b"",
    frame_indices: Sequence[int] = (),
    frame_seconds: Sequence[float] = (),
) -> ContentDigest:
    """Digest of decoded pixels.

    The shape is a field of its own, so a 30x150 and a 150x30 picture with equal bytes differ.

    Args:
        mode: As Pillow names it.
        size: (width, height).
        pixels: C-contiguous, row-major; for a video, frame after frame.
        palette: Of a picture whose `pixels` are indices into one.
        frame_indices: Of a video: which frames of the source these are.
        frame_seconds: Of a video: when each is shown.
    """
    return ContentDigest(
        _digest(
            "content",
            (
                mode,
                size[0],
                size[1],
                pixels,
                palette,
                tuple(frame_indices),
                tuple(float(second) for second in frame_seconds),
            ),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveProcessing:
    """What was really done to the pixels. Two `max_pixels` that lead to the same resize are the same processing."""

    resized_height: int
    resized_width: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    resample: str
    """Filter and its implementation, such as `bicubic/torch-u8`; they differ by a grey level."""
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float
    frame_indices: tuple[int, ...] = ()
    frame_seconds: tuple[float, ...] = ()
    processor_revision: str = ""
    """Changes whenever the preprocessing code or the family's layout of patches changes."""


def item_identity(namespace: str, content: ContentDigest, processing: EffectiveProcessing) -> ItemIdentity:
    """Key of a processed item: what was done to which content, for whom."""
    p = processing
    return ItemIdentity(
        _digest(
            "item",
            (
                namespace,
                content,
                p.resized_height,
                p.resized_width,
                p.patch_size,
                p.merge_size,
                p.temporal_patch_size,
                p.resample,
                tuple(float(mean) for mean in p.image_mean),  # 0 and 0.0 do the same to a pixel
                tuple(float(std) for std in p.image_std),
                float(p.rescale_factor),
                tuple(p.frame_indices),
                tuple(float(second) for second in p.frame_seconds),
                p.processor_revision,
            ),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFingerprint:
    """Which encoder made an embedding."""

    model_id: str
    weights_revision: str
    """Digest of the checkpoint's index or of its files' metadata (deployments/checkpoint.py)."""
    dtype: str
    quantization: str = ""
    adapter_digest: str = ""
    encoder_revision: str = ""
    """Changes whenever our forward pass changes its results."""


def embedding_identity(item: ItemIdentity, fingerprint: EncoderFingerprint) -> EmbeddingIdentity:
    """Key of one encoder's output for an item; carries the item's namespace through its identity."""
    f = fingerprint
    return EmbeddingIdentity(
        _digest(
            "embedding",
            (item, f.model_id, f.weights_revision, f.dtype, f.quantization, f.adapter_digest, f.encoder_revision),
        )
    )


def block_key(
    parent: BlockKey | None,
    token_ids: Sequence[int],
    items: Sequence[tuple[EmbeddingIdentity, int]] = (),
    *,
    adapter: str = "",
    cache_salt: str = "",
) -> BlockKey:
    """Key of a full KV block.

    Args:
        parent: Key of the block before it; None for the first.
        token_ids: The block's tokens (each below 2**32).
        items: Every item with a placeholder in the block, with its offset relative to the block's first position
            (negative if it began in an earlier block).
        adapter: LoRA or similar weights on the language model; empty if none.
        cache_salt: Namespace and caller's salt: nothing is shared across different salts.
    """
    # The bytes of _digest("kv", (parent, packed tokens, [identity, offset, ...], adapter, cache_salt)), put together
    # without its detours: a long prompt makes hundreds of keys within one engine step.
    parts = [_KV_HEAD, b"n" if parent is None else _bytes_field(parent)]
    parts.append(_bytes_field(struct.pack(f"<{len(token_ids)}I", *token_ids)))
    parts.append(b"(" + struct.pack("<Q", 2 * len(items)))
    for identity, offset in items:
        parts += (_bytes_field(identity), _int_field(offset))
    parts += (_str_field(adapter), _str_field(cache_salt))
    return BlockKey(blake3(b"".join(parts)).digest())


def _bytes_field(value: bytes) -> bytes:
    return b"b" + struct.pack("<Q", len(value)) + value


def _int_field(value: SupportsIndex) -> bytes:
    number = operator.index(value)
    raw = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True)
    return b"i" + struct.pack("<Q", len(raw)) + raw


def _str_field(value: str) -> bytes:
    # Lone surrogates can come out of a caller's JSON: they are as good a salt or uuid as any.
    raw = value.encode("utf-8", "surrogatepass")
    return b"s" + struct.pack("<Q", len(raw)) + raw


_KV_HEAD = _str_field("kv") + _int_field(SCHEMA_VERSION)
