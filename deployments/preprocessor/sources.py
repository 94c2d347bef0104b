"""Encoded bytes of an item, from wherever they are: a data: URI, an http(s) or file: URL, or a known uuid."""

from __future__ import annotations

import asyncio
from typing import Protocol

from cache_service.identity import ContentDigest
from cache_service.lru import ByteLRU, LRUStats
from cache_service.uuid_table import UuidTable, UuidTableStats
from deployments.errors import MediaError
from deployments.messages import MediaInput
from deployments.preprocessor.data_uri import decode_data_uri, is_data_uri, parse_data_uri
from deployments.preprocessor.fetch import FetchStats
from deployments.preprocessor.gather import gather_distinct
from deployments.preprocessor.local_media import LocalMedia, is_file_url
from deployments.preprocessor.media import EncodedMedia
from deployments.preprocessor.url_guard import FetchRules, FetchUrl, parse_url

_MAX_UUID_CHARS = 256


class Fetcher(Protocol):
    stats: FetchStats

    async def fetch(self, url: FetchUrl, max_bytes: int) -> bytes:
        """The body behind a URL. Raises MediaError and its kin."""

    async def close(self) -> None:
        """Release connections; fetches under way fail."""


class MediaSources:
    """Checks and reads media. The uuid table and the bytes behind it live in this process.

    Args:
        cache_bytes: Room for encoded media that a uuid alone may stand for.
        local: Reads `file:` URLs; without it they are refused.
    """

    def __init__(self, rules: FetchRules, fetcher: Fetcher, cache_bytes: int, local: LocalMedia | None = None) -> None:
        self._rules = rules
        self._local = local
        self._fetcher = fetcher
        self._uuids = UuidTable()
        self._media: ByteLRU[tuple[str, ContentDigest], EncodedMedia] = ByteLRU(cache_bytes)

    def check(self, media: MediaInput, namespace: str, *, may_be_shared: bool = False) -> None:
        """Everything that can be judged without reading. Raises MediaError.

        Args:
            may_be_shared: Other replicas may know a uuid that is unknown here.
        """
        if media.uuid is not None and not 0 < len(media.uuid) <= _MAX_UUID_CHARS:
            raise MediaError(f"a uuid has 1 to {_MAX_UUID_CHARS} characters", code="invalid_uuid")
        urls = _urls(media)
        if not urls and (media.uuid is None or not may_be_shared):
            self._recall(media, namespace)
        for url in urls:
            if is_data_uri(url.lstrip()):
                parse_data_uri(url.strip())
            elif self._local is not None and is_file_url(url):
                self._local.check(url)
            else:
                self._rules.check_url(parse_url(url))

    async def read(self, media: MediaInput, namespace: str, max_bytes: int) -> EncodedMedia:
        """The item's encoded bytes. Raises MediaError and its kin.

        Args:
            max_bytes: Bound on the item, all its frames together.
        """
        urls = _urls(media)
        if not urls:
            data = self._recall(media, namespace)
            if num_encoded_bytes(data) > max_bytes:
                raise MediaError(
                    f"the media is larger than the {max_bytes} bytes that are allowed", code="media_too_large"
                )
            return data
        files = await gather_distinct(urls, lambda index: self._read_one(urls[index], max_bytes))
        if sum(len(data) for data in files) > max_bytes:
            raise MediaError(
                f"the frames are larger than the {max_bytes} bytes that are allowed", code="media_too_large"
            )
        return tuple(files) if media.frames else files[0]

    async def _read_one(self, url: str, max_bytes: int) -> bytes:
        if is_data_uri(url.lstrip()):
            return await asyncio.to_thread(decode_data_uri, parse_data_uri(url.strip()), max_bytes)
        if self._local is not None and is_file_url(url):
            return await asyncio.to_thread(self._local.read, url, max_bytes)
        parsed = parse_url(url)
        self._rules.check_url(parsed)
        return await self._fetcher.fetch(parsed, max_bytes)

    def remember(self, media: MediaInput, namespace: str, content: ContentDigest, data: EncodedMedia) -> None:
        """Let the item's uuid, if it has one, stand for this content from now on."""
        if media.uuid is None:
            return
        self._uuids.bind(namespace, media.uuid, content)
        self._media.put((namespace, content), data, num_encoded_bytes(data))

    def held(self, namespace: str, content: ContentDigest) -> EncodedMedia | None:
        """Encoded bytes of content that a uuid stood for here."""
        return self._media.get((namespace, content))

    def uuid_stats(self) -> UuidTableStats:
        return self._uuids.stats

    def fetch_stats(self) -> FetchStats:
        return self._fetcher.stats

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
            raise unknown_uuid()
        return data


def unknown_uuid() -> MediaError:
    return MediaError("the uuid is not known here; send the media along with it", code="unknown_media_uuid")


def has_payload(media: MediaInput) -> bool:
    """Whether the caller sent more than a uuid."""
    return bool(_urls(media))


def num_encoded_bytes(data: EncodedMedia) -> int:
    return len(data) if isinstance(data, bytes) else sum(len(part) for part in data)


def _urls(media: MediaInput) -> tuple[str, ...]:
    if media.frames:
        return media.frames
    return () if media.url is None else (media.url,)
