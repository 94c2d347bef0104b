"""The encoder stage as its callers see it: requests in, embedding refs out. Implements ports.VisionEncoder.

Each item goes its own way, and one item's trouble is its own:

    memory (refs) ──miss──▶ single flight ──lead──▶ lower tiers ──miss──▶ patches ──▶ batcher ──▶ check ──▶ put
         ▲                       │ join                  │ hit: put                                    │
         └───────────────────────┴───────────────────────┴────────────────◀────────────────────────────┘

A ref in the memory cache keeps its array alive in the object store; evicting the entry frees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from cache_service.identity import EmbeddingIdentity, EncoderFingerprint, embedding_identity
from cache_service.lru import ByteLRU
from cache_service.read_through import Found
from cache_service.single_flight import SingleFlight
from deployments.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PayloadLostError,
    SightlineError,
)
from deployments.messages import EncodedItem, EncodeRequest, MediaItem
from deployments.ports import ObjectStore, Preprocessor
from deployments.vision_encoder.adapters.base import ItemSpec, Modality, VisionItem
from deployments.vision_encoder.embedding_codec import Embedding
from deployments.vision_encoder.encoder import Rows
from deployments.vision_encoder.packing import Load
from deployments.vision_encoder.stats import EncoderStats

Origin = Literal["computed", "joined", "memory", "redis"]


class EmbeddingCache(Protocol):
    """The lower tiers and the other replicas' work; `cache_service.read_through.ReadThrough[Embedding]` is one."""

    async def get_or_compute(self, key: bytes, compute: Callable[[], Awaitable[Embedding]]) -> Found[Embedding]: ...

    async def close(self) -> None: ...


class Batcher(Protocol):
    async def submit(self, item: VisionItem, load: Load) -> Rows: ...

    async def close(self) -> None: ...


class Core(Protocol):
    """What the service asks of the core from the event loop; neither touches the device."""

    @property
    def width(self) -> int: ...

    @property
    def dtype_name(self) -> str: ...

    def describe(self, modality: Modality, grid: tuple[int, int, int]) -> ItemSpec: ...


