"""Taking Serve down without cutting an answer: refuse new requests, wait for those under way, delete, shut down.

Serve's own shutdown kills its proxies first, whatever they still carry. So nothing may be under way by then: every
ingress replica is told to answer 503 to what comes, and is asked until it has nothing left. All other replicas run on
meanwhile, since a request may not have been through all stages yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ray import serve
from ray.serve.handle import DeploymentHandle

from app.drain import InFlight, drain
from app.replicas import ask_each
from deployments.errors import NotReadyError, SightlineError

logger = logging.getLogger("sightline.serve")

INGRESS = "Ingress"
ANSWER_TIMEOUT_S = 10.0
DELETE_TIMEOUT_S = 30.0
"""For idle replicas to leave."""
REPORT_EVERY_S = 10.0
"""A number that does not change is told as seldom as this."""


class ServeShutdown:
    """Of the Serve instance of the cluster that this process is connected to. One per shutdown.

    Args:
        is_hurried: Whether to cut what is still under way.
    """

    def __init__(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        self._is_hurried = is_hurried
        self._ingresses: dict[str, DeploymentHandle] = {}
        """By application."""
        self._told: tuple[float, InFlight] | None = None

    def run(self, timeout_s: float) -> InFlight:
        """Take everything down; returns what was cut because it was still under way after `timeout_s`."""
        applications = serve.status().applications
        self._ingresses = {
            name: serve.get_deployment_handle(INGRESS, name)
            for name, application in applications.items()
            if INGRESS in application.deployments
        }
        left = asyncio.run(
            drain(self._ask, timeout_s=timeout_s, report=self._report, is_hurried=self._is_hurried)
        )  # fmt: skip
        if left.is_over and timeout_s > 0:
            # Serve waits for its own count of calls to be zero: the last bytes of an answer are out then.
            for name in applications:
                serve.delete(name, _blocking=False)
            self._wait_until_deleted()
        serve.shutdown()
        return left

    def resume(self) -> None:
        """Take requests again, after a `run` that was interrupted."""
        asyncio.run(self._ask(draining=False))

    async def _ask(self, draining: bool = True) -> InFlight:
        asked = (self._ask_one(name, handle, draining) for name, handle in self._ingresses.items())
        return sum(await asyncio.gather(*asked), InFlight())

    async def _ask_one(self, name: str, handle: DeploymentHandle, draining: bool) -> InFlight:
        try:
            counts, num_silent = await ask_each(handle, INGRESS, "set_draining", draining, timeout_s=ANSWER_TIMEOUT_S)
        except NotReadyError:
            return InFlight(silent_replicas=self._num_running(name))  # none, or the handle has not heard of them yet
        except (TimeoutError, SightlineError) as error:
            logger.warning("the ingress of %s cannot be asked: %s", name, error)
            return InFlight(silent_replicas=max(1, self._num_running(name)))
        return InFlight(sum(counts), num_silent)

    def _num_running(self, name: str) -> int:
        application = serve.status().applications.get(name)
        if application is None or INGRESS not in application.deployments:
            return 0
        states = application.deployments[INGRESS].replica_states
        return sum(number for state, number in states.items() if state == "RUNNING")

    def _wait_until_deleted(self) -> None:
        deadline_s = time.monotonic() + DELETE_TIMEOUT_S
        while serve.status().applications and time.monotonic() < deadline_s and not self._is_hurried():
            time.sleep(0.2)

    def _report(self, seconds: float, in_flight: InFlight) -> None:
        if self._told is not None:
            told_s, what = self._told
            if what == in_flight and seconds - told_s < REPORT_EVERY_S:
                return
        self._told = seconds, in_flight
        logger.info("[%5.1f s] %s", seconds, in_flight)
