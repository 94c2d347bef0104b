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
        self._bytes: ByteLRU[tuple[str, ContentDigest], bytes] = ByteLRU(cache_bytes)

    def check(self, media: MediaInput, namespace: str) -> None:
        """Everything that can be judged without reading. Raises MediaError."""
        if media.uuid is not None and not 0 < len(media.uuid) <= _MAX_UUID_CHARS:
            raise MediaError(f"a uuid has 1 to {_MAX_UUID_CHARS} characters", code="invalid_uuid")
        if media.url is None:
            self._recall(media, namespace)
        elif is_data_uri(media.url.lstrip()):
            parse_data_uri(media.url.strip())
        else:
            self._rules.check_url(parse_url(media.url))

    async def read(self, media: MediaInput, namespace: str, max_bytes: int) -> bytes:
        """The item's encoded bytes. Raises MediaError and its kin."""
        if media.url is None:
            return self._recall(media, namespace)
        if is_data_uri(media.url.lstrip()):
            return await asyncio.to_thread(decode_data_uri, parse_data_uri(media.url.strip()), max_bytes)
        url = parse_url(media.url)
        self._rules.check_url(url)
        return await self._fetcher.fetch(url, max_bytes)

    def remember(self, media: MediaInput, namespace: str, content: ContentDigest, data: bytes) -> None:
        """Let the item's uuid, if it has one, stand for this content from now on."""
        if media.uuid is None:
            return
        self._uuids.bind(namespace, media.uuid, content)
        self._bytes.put((namespace, content), data, len(data))

    def uuid_stats(self) -> UuidTableStats:
        return self._uuids.stats

    def cache_stats(self) -> LRUStats:
        return self._bytes.stats()

    async def close(self) -> None:
        await self._fetcher.close()

    def _recall(self, media: MediaInput, namespace: str) -> bytes:
        if media.uuid is None:
            raise MediaError("a url is needed", code="invalid_url")
        content = self._uuids.lookup(namespace, media.uuid)
        data = self._bytes.get((namespace, content)) if content is not None else None
        if data is None:
            raise MediaError("the uuid is not known here; send the media along with it", code="unknown_media_uuid")
        return data