class EncoderService:
    """Args:
    core: Describes items; the batcher runs it.
    store: Where patches are.
    embeddings: Where embeddings go; `store` if None.
    preprocessor: Makes patches again for items that came without them or lost them; None if there is none.
    fingerprint: Which encoder makes the embeddings; enters every key.
    cache_bytes: Bound of the memory cache, in bytes of embeddings.
    lower: Lower cache tiers, which also store what is computed; None for none.
    join_timeout_s: How long a request waits for another's equal work before it computes by itself.
    clock: Unix time in seconds.
    """

    def __init__(
        self,
        core: Core,
        batcher: Batcher,
        store: ObjectStore,
        *,
        fingerprint: EncoderFingerprint,
        cache_bytes: int,
        stats: EncoderStats,
        preprocessor: Preprocessor | None = None,
        lower: EmbeddingCache | None = None,
        embeddings: ObjectStore | None = None,
        join_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._core, self._batcher, self._store = core, batcher, store
        self._embeddings = embeddings or store
        self._preprocessor, self._lower, self._fingerprint = preprocessor, lower, fingerprint
        self._join_timeout_s, self._clock = join_timeout_s, clock
        self._flight: SingleFlight[EncodedItem] = SingleFlight(
            is_final=lambda error: isinstance(error, InvalidRequestError)
        )
        self.memory: ByteLRU[EmbeddingIdentity, EncodedItem] = ByteLRU(cache_bytes)
        self.stats = stats

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        """Embeddings of all items, in order.

        All items are brought to an end before the first error is raised: what has been computed is then cached for
        whoever asks again without the bad one.
        """
        work = asyncio.gather(*(self._encode_item(item, request) for item in request.items), return_exceptions=True)
        try:
            async with asyncio.timeout(self._seconds_left(request.deadline_s)):
                results = await work
        except TimeoutError as error:
            raise DeadlineError("the deadline passed while pictures were being encoded") from error
        for item, result in zip(request.items, results, strict=True):
            if isinstance(result, SightlineError):
                raise result.at(item.param) if item.param else result
            if isinstance(result, BaseException):
                raise InternalError(f"the vision encoder failed: {type(result).__name__}") from result
        return tuple(result for result in results if isinstance(result, EncodedItem))

    async def close(self) -> None:
        """Stop the batcher, finish pending writes, forget all refs."""
        await self._batcher.close()
        self.memory.clear()
        if self._lower is not None:
            await self._lower.close()

    def _seconds_left(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else deadline_s - self._clock()

    async def _encode_item(self, item: MediaItem, request: EncodeRequest) -> EncodedItem:
        spec = self._describe(item)
        key = embedding_identity(item.identity, self._fingerprint)
        if request.refresh:
            self.memory.pop(key)
        cached = self.memory.get(key)
        self.stats.cache_results["memory", "miss" if cached is None else "hit"] += 1
        if cached is not None:
            return _with_origin(cached, "memory")
        flight = await self._flight.run(
            key, lambda: self._compute(key, item, spec, request), timeout_s=self._join_timeout_s
        )
        if flight.joined:
            self.stats.single_flight_joins += 1
            return _with_origin(flight.value, "joined")
        return flight.value

    def _describe(self, item: MediaItem) -> ItemSpec:
        try:
            spec = self._core.describe(item.modality, item.grid)
        except InvalidRequestError as error:
            self.stats.rejected_items[error.code] += 1
            raise
        if spec.num_slots != item.num_slots:
            raise InternalError(
                f"the prompt holds {item.num_slots} placeholders for an item of {spec.num_slots} embeddings",
                code="embedding_count_mismatch",
            )
        return spec

    async def _compute(
        self, key: EmbeddingIdentity, item: MediaItem, spec: ItemSpec, request: EncodeRequest
    ) -> EncodedItem:
        """The leader's work; its result is in the memory cache before any caller has it."""
        embedding, origin = await self._find(key, item, spec, request)
        rows = embedding.rows
        # Megabytes are copied: on the event loop they would keep the next round from starting.
        ref = await asyncio.to_thread(self._embeddings.put, rows)
        encoded = EncodedItem(
            identity=item.identity,
            num_slots=item.num_slots,
            width=self._core.width,
            dtype=self._core.dtype_name,  # type: ignore[arg-type]
            embeddings=ref,
            origin=origin,
        )
        self.memory.put(key, encoded, rows.nbytes)
        return encoded

    async def _find(
        self, key: EmbeddingIdentity, item: MediaItem, spec: ItemSpec, request: EncodeRequest
    ) -> tuple[Embedding, Origin]:
        async def compute() -> Embedding:
            patches = await self._patches(item, request.deadline_s)
            load = sum(spec.loads.values(), Load())
            rows = await self._batcher.submit(VisionItem(item.modality, item.grid, patches), load)
            self._check_rows(rows, item)
            return Embedding(rows, self._core.dtype_name, item.grid, request.namespace)

        if self._lower is None:
            return await compute(), "computed"
        found = await self._lower.get_or_compute(key, compute)
        embedding = found.value
        if tuple(embedding.rows.shape) != (item.num_slots, self._core.width) or (
            embedding.dtype != self._core.dtype_name
        ):
            # The key says that this cannot be; computing is always right.
            self.stats.cache_results[found.origin, "corrupt"] += 1
            return await compute(), "computed"
        self.stats.cache_results["lower", "miss" if found.origin == "computed" else "hit"] += 1
        return embedding, found.origin if found.origin in ("computed", "joined") else "redis"  # type: ignore[return-value]

    async def _patches(self, item: MediaItem, deadline_s: float | None) -> np.ndarray:
        """The item's pixels, made again if they never came or were lost on the way."""
        if item.patches is not None:
            try:
                return await self._store.get(item.patches)
            except PayloadLostError:
                if self._preprocessor is None:
                    raise
        if self._preprocessor is None:
            raise PayloadLostError("an item came without patches, and nothing here can make them")
        self.stats.patches_remade += 1
        return await self._store.get(await self._preprocessor.make_patches(item, deadline_s))

    def _check_rows(self, rows: Rows, item: MediaItem) -> None:
        """Nothing leaves with another number of rows than the prompt has placeholders."""
        if tuple(rows.shape) != (item.num_slots, self._core.width):
            raise InternalError(
                f"the vision encoder made {tuple(rows.shape)} for an item of {(item.num_slots, self._core.width)}",
                code="embedding_count_mismatch",
            )


def _with_origin(item: EncodedItem, origin: Origin) -> EncodedItem:
    return replace(item, origin=origin)
