"""What preprocessor replicas tell each other: small records in tiers that all of them see, never pixels or files.

    alias     digest of a file's bytes ──▶ content digest, size, frames     seen by one replica, decoded by no other
    refused   digest of a file's bytes ──▶ why it cannot be used            for seconds only
    uuid      namespace and uuid       ──▶ as alias, for one way to decode  the uuid alone works on every replica

All keys hold the namespace. All of it is optional: a tier in trouble finds nothing, and writes are behind the response,
so without the tiers each replica knows what it has seen itself.

A file's bytes are not shared. A `uuid` without payload is thus served by a replica that never saw the file as long as
its embedding is in some cache; once its patches are needed after all, the record is deleted and the caller is asked to
send the file again.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from cache_service.codec import CorruptValueError, decode_record, encode_record
from cache_service.identity import DIGEST_BYTES, ContentDigest, EncodedDigest, unsalted_namespace
from cache_service.negative_cache import NegativeResult
from cache_service.tier import CacheTier, LookupResult
from cache_service.tiered import TieredCache
from deployments.preprocessor.media import Inspection

T = TypeVar("T")

ALIAS_KIND, REFUSED_KIND, UUID_KIND = "alias", "refused", "uuid"

_MAX_SIDE = 1 << 31
_DECODERS = ("pillow", "simplejpeg", "av")


@dataclass(frozen=True, slots=True)
class KnownMedia:
    """What is known of a file without decoding it again."""

    content: ContentDigest
    inspection: Inspection


@dataclass(frozen=True, slots=True)
class NamedMedia:
    """What a uuid stands for."""

    known: KnownMedia
    settings: str
    """Decode settings that `known` is true for; with others the file itself is needed."""


class NameTier(CacheTier, Protocol):
    async def delete_now(self, key: bytes) -> bool:
        """Delete and return once that is done or given up."""


class SharedIndex:
    """Reads are bounded by the tiers' deadlines; nothing here raises for a tier's troubles.

    Args:
        aliases, refusals, names: One tier for each kind of record. Refusals should expire after seconds.
    """

    def __init__(self, *, aliases: CacheTier, refusals: CacheTier, names: NameTier) -> None:
        self._aliases = TieredCache([aliases], partial(_decode, _known_from))
        self._refusals = TieredCache([refusals], partial(_decode, _refusal_from))
        self._names = TieredCache([names], partial(_decode, _named_from))
        self._name_tier = names

    async def find(self, key: EncodedDigest) -> KnownMedia | NegativeResult | None:
        """What another replica found out about a file. Both kinds are asked for at once."""
        known, refusal = await asyncio.gather(self._aliases.get(key), self._refusals.get(key))
        if known is not None:  # decoded once: a refusal beside it is older, or had another cause
            return known.value
        return None if refusal is None else refusal.value

    async def add(self, namespace: str, key: EncodedDigest, known: KnownMedia) -> None:
        await self._aliases.put(key, _encode(namespace, key, _known_record(known)))

    async def refuse(self, namespace: str, key: EncodedDigest, result: NegativeResult) -> None:
        record = {"code": result.code, "message": result.message}
        await self._refusals.put(key, _encode(namespace, key, record))

    async def find_name(self, key: bytes) -> NamedMedia | None:
        """What a uuid stands for now; `key` is `identity.uuid_key`."""
        hit = await self._names.get(key)
        return None if hit is None else hit.value

    async def bind_name(self, namespace: str, key: bytes, named: NamedMedia) -> None:
        """Let a uuid stand for a file from now on, whatever it stood for before."""
        record = _known_record(named.known) | {"settings": named.settings}
        await self._names.put(key, _encode(namespace, key, record))

    async def forget_name(self, key: bytes) -> None:
        """Returns once no replica finds the name any more, or that could not be had."""
        await self._name_tier.delete_now(key)

    def lookups(self) -> Counter[tuple[str, LookupResult]]:
        """Look-ups so far by (kind, result)."""
        counts: Counter[tuple[str, LookupResult]] = Counter()
        for kind, cache in self._caches():
            for (_, result), count in cache.stats.lookups.items():
                counts[kind, result] += count
        return counts

    def transferred_bytes(self) -> Mapping[str, int]:
        """Bytes of records so far by `read` and `write`."""
        counts: Counter[str] = Counter()
        for _, cache in self._caches():
            for (_, direction), num_bytes in cache.stats.bytes.items():
                counts[direction] += num_bytes
        return counts

    async def close(self) -> None:
        for _, cache in self._caches():
            await cache.close()

    def _caches(self) -> tuple[tuple[str, TieredCache[Any]], ...]:
        return (ALIAS_KIND, self._aliases), (REFUSED_KIND, self._refusals), (UUID_KIND, self._names)


def decoder_versions() -> str:
    """Names the libraries that decode: replicas with other versions must not vouch for each other's pixels."""
    return " ".join(f"{name}={_version(name)}" for name in _DECODERS)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "-"


# -- records ----------------------------------------------------------------------------------------------------------
def _encode(namespace: str, key: bytes, record: Mapping[str, Any]) -> bytes:
    return encode_record(key, record, namespace=unsalted_namespace(namespace))


def _decode(parse: Callable[[Mapping[str, Any]], T], key: bytes, value: memoryview, *, trusted: bool) -> T:
    """See cache_service.tiered.Decode. A record of the wrong form is corrupt: it is deleted and never used."""
    record = decode_record(value, identity=key, verify_checksum=not trusted).record
    try:
        return parse(record)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptValueError("a record has the wrong form") from error


def _known_record(known: KnownMedia) -> dict[str, Any]:
    seen = known.inspection
    return {
        "content": known.content.hex(),
        "size": seen.size,
        "frame_indices": seen.frame_indices,
        "frame_seconds": seen.frame_seconds,
        "seconds_per_frame": seen.seconds_per_frame,
    }


def _known_from(record: Mapping[str, Any]) -> KnownMedia:
    content = bytes.fromhex(_string(record["content"]))
    width, height = (_integer(side, 1) for side in record["size"])
    frames = tuple(_integer(index, 0) for index in record["frame_indices"])
    seconds = tuple(_number(second) for second in record["frame_seconds"])
    if len(content) != DIGEST_BYTES or len(frames) != len(seconds):
        raise ValueError("lengths")
    inspection = Inspection(
        size=(width, height),
        frame_indices=frames,
        frame_seconds=seconds,
        seconds_per_frame=_number(record["seconds_per_frame"]),
    )
    return KnownMedia(ContentDigest(content), inspection)


def _refusal_from(record: Mapping[str, Any]) -> NegativeResult:
    return NegativeResult(_string(record["code"]), _string(record["message"]))


def _named_from(record: Mapping[str, Any]) -> NamedMedia:
    return NamedMedia(_known_from(record), _string(record["settings"]))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _integer(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_SIDE:
        raise ValueError("not an integer in range")
    return value


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)
