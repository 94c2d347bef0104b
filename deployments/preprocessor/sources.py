"""Encoded bytes of an item, from wherever the caller says they are: a data: URI, an http(s) URL, or a known uuid."""

from __future__ import annotations

import asyncio
from typing import Protocol

from cache_service.identity import ContentDigest
from cache_service.lru import ByteLRU, LRUStats
from cache_service.uuid_table import UuidTable, UuidTableStats
from deployments.errors import MediaError
from deployments.messages import MediaInput
from deployments.preprocessor.data_uri import decode_data_uri, is_data_uri, parse_data_uri
from deployments.preprocessor.gather import gather_distinct
from deployments.preprocessor.media import EncodedMedia
from deployments.preprocessor.url_guard import FetchRules, FetchUrl, parse_url

_MAX_UUID_CHARS = 256


class Fetcher(Protocol):
    async def fetch(self, url: FetchUrl, max_bytes: int) -> bytes:
        """The body behind a URL. Raises MediaError and its kin."""

    async def close(self) -> None:
        """Release connections; fetches under way fail."""


class MediaSources:
    """Checks and reads media. The uuid table and the bytes behind it live in this process.

    Args:
        cache_bytes: Room for encoded media that a uuid alone may stand for.
    """

    def __init__(self, rules: FetchRules, fetcher: Fetcher, cache_bytes: int) -> None:
        self._rules = rules
        self._fetcher = fetcher
        self._uuids = UuidTable()
        self._media: ByteLRU[tuple[str, ContentDigest], EncodedMedia] = ByteLRU(cache_bytes)

    def check(self, media: MediaInput, namespace: str) -> None:
        """Everything that can be judged without reading. Raises MediaError."""
        if media.uuid is not None and not 0 < len(media.uuid) <= _MAX_UUID_CHARS:
            raise MediaError(f"a uuid has 1 to {_MAX_UUID_CHARS} characters", code="invalid_uuid")
        urls = _urls(media)
        if not urls:
            self._recall(media, namespace)
        for url in urls:
            if is_data_uri(url.lstrip()):
                parse_data_uri(url.strip())
            else:
                self._rules.check_url(parse_url(url))

    async def read(self, media: MediaInput, namespace: str, max_bytes: int) -> EncodedMedia:
        """The item's encoded bytes. Raises MediaError and its kin.

        Args:
            max_bytes: Bound on the item, all its frames together.
        """
        urls = _urls(media)
        if not urls:
            return self._recall(media, namespace)
        files = await gather_distinct(urls, lambda index: self._read_one(urls[index], max_bytes))
        if sum(len(data) for data in files) > max_bytes:
            raise MediaError(
                f"the frames are larger than the {max_bytes} bytes that are allowed", code="media_too_large"
            )
        return tuple(files) if media.frames else files[0]

    async def _read_one(self, url: str, max_bytes: int) -> bytes:
        if is_data_uri(url.lstrip()):
            return await asyncio.to_thread(decode_data_uri, parse_data_uri(url.strip()), max_bytes)
        parsed = parse_url(url)
        self._rules.check_url(parsed)
        return await self._fetcher.fetch(parsed, max_bytes)

    def remember(self, media: MediaInput, namespace: str, content: ContentDigest, data: EncodedMedia) -> None:
        """Let the item's uuid, if it has one, stand for this content from now on."""
        if media.uuid is None:
            return
        self._uuids.bind(namespace, media.uuid, content)
        self._media.put((namespace, content), data, num_encoded_bytes(data))

    def uuid_stats(self) -> UuidTableStats:
        return self._uuids.stats

    def cache_stats(self) -> LRUStats:
        return self._media.stats()

    async def close(self) -> None:
        await self._fetcher.close()

    def _recall(self, media: MediaInput, namespace: str) -> EncodedMedia:
        if media.uuid is None:
            raise MediaError("a url is needed", code="invalid_url")
        content = self._uuids.lookup(namespace, media.uuid)
        data = self._media.get((namespace, content)) if content is not None else None
        if data is None:
            raise MediaError("the uuid is not known here; send the media along with it", code="unknown_media_uuid")
        return data


def num_encoded_bytes(data: EncodedMedia) -> int:
    return len(data) if isinstance(data, bytes) else sum(len(part) for part in data)


def _urls(media: MediaInput) -> tuple[str, ...]:
    if media.frames:
        return media.frames
    return () if media.url is None else (media.url,)
