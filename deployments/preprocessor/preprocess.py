"""The preprocessor stage: a request's messages and media in, token ids and items out. Knows nothing about Ray.

    admit ─▶ tokenize ─▶ load + inspect (all media at once) ─▶ check the length ─▶ expand ─▶ decode, resize, patchify
    counts    template    read, digest, size from the header    before pixels      spans     only what is new

Checks go from cheap to costly: nothing is fetched for a request that its own text already disqualifies, and nothing is
decoded for one whose pictures don't fit the context. A picture seen before is not decoded again: its digest and size
are in the alias table, so its item travels without patches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cache_service.identity import ContentDigest, EncodedDigest, encoded_digest, item_identity
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
from deployments.messages import MediaInput, MediaItem, PreparedPrompt, PrepareRequest, Ref
from deployments.ports import ObjectStore
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.families.base import Family, Layout
from deployments.preprocessor.gather import gather_distinct
from deployments.preprocessor.mm_options import apply_detail, parse_pixel_limits, server_pixel_limits
from deployments.preprocessor.picture import PictureProcessor, ProcessedPicture
from deployments.preprocessor.prompt import PromptBuilder
from deployments.preprocessor.resize import PixelLimits
from deployments.preprocessor.sources import MediaSources
from deployments.preprocessor.workers import DecodeWorkers

T = TypeVar("T")

_ALIAS_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class _KnownPicture:
    """What the alias table says about a file's bytes."""

    content: ContentDigest
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _LoadedPicture:
    """Encoded bytes at hand, size known, nothing decoded."""

    data: bytes
    key: EncodedDigest
    size: tuple[int, int]
    known: _KnownPicture | None
    limits: PixelLimits


@dataclass(frozen=True, slots=True)
class _MadePicture:
    """Digest, layout and, if it was decoded, patches."""

    content: ContentDigest
    layout: Layout
    source: Ref
    patches: Ref | None


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
    decodes: int
    remakes: int
    """Patches made again for items that travelled without."""
    alias: LRUStats
    sources: LRUStats
    uuids: UuidTableStats
    flights: SingleFlightStats


