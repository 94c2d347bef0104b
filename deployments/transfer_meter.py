"""Bytes and seconds of what goes through a store, under the names that dashboards know."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from deployments.messages import Ref
from deployments.metrics import ReplicaMetrics
from deployments.ports import EmbeddingTransfer, ObjectStore

Direction = Literal["put", "get"]


class MeteredStore:
    """ports.ObjectStore around another one. What fails is not counted.

    Args:
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        backend: EmbeddingTransfer,
        metrics: ReplicaMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner, self._backend, self._clock = store, backend, clock
        self._bytes = metrics.counter("embedding_transfer_bytes_total")
        self._seconds = metrics.histogram("embedding_transfer_seconds")

    def put(self, value: Any) -> Ref:
        began_s = self._clock()
        ref = self._inner.put(value)
        self._note("put", value.nbytes, began_s)
        return ref

    async def get(self, ref: Ref) -> Any:
        began_s = self._clock()
        value = await self._inner.get(ref)
        self._note("get", value.nbytes, began_s)
        return value

    def _note(self, direction: Direction, num_bytes: int, began_s: float) -> None:
        self._bytes.labels(direction, self._backend).inc(num_bytes)
        self._seconds.labels(direction, self._backend).observe(self._clock() - began_s)
