"""Stand-ins for the ports, as code: no network, no model, no cluster. Each behaves as ports.py promises."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from deployments.errors import PayloadLostError
from deployments.messages import (
    DeltaBatch,
    EncodedItem,
    EncodeRequest,
    GenerateRequest,
    GenerationStats,
    MediaItem,
    PreparedPrompt,
    PrepareRequest,
    Ref,
    SequenceDelta,
)


class MemoryObjectStore:
    """Refs are integers; `lose()` makes one unreadable, as a dead node would."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self._ids = itertools.count(1)

    def put(self, value: Any) -> Ref:
        ref = next(self._ids)
        self.values[ref] = value
        return ref

    async def get(self, ref: Ref) -> Any:
        await asyncio.sleep(0)
        if ref not in self.values:
            raise PayloadLostError(f"ref {ref} is gone")
        return self.values[ref]

    def lose(self, ref: Ref) -> None:
        del self.values[ref]


class FakePreprocessor:
    """Answers every prompt with the same token ids and no items, and counts calls. Waits on `gate` if set."""

    def __init__(self, token_ids: tuple[int, ...] = (1, 2, 3), items: tuple[MediaItem, ...] = ()) -> None:
        self.token_ids, self.items = token_ids, items
        self.requests: list[PrepareRequest] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return PreparedPrompt(token_ids=self.token_ids, items=self.items)

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> Ref:
        return np.zeros((item.num_patches, 3), np.uint8)


class FakeEncoder:
    """Embeddings that name their item: every row is filled with the identity's first byte. Waits on `gate` if set."""

    def __init__(self, store: MemoryObjectStore, width: int = 8) -> None:
        self.store, self.width = store, width
        self.requests: list[EncodeRequest] = []
        self.gate: asyncio.Event | None = None
        self.errors: list[Exception] = []

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        return tuple(
            EncodedItem(
                identity=item.identity,
                num_slots=item.num_slots,
                width=self.width,
                dtype="float32",
                embeddings=self.store.put(np.full((item.num_slots, self.width), item.identity[0], np.float32)),
            )
            for item in request.items
        )


class FakeEngine:
    """Streams scripted texts, one delta a word. `pause` blocks until set; `aborted` lists closed requests.

    `script` replaces the text by whole batches; `losses` are raised, one a stream, before its first delta.
    """

    def __init__(self, text: str = "a red circle") -> None:
        self.text = text
        self.requests: dict[str, GenerateRequest] = {}
        self.aborted: list[str] = []
        self.pause: asyncio.Event | None = None
        self.submit_error: Exception | None = None
        self.stream_error: Exception | None = None
        self.script: tuple[DeltaBatch, ...] | None = None
        self.losses: list[Exception] = []

    async def submit(self, request: GenerateRequest) -> None:
        await asyncio.sleep(0)
        if self.submit_error is not None:
            raise self.submit_error
        self.requests[request.request_id] = request

    async def stream(self, request_id: str) -> AsyncIterator[DeltaBatch]:
        request = self.requests[request_id]
        finished = False
        try:
            if self.losses:
                raise self.losses.pop(0)
            if self.script is not None:
                async for batch in self._play(self.script):
                    yield batch
                finished = True
                return
            words = self.text.split(" ")
            for position, word in enumerate(words):
                if self.pause is not None:
                    await self.pause.wait()
                await asyncio.sleep(0)
                if self.stream_error is not None:
                    raise self.stream_error
                text = word if position == 0 else " " + word
                yield tuple(SequenceDelta(index=i, text=text, token_ids=(position,)) for i in range(request.sampling.n))
            stats = GenerationStats(prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(words))
            yield tuple(SequenceDelta(index=i, finish_reason="stop", stats=stats) for i in range(request.sampling.n))
            finished = True
        finally:
            if not finished:
                self.aborted.append(request_id)

    async def _play(self, script: tuple[DeltaBatch, ...]) -> AsyncIterator[DeltaBatch]:
        for batch in script:
            if self.pause is not None:
                await self.pause.wait()
            await asyncio.sleep(0)
            yield batch

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
