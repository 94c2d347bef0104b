"""The preprocessor stage: a request's messages and media in, token ids and items out. Knows nothing about Ray.

    admit ─▶ tokenize ─▶ load + inspect (all media at once) ─▶ check the length ─▶ expand ─▶ decode, resize, patchify
    counts    template    read, digest, size from the header    before pixels      spans     only what is new

Checks go from cheap to costly: nothing is fetched for a request that its own text already disqualifies, and nothing is
decoded for one whose pictures don't fit the context. A picture seen before is not decoded again: its digest and size
are in the alias table, or in the index that replicas share, so its item travels without patches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from cache_service.identity import (
    ContentDigest,
    EncodedDigest,
    encoded_digest,
    item_identity,
    salted_namespace,
    uuid_key,
)
from cache_service.lru import ByteLRU, LRUStats
from cache_service.negative_cache import NegativeCache, NegativeResult
from cache_service.single_flight import SingleFlight, SingleFlightStats
from cache_service.uuid_table import UuidTableStats
from deployments.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    MediaError,
    PayloadLostError,
    SightlineError,
)
from deployments.messages import MediaInput, MediaItem, Modality, PreparedPrompt, PrepareRequest, Ref
from deployments.ports import ObjectStore
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.families.base import Family, Layout, Span
from deployments.preprocessor.fetch import FetchStats
from deployments.preprocessor.gather import gather_distinct
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.mm_options import apply_detail, parse_media_options, server_pixel_limits
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.prompt import PromptBuilder
from deployments.preprocessor.resize import max_resized_cells
from deployments.preprocessor.shared_index import KnownMedia, NamedMedia, SharedIndex, decoder_versions
from deployments.preprocessor.sources import MediaSources, has_payload, unknown_uuid
from deployments.preprocessor.workers import DecodeStats, DecodeWorkers

T = TypeVar("T")

_ALIAS_ENTRY_BYTES = 400
_FRAME_ENTRY_BYTES = 80


@dataclass(frozen=True, slots=True)
class _Vouched:
    """A uuid without payload whose bytes another replica has seen."""

    key: bytes
    known: KnownMedia


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Size known, nothing decoded; encoded bytes at hand, or vouched for by another replica."""

    data: EncodedMedia | None
    """None if only a uuid came and another replica has the bytes; `content` is known then."""
    key: bytes
    """Alias key of the bytes; without them, `uuid_key` of their name."""
    settings: str
    """How the bytes are decoded, if they are."""
    inspection: Inspection
    layout: Layout
    options: MediaOptions
    content: ContentDigest | None
    """Known if the same bytes were decoded before."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Digest, layout and, if it was decoded, patches."""

    content: ContentDigest
    inspection: Inspection
    layout: Layout
    source: Ref | None
    patches: tuple[Ref, ...]
    """By span, if it was decoded; else empty."""
    uuid_key: bytes | None = None
    """Without a source: the shared record that vouches for the item."""


