"""The stages as their callers see them. Real implementations wrap Ray handles (handles.py) or an in-process core
(colocated encoder); fakes for tests live in tests/fakes.py. All methods raise only `SightlineError`s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from deployments.messages import (
    DeltaBatch,
    EncodedItem,
    EncodeRequest,
    GenerateRequest,
    MediaItem,
    PreparedPrompt,
    PrepareRequest,
    Ref,
)

EmbeddingTransfer = Literal["object_store", "nixl", "cuda_ipc"]
"""How embeddings get from the encoder to the engine: through Ray's shared-memory store, or straight from memory to
memory (see direct_store.py)."""


class ObjectStore(Protocol):
    """Where payloads live between stages. A payload is freed when the last ref to it is dropped."""

    def put(self, value: Any) -> Ref:
        """Store an array or bytes; the store's copy is immutable."""

    async def get(self, ref: Ref) -> Any:
        """The stored value, read-only and without a copy where possible. Raises PayloadLostError."""


class Preprocessor(Protocol):
    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        """Fetch, decode, resize, tokenize. Raises InvalidRequestError and its kin for what the caller did wrong."""

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> Ref:
        """Patches of an item that travelled without them, decoded again from `item.source`."""


class VisionEncoder(Protocol):
    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        """Embeddings of all items, in order. One call may mix cache hits, joins of running work and new work."""


class LMEngine(Protocol):
    async def submit(self, request: GenerateRequest) -> None:
        """Admit a request, or raise: InvalidRequestError (can never fit), OverloadedError (no room now)."""

    def stream(self, request_id: str) -> AsyncIterator[DeltaBatch]:
        """Deltas of an admitted request until every sequence has finished. Closing the iterator aborts the rest."""

    async def abort(self, request_id: str) -> None:
        """Stop and forget a request; unknown ids are ignored."""
