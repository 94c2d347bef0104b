"""The application's other deployments as the ingress asks them for more than requests: readiness, metrics, resets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from ray.serve.handle import DeploymentHandle

from deployments.errors import NotReadyError, SightlineError
from deployments.handles import translated
from deployments.metrics import render

METRICS_TIMEOUT_S = 2.0
STALE_METRICS_S = 30.0
READY_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Page:
    taken_s: float
    replicas: list[list[Metric]]


class Replicas:
    """Control-plane calls to every replica of every deployment.

    Args:
        handles: By deployment name; the ingress itself is among them once it serves.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = dict(handles)
        self._pages: dict[str, _Page] = {}

    async def check_ready(self) -> None:
        """Return once one replica of every deployment answers. Raises NotReadyError, naming the one that does not."""
        await asyncio.gather(*(self._check(name, handle) for name, handle in self._handles.items()))

    async def metrics_text(self) -> bytes:
        """One Prometheus page over all replicas.

        A deployment that does not answer in time shows its last page for a while: a gap for one slow replica would look
        like a reset of every other one's counters.
        """
        pages = await asyncio.gather(*(self._metrics(name, handle) for name, handle in self._handles.items()))
        return render(replica for page in pages for replica in page)

    async def reset_prefix_cache(self) -> None:
        with translated("lm_engine.reset_prefix_cache"):
            await self._handles["LMEngine"].broadcast("reset_prefix_cache").results_async(timeout_s=10)

    async def _check(self, name: str, handle: DeploymentHandle) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                with translated(f"{name}.ready"):
                    await handle.ready.remote()
        except (TimeoutError, SightlineError) as error:
            raise NotReadyError(f"The deployment {name} is not ready yet.", retry_after_s=1) from error

    async def _metrics(self, name: str, handle: DeploymentHandle) -> Iterable[list[Metric]]:
        now = time.monotonic()
        try:
            with translated(f"{name}.metrics"):
                answers: list[Any] = await handle.broadcast("metrics").results_async(
                    timeout_s=METRICS_TIMEOUT_S, return_exceptions=True
                )
        except SightlineError:
            page = self._pages.get(name)
            return page.replicas if page is not None and now - page.taken_s < STALE_METRICS_S else []
        replicas = [answer for answer in answers if not isinstance(answer, BaseException)]
        self._pages[name] = _Page(now, replicas)
        return replicas