@dataclass(slots=True)
class _Tally:
    """What one request spent and met on its way. Seconds are summed over its media."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    lookups: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessorStats:
    """A snapshot; counters only grow."""

    requests: int
    pictures: int
    """Pictures loaded, equal ones of one request counted once."""
    videos: int
    decodes: int
    remakes: int
    """Patches made again for items that travelled without."""
    alias: LRUStats
    sources: LRUStats
    uuids: UuidTableStats
    flights: SingleFlightStats
    shared_lookups: Mapping[tuple[str, str], int]
    """Look-ups in the shared index by (kind of record, result); empty without one."""
    shared_bytes: Mapping[str, int]
    """Bytes of shared records by `read` and `write`."""
    fetch: FetchStats
    decode: DecodeStats


class PreprocessorCore:
    """Implements `ports.Preprocessor`.

    Args:
        prompts: Template and tokenizer.
        processor: Names the processing; its pixel work is done by `workers`.
        workers: Decode, resize and patchify off the event loop.
        sources: Reads media.
        store: Takes patches and encoded bytes.
        index: What replicas tell each other; without it each knows what it has seen itself.
        clock: Unix time in seconds, for deadlines.
    """

    def __init__(
        self,
        config: PreprocessorConfig,
        *,
        family: Family,
        prompts: PromptBuilder,
        processor: MediaProcessor,
        workers: DecodeWorkers,
        sources: MediaSources,
        store: ObjectStore,
        index: SharedIndex | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._family = family
        self._prompts = prompts
        self._processor = processor
        self._workers = workers
        self._sources = sources
        self._store = store
        self._index = index
        self._clock = clock
        self._decoders = decoder_versions()
        self._defaults = MediaOptions(
            image_limits=server_pixel_limits(config.mm_processor_kwargs, family.limits),
            frame_limits=server_pixel_limits(config.mm_processor_kwargs, family.frame_limits),
            fps=config.video_fps,
        )
        self._max_slots = max_item_slots(config, family)
        self._aliases: ByteLRU[tuple[str, EncodedDigest], KnownMedia] = ByteLRU(config.alias_cache_bytes)
        self._refused = NegativeCache()
        self._flights: SingleFlight[tuple[ProcessedMedia, tuple[Ref, ...]]] = SingleFlight(is_final=_is_verdict)
        self._requests = self._decodes = self._remakes = 0
        self._items_loaded: Counter[Modality] = Counter()

    # -- ports.Preprocessor -------------------------------------------------------------------------------------------
    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        """See `ports.Preprocessor`. Cancelling it stops fetches and drops decodes that have not begun."""
        self._requests += 1
        tally = _Tally()
        request = replace(request, namespace=salted_namespace(request.namespace, request.cache_salt), cache_salt="")
        async with self._until(request.deadline_s):
            options = self._admit(request)
            token_ids = await self._tokenize(request, tally)
            loaded = await self._load_all(request, options, tally)
            slots = [media.layout.num_slots for media in loaded]
            planned = self._prompts.expand(token_ids, [self._spans(media.layout, media.inspection) for media in loaded])
            self._check_length(request, len(planned.token_ids), sum(slots))
            made = await self._make_all(request, loaded, tally)
        for media, source, result in zip(request.media, loaded, made, strict=True):
            await self._remember_name(media, request.namespace, source, result)
        spans = [self._spans(result.layout, result.inspection) for result in made]
        expanded = self._prompts.expand(token_ids, spans)
        return PreparedPrompt(
            token_ids=expanded.token_ids,
            items=tuple(
                item
                for media, result, offsets in zip(request.media, made, expanded.offsets, strict=True)
                for item in self._items(media, request.namespace, result, offsets)
            ),
            stage_seconds=dict(tally.seconds),
            cache_results=dict(tally.lookups),
        )

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> Ref:
        """See `ports.Preprocessor`.

        Raises:
            PayloadLostError: The item's encoded bytes are gone as well; the request must be prepared again.
        """
        if item.source is None:
            if item.uuid_key is not None and self._index is not None:
                await self._index.forget_name(item.uuid_key)  # preparing it again then says that the uuid is unknown
            raise PayloadLostError("the item carries no source to make patches from")
        self._remakes += 1
        async with self._until(deadline_s):
            data = await self._store.get(item.source)
            patches = await self._workers.remake(item.modality, data, item.processing)
            if len(patches) != item.num_patches:
                raise InternalError(f"{len(patches)} patches were made for an item of {item.num_patches}")
            return await asyncio.to_thread(self._store.put, patches)

    async def close(self) -> None:
        """Stop workers and connections."""
        await self._sources.close()
        await self._workers.close()
        if self._index is not None:
            await self._index.close()

    def stats(self) -> PreprocessorStats:
        return PreprocessorStats(
            requests=self._requests,
            pictures=self._items_loaded["image"],
            videos=self._items_loaded["video"],
            decodes=self._decodes,
            remakes=self._remakes,
            alias=self._aliases.stats(),
            sources=self._sources.cache_stats(),
            uuids=replace(self._sources.uuid_stats()),
            flights=replace(self._flights.stats),
            shared_lookups={
                (kind, result.value): count
                for (kind, result), count in (self._index.lookups() if self._index else {}).items()
            },
            shared_bytes=self._index.transferred_bytes() if self._index else {},
            fetch=replace(self._sources.fetch_stats()),
            decode=replace(self._workers.stats),
        )

    # -- admission: nothing here costs more than reading the request --------------------------------------------------
    def _admit(self, request: PrepareRequest) -> MediaOptions:
        for modality, count in Counter(media.modality for media in request.media).items():
            limit = self._config.limit_mm_per_prompt.get(modality, 0)
            if count > limit:
                raise InvalidRequestError(
                    f"the request has {count} items of type {modality}; at most {limit} are allowed",
                    code="too_many_media",
                    param="messages",
                )
        options = parse_media_options(request.mm_processor_kwargs, self._defaults)
        for media in request.media:
            with _naming(media):
                self._sources.check(media, request.namespace, may_be_shared=self._index is not None)
        return options

    def _check_length(self, request: PrepareRequest, num_tokens: int, slots: int = 0) -> None:
        limit = request.max_prompt_tokens
        if limit is None or num_tokens <= limit:
            return
        share = f", {slots} of them for pictures and videos" if slots else ""
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens{share}; at most {limit} fit the model's context", param="messages"
        )

    # -- steps --------------------------------------------------------------------------------------------------------
    async def _tokenize(self, request: PrepareRequest, tally: _Tally) -> list[int]:
        modalities = [media.modality for media in request.media]
        with tally.timed("tokenize"):
            token_ids = await asyncio.to_thread(
                self._prompts.encode, request.prompt, modalities, request.max_prompt_tokens
            )
        self._check_length(request, len(token_ids))
        return token_ids

    async def _load_all(self, request: PrepareRequest, options: MediaOptions, tally: _Tally) -> list[_Loaded]:
        async def load(index: int) -> _Loaded:
            media = request.media[index]
            with _naming(media):
                return await self._load(media, request, apply_detail(options, media.detail), tally)

        keys = [(media.modality, media.url, media.frames, media.uuid, media.detail) for media in request.media]
        return await gather_distinct(keys, load)

    async def _load(self, media: MediaInput, request: PrepareRequest, options: MediaOptions, tally: _Tally) -> _Loaded:
        self._items_loaded[media.modality] += 1
        namespace = request.namespace
        is_image = media.modality == "image"
        max_bytes = self._config.max_image_bytes if is_image else self._config.max_video_bytes
        if request.max_item_bytes is not None:
            max_bytes = min(max_bytes, request.max_item_bytes)
        settings = f"{self._processor.decode_settings(media.modality, options)} {self._decoders}"
        with tally.timed("fetch"):
            read = await self._read(media, namespace, max_bytes, settings)
        if isinstance(read, _Vouched):
            data, key, known, inspection = None, read.key, read.known, read.known.inspection
        else:
            data, known = read, None
            with tally.timed("fetch"):
                key = alias = await asyncio.to_thread(_alias_key, read, settings, namespace)
            known = await self._recognise(namespace, alias)
            tally.lookups["alias:hit" if known else "alias:miss"] += 1
            if known is None:
                inspection = await self._judge(self._workers.inspect(media.modality, read, options), namespace, alias)
            else:
                inspection = known.inspection
        layout = self._processor.layout(media.modality, inspection, options)
        if layout.num_slots > self._max_slots:
            raise MediaError(
                f"the item takes {layout.num_slots} tokens after resizing; at most {self._max_slots} are allowed",
                code="image_too_large" if is_image else "video_too_large",
            )
        return _Loaded(data, key, settings, inspection, layout, options, known.content if known else None)

    async def _read(self, media: MediaInput, namespace: str, max_bytes: int, settings: str) -> EncodedMedia | _Vouched:
        """The item's bytes; or, if only a uuid came and they are not here, what another replica knows of them."""
        if has_payload(media) or media.uuid is None or self._index is None:
            return await self._sources.read(media, namespace, max_bytes)
        key = uuid_key(namespace, media.uuid)
        named = await self._index.find_name(key)
        if named is None:
            return await self._sources.read(media, namespace, max_bytes)
        # The shared record is as new as any: another replica may have seen the uuid with another payload since.
        data = self._sources.held(namespace, named.known.content)
        if data is not None:
            return data
        if named.settings != settings:
            raise unknown_uuid()
        return _Vouched(key, named.known)

    async def _recognise(self, namespace: str, key: EncodedDigest) -> KnownMedia | None:
        """What is known of the bytes behind an alias key. Raises the verdict if they were found bad."""
        refused = self._refused.get(namespace, key)
        known = self._aliases.get((namespace, key))
        if refused is None and known is None and self._index is not None:
            found = await self._index.find(key)
            if isinstance(found, KnownMedia):
                known = found
                self._add_alias(namespace, key, known)
            else:
                refused = found
        if refused is not None:
            raise MediaError(refused.message, code=refused.code)
        return known

    def _add_alias(self, namespace: str, key: EncodedDigest, known: KnownMedia) -> None:
        num_bytes = _ALIAS_ENTRY_BYTES + len(namespace) + _FRAME_ENTRY_BYTES * len(known.inspection.frame_indices)
        self._aliases.put((namespace, key), known, num_bytes)

    async def _remember_name(self, media: MediaInput, namespace: str, loaded: _Loaded, made: _Made) -> None:
        """Let the item's uuid, if it has one, stand for what came with it."""
        if media.uuid is None or loaded.data is None:
            return
        self._sources.remember(media, namespace, made.content, loaded.data)
        if self._index is not None and has_payload(media):
            named = NamedMedia(KnownMedia(made.content, made.inspection), loaded.settings)
            await self._index.bind_name(namespace, uuid_key(namespace, media.uuid), named)

    async def _make_all(self, request: PrepareRequest, loaded: Sequence[_Loaded], tally: _Tally) -> list[_Made]:
        async def make(index: int) -> _Made:
            with _naming(request.media[index]):
                return await self._make(request.media[index].modality, loaded[index], request.namespace, tally)

        return await gather_distinct([(media.key, media.options) for media in loaded], make)

    async def _make(self, modality: Modality, loaded: _Loaded, namespace: str, tally: _Tally) -> _Made:
        """Decodes only what was never seen before, and that only once at a time."""
        if loaded.data is None:
            assert loaded.content is not None
            return _Made(loaded.content, loaded.inspection, loaded.layout, None, (), loaded.key)
        content = loaded.content
        if content is None and (learnt := self._aliases.peek((namespace, EncodedDigest(loaded.key)))) is not None:
            content = learnt.content  # a flight for the same bytes has ended since this request looked
        if content is not None:
            source = await asyncio.to_thread(self._store.put, loaded.data)
            return _Made(content, loaded.inspection, loaded.layout, source, ())
        key = (namespace, loaded.key, loaded.options)
        data = loaded.data
        flight = await self._flights.run(key, lambda: self._process(modality, data, loaded, namespace))
        result, patches = flight.value
        if flight.joined:
            tally.lookups["flight:join"] += 1
        else:
            tally.seconds["decode"] += result.decode_s
            tally.seconds["preprocess"] += result.preprocess_s
        source = await asyncio.to_thread(self._store.put, loaded.data)
        return _Made(result.content, result.inspection, result.layout, source, patches)

    async def _process(
        self, modality: Modality, data: EncodedMedia, loaded: _Loaded, namespace: str
    ) -> tuple[ProcessedMedia, tuple[Ref, ...]]:
        self._decodes += 1
        key = EncodedDigest(loaded.key)
        result = await self._judge(
            self._workers.process(modality, data, loaded.inspection, loaded.options), namespace, key
        )
        if result.layout.num_slots > loaded.layout.num_slots:
            raise InternalError(f"{result.layout.num_slots} slots came of {loaded.layout.num_slots} planned ones")
        parts = np.split(result.patches, len(self._spans(result.layout, result.inspection)))
        patches = tuple([await asyncio.to_thread(self._store.put, part) for part in parts])
        known = KnownMedia(result.content, result.inspection)
        self._add_alias(namespace, key, known)
        if self._index is not None:
            await self._index.add(namespace, key, known)
        return replace(result, patches=result.patches[:0].copy()), patches

    async def _judge(self, work: Awaitable[T], namespace: str, key: EncodedDigest) -> T:
        """The result of decoding work; a verdict on the bytes is remembered for a while."""
        try:
            return await work
        except MediaError as exc:
            verdict = NegativeResult(exc.code, exc.message)
            self._refused.put(namespace, key, verdict)
            if self._index is not None:
                await self._index.refuse(namespace, key, verdict)
            raise

    # -- result -------------------------------------------------------------------------------------------------------
    def _spans(self, layout: Layout, inspection: Inspection) -> tuple[Span, ...]:
        return self._family.spans(layout, inspection.frame_seconds)

    def _items(self, media: MediaInput, namespace: str, made: _Made, offsets: Sequence[int]) -> Iterator[MediaItem]:
        """One item, or one for each temporal step where the family sets them apart."""
        steps, (_, height, width) = len(offsets), made.layout.grid
        depth = self._family.geometry.temporal_patch_size
        for step, offset in enumerate(offsets):
            layout, inspection = made.layout, made.inspection
            if steps > 1:
                layout = replace(layout, grid=(1, height, width), num_slots=layout.num_slots // steps)
                frames = slice(step * depth, (step + 1) * depth)
                inspection = replace(
                    inspection,
                    frame_indices=inspection.frame_indices[frames],
                    frame_seconds=inspection.frame_seconds[frames],
                )
            patches = made.patches[step] if made.patches else None
            yield self._item(media, namespace, replace(made, layout=layout, inspection=inspection), offset, patches)

    def _item(self, media: MediaInput, namespace: str, made: _Made, offset: int, patches: Ref | None) -> MediaItem:
        layout, inspection = made.layout, made.inspection
        processing: dict[str, object] = {
            "resized_height": layout.resized_height,
            "resized_width": layout.resized_width,
        }
        if media.modality == "video":
            processing["frame_indices"] = inspection.frame_indices
        return MediaItem(
            modality=media.modality,
            identity=item_identity(namespace, made.content, self._processor.effective(layout, inspection)),
            grid=layout.grid,
            offset=offset,
            num_slots=layout.num_slots,
            num_patches=layout.num_patches,
            param=media.param,
            patches=patches,
            source=made.source,
            uuid_key=made.uuid_key,
            processing=processing,
            seconds_per_grid=inspection.seconds_per_frame * self._family.geometry.temporal_patch_size,
        )

    @asynccontextmanager
    async def _until(self, deadline_s: float | None) -> AsyncIterator[None]:
        """Cancel the block when the deadline passes, and say so."""
        remaining_s = None if deadline_s is None else deadline_s - self._clock()
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlineError("the request's deadline passed before its media were processed")
        try:
            async with asyncio.timeout(remaining_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineError("the request's deadline passed while its media were processed") from None


def max_item_slots(config: PreprocessorConfig, family: Family) -> int:
    """Slots of the largest item that is let through; every budget must hold at least one such item."""
    return max_resized_cells(family.geometry.cell, server_pixel_limits(config.mm_processor_kwargs, family.limits))


def _alias_key(data: EncodedMedia, settings: str, namespace: str) -> EncodedDigest:
    if isinstance(data, bytes):
        return encoded_digest(data, decode_settings=settings, namespace=namespace)
    joined = b"".join(encoded_digest(part) for part in data)
    return encoded_digest(joined, decode_settings=f"{settings} frames={len(data)}", namespace=namespace)


def _is_verdict(error: Exception) -> bool:
    """Whether an error belongs to the bytes, so that who waited for the same bytes gets it too."""
    return isinstance(error, MediaError)


@contextmanager
def _naming(media: MediaInput) -> Iterator[None]:
    """Errors inside say which item they are about."""
    try:
        yield
    except SightlineError as exc:
        exc.at(media.param)
        raise
