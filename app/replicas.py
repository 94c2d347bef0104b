"""The application's other deployments as the ingress asks them for more than requests: readiness, metrics, resets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client.metrics_core import Metric
from ray.serve.handle import DeploymentHandle

from app.last_pages import LastPages, ShownPage
from deployments.errors import NotReadyError, SightlineError
from deployments.handles import translated
from deployments.metrics import page_age, render, replica_of
from deployments.vllm_names import with_vllm_names

ANSWER_TIMEOUT_S = 2.0
"""For each replica by itself: one that hangs must not keep the others' metrics back."""
READY_TIMEOUT_S = 2.0


class Replicas:
    """Control-plane calls to every replica of every deployment.

    Args:
        handles: By deployment name; the ingress itself is among them once it serves.
        vllm_model_name: Value of the label `model_name` of series under vLLM's names; None shows none.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle], vllm_model_name: str | None = None) -> None:
        self._handles = dict(handles)
        self._vllm_model_name = vllm_model_name
        self._pages: dict[str, LastPages[list[Metric]]] = {name: LastPages() for name in handles}

    async def check_ready(self) -> None:
        """Return once one replica of every deployment answers. Raises NotReadyError, naming the one that does not."""
        await asyncio.gather(*(self._check(name, handle) for name, handle in self._handles.items()))

    async def metrics_text(self) -> bytes:
        """One Prometheus page over all replicas. A replica that does not answer in time shows its last page, and
        `metrics_age_seconds` says how old that is."""
        pages = await asyncio.gather(*(self._metrics(name, handle) for name, handle in self._handles.items()))
        replicas = [
            [*shown.page, page_age(deployment, shown.replica, shown.age_s)]
            for deployment, of_one in zip(self._handles, pages, strict=True)
            for shown in of_one
        ]
        if self._vllm_model_name is not None:
            replicas = [with_vllm_names(metrics, self._vllm_model_name) for metrics in replicas]
        return render(replicas)

    async def metrics_targets(self) -> list[Mapping[str, Any]]:
        """Replicas that can be scraped directly, in the form of Prometheus's HTTP discovery; empty unless
        `scrape_replicas` is set. One that does not answer is left out until it does."""
        asked = (_ask_each_there_is(handle, name, "metrics_target") for name, handle in self._handles.items())
        answers = await asyncio.gather(*asked)
        return [target for of_one, _ in answers for target in of_one if target is not None]

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

    async def _metrics(self, name: str, handle: DeploymentHandle) -> list[ShownPage[list[Metric]]]:
        answers, num_silent = await _ask_each_there_is(handle, name, "metrics")
        return self._pages[name].update({replica_of(page): page for page in answers}, num_silent, time.monotonic())


async def ask_each(
    handle: DeploymentHandle, name: str, method: str, *args: object, timeout_s: float = ANSWER_TIMEOUT_S
) -> tuple[list[Any], int]:
    """(answers of all replicas that gave one in time, number of those that stayed silent). The dead are neither.

    Raises:
        NotReadyError: There are no replicas.
        SightlineError, TimeoutError: It could not be found out which there are.
    """
    async with asyncio.timeout(timeout_s):
        with translated(f"{name}.{method}"):
            # What `results_async` itself waits for; it knows one time limit for all replicas together only.
            results = await handle.broadcast(method, *args)._fetch_replica_results_async()
    if not results:
        return [], 0
    calls = [asyncio.ensure_future(result.get_async()) for result in results]
    done, silent = await asyncio.wait(calls, timeout=timeout_s)
    for call in silent:
        call.cancel()
    return [call.result() for call in done if call.exception() is None], len(silent)


async def _ask_each_there_is(handle: DeploymentHandle, name: str, method: str) -> tuple[list[Any], int]:
    """`ask_each` for what is shown of replicas: none where that cannot be found out."""
    try:
        return await ask_each(handle, name, method)
    except (TimeoutError, SightlineError):
        return [], 0