class PreprocessorCore:
    """Implements `ports.Preprocessor`.

    Args:
        prompts: Template and tokenizer.
        processor: Names the processing; its pixel work is done by `workers`.
        workers: Decode, resize and patchify off the event loop.
        sources: Reads media.
        store: Takes patches and encoded bytes.
        clock: Unix time in seconds, for deadlines.
    """

    def __init__(
        self,
        config: PreprocessorConfig,
        *,
        family: Family,
        prompts: PromptBuilder,
        processor: PictureProcessor,
        workers: DecodeWorkers,
        sources: MediaSources,
        store: ObjectStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._family = family
        self._prompts = prompts
        self._processor = processor
        self._workers = workers
        self._sources = sources
        self._store = store
        self._clock = clock
        self._bounds = server_pixel_limits(config.mm_processor_kwargs, family.limits)
        self._aliases: ByteLRU[tuple[str, EncodedDigest], _KnownPicture] = ByteLRU(config.alias_cache_bytes)
        self._refused = NegativeCache()
        self._flights: SingleFlight[tuple[ProcessedPicture, Ref]] = SingleFlight(is_final=_is_verdict)
        self._requests = self._pictures = self._decodes = self._remakes = 0

    # -- ports.Preprocessor -------------------------------------------------------------------------------------------
    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        """See `ports.Preprocessor`. Cancelling it stops fetches and drops decodes that have not begun."""
        self._requests += 1
        tally = _Tally()
        async with self._until(request.deadline_s):
            limits = self._admit(request)
            token_ids = await self._tokenize(request, tally)
            loaded = await self._load_all(request, limits, tally)
            layouts = [self._family.layout(*picture.size, picture.limits) for picture in loaded]
            num_tokens = len(token_ids) + sum(layout.num_slots - 1 for layout in layouts)
            self._check_length(request, num_tokens, layouts)
            expanded = self._prompts.expand(token_ids, [layout.num_slots for layout in layouts])
            made = await self._make_all(request, loaded, tally)
        for media, picture, result in zip(request.media, loaded, made, strict=True):
            self._sources.remember(media, request.namespace, result.content, picture.data)
        return PreparedPrompt(
            token_ids=expanded.token_ids,
            items=self._items(request, layouts, made, expanded.offsets),
            stage_seconds=dict(tally.seconds),
            cache_results=dict(tally.lookups),
        )

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> Ref:
        """See `ports.Preprocessor`.

        Raises:
            PayloadLostError: The item's encoded bytes are gone as well; the request must be prepared again.
        """
        if item.source is None:
            raise PayloadLostError("the item carries no source to make patches from")
        self._remakes += 1
        async with self._until(deadline_s):
            data = await self._store.get(item.source)
            height, width = item.processing["resized_height"], item.processing["resized_width"]
            patches = await self._workers.remake(data, height, width)
            if len(patches) != item.num_patches:
                raise InternalError(f"{len(patches)} patches were made for an item of {item.num_patches}")
            return await asyncio.to_thread(self._store.put, patches)

    async def close(self) -> None:
        """Stop workers and connections."""
        await self._sources.close()
        await self._workers.close()

    def stats(self) -> PreprocessorStats:
        return PreprocessorStats(
            requests=self._requests,
            pictures=self._pictures,
            decodes=self._decodes,
            remakes=self._remakes,
            alias=self._aliases.stats(),
            sources=self._sources.cache_stats(),
            uuids=replace(self._sources.uuid_stats()),
            flights=replace(self._flights.stats),
        )

    # -- admission: nothing here costs more than reading the request --------------------------------------------------
    def _admit(self, request: PrepareRequest) -> PixelLimits:
        for modality, count in Counter(media.modality for media in request.media).items():
            limit = self._config.limit_mm_per_prompt.get(modality, 0)
            if count > limit:
                raise InvalidRequestError(
                    f"the request has {count} items of type {modality}; at most {limit} are allowed",
                    code="too_many_media",
                    param="messages",
                )
        limits = parse_pixel_limits(request.mm_processor_kwargs, self._bounds)
        for media in request.media:
            with _naming(media):
                if media.modality != "image":
                    raise MediaError("only pictures are accepted, not videos", code="unsupported_video")
                self._sources.check(media, request.namespace)
        return limits

    def _check_length(self, request: PrepareRequest, num_tokens: int, layouts: Sequence[Layout] = ()) -> None:
        limit = request.max_prompt_tokens
        if limit is None or num_tokens <= limit:
            return
        slots = sum(layout.num_slots for layout in layouts)
        share = f", {slots} of them for pictures" if slots else ""
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens{share}; at most {limit} fit the model's context", param="messages"
        )

    # -- steps --------------------------------------------------------------------------------------------------------
    async def _tokenize(self, request: PrepareRequest, tally: _Tally) -> list[int]:
        modalities = [media.modality for media in request.media]
        with tally.timed("tokenize"):
            token_ids = await asyncio.to_thread(self._prompts.encode, request.prompt, modalities)
        self._check_length(request, len(token_ids))
        return token_ids

    async def _load_all(self, request: PrepareRequest, limits: PixelLimits, tally: _Tally) -> list[_LoadedPicture]:
        async def load(index: int) -> _LoadedPicture:
            media = request.media[index]
            with _naming(media):
                return await self._load(media, request.namespace, apply_detail(limits, media.detail), tally)

        return await gather_distinct([(media.url, media.uuid, media.detail) for media in request.media], load)

    async def _load(self, media: MediaInput, namespace: str, limits: PixelLimits, tally: _Tally) -> _LoadedPicture:
        self._pictures += 1
        with tally.timed("fetch"):
            data = await self._sources.read(media, namespace, self._config.max_image_bytes)
            settings = self._processor.decode_settings
            key = await asyncio.to_thread(encoded_digest, data, decode_settings=settings)
        if refused := self._refused.get(namespace, key):
            raise MediaError(refused.message, code=refused.code)
        known = self._aliases.get((namespace, key))
        tally.lookups["alias:hit" if known else "alias:miss"] += 1
        size = known.size if known else await self._judge(self._workers.probe(data), namespace, key)
        return _LoadedPicture(data, key, size, known, limits)

    async def _make_all(
        self, request: PrepareRequest, loaded: Sequence[_LoadedPicture], tally: _Tally
    ) -> list[_MadePicture]:
        async def make(index: int) -> _MadePicture:
            with _naming(request.media[index]):
                return await self._make(loaded[index], request.namespace, tally)

        return await gather_distinct([(picture.key, picture.limits) for picture in loaded], make)

    async def _make(self, loaded: _LoadedPicture, namespace: str, tally: _Tally) -> _MadePicture:
        """Decodes only what was never seen before, and that only once at a time."""
        if loaded.known is not None:
            layout = self._family.layout(*loaded.size, loaded.limits)
            source = await asyncio.to_thread(self._store.put, loaded.data)
            return _MadePicture(loaded.known.content, layout, source, None)
        key = (namespace, loaded.key, loaded.limits)
        flight = await self._flights.run(key, lambda: self._process(loaded, namespace))
        picture, patches = flight.value
        if flight.joined:
            tally.lookups["flight:join"] += 1
        else:
            tally.seconds["decode"] += picture.decode_s
            tally.seconds["preprocess"] += picture.preprocess_s
        source = await asyncio.to_thread(self._store.put, loaded.data)
        return _MadePicture(picture.content, picture.layout, source, patches)

    async def _process(self, loaded: _LoadedPicture, namespace: str) -> tuple[ProcessedPicture, Ref]:
        self._decodes += 1
        picture = await self._judge(self._workers.process(loaded.data, loaded.limits), namespace, loaded.key)
        patches = await asyncio.to_thread(self._store.put, picture.patches)
        known = _KnownPicture(picture.content, picture.size)
        self._aliases.put((namespace, loaded.key), known, _ALIAS_ENTRY_BYTES + len(namespace))
        return picture, patches

    async def _judge(self, work: Awaitable[T], namespace: str, key: EncodedDigest) -> T:
        """The result of decoding work; a verdict on the bytes is remembered for a while."""
        try:
            return await work
        except MediaError as exc:
            self._refused.put(namespace, key, NegativeResult(exc.code, exc.message))
            raise

    # -- result -------------------------------------------------------------------------------------------------------
    def _items(
        self,
        request: PrepareRequest,
        layouts: Sequence[Layout],
        made: Sequence[_MadePicture],
        offsets: Sequence[int],
    ) -> tuple[MediaItem, ...]:
        items = []
        for media, planned, picture, offset in zip(request.media, layouts, made, offsets, strict=True):
            layout = picture.layout
            if layout.num_slots != planned.num_slots:
                raise InternalError(f"a picture got {layout.num_slots} slots after {planned.num_slots} were planned")
            identity = item_identity(request.namespace, picture.content, self._processor.effective(layout))
            items.append(
                MediaItem(
                    modality=media.modality,
                    identity=identity,
                    grid=layout.grid,
                    offset=offset,
                    num_slots=layout.num_slots,
                    num_patches=layout.num_patches,
                    param=media.param,
                    patches=picture.patches,
                    source=picture.source,
                    processing={"resized_height": layout.resized_height, "resized_width": layout.resized_width},
                )
            )
        return tuple(items)

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
