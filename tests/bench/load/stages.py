"""Time to first token by stage, from the server's own counters, against what its clients saw.

Of `sightline_request_stage_seconds` every stage but `generation` lies before the first token (`generation` begins
there), so their sums over the requests of a run add up to the sum of the clients' times to first token, but for the way
through the network, the proxy and the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.load.answer import Outcome

STAGES = "sightline_request_stage_seconds"
FIRST_TOKEN = "sightline_time_to_first_token_seconds"
REQUESTS = "sightline_requests_total"
AFTER_FIRST_TOKEN = ("generation",)
SETTLE_S = 5.0
"""How long counters may take to show requests whose answers have come; a page of replicas is gathered, not live."""
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Counters:
    """What all ingress replicas together have counted so far."""

    stage_s: Mapping[str, float]
    first_token_s: float
    first_tokens: float
    requests: float

    @classmethod
    def parse(cls, page: str) -> Counters | None:
        """From a Prometheus page; None if another server's."""
        stage_s: dict[str, float] = {}
        totals = dict.fromkeys((f"{FIRST_TOKEN}_sum", f"{FIRST_TOKEN}_count", REQUESTS), 0.0)
        ours = False
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"{STAGES}_sum":
                    stage = sample.labels["stage"]
                    stage_s[stage] = stage_s.get(stage, 0.0) + sample.value
                elif sample.name in totals:
                    totals[sample.name] += sample.value
                    ours = True
        if not ours:
            return None
        return cls(stage_s, totals[f"{FIRST_TOKEN}_sum"], totals[f"{FIRST_TOKEN}_count"], totals[REQUESTS])

    def since(self, before: Counters) -> Counters:
        """What was counted in between.

        Raises:
            ValueError: Something shrank: a replica of the ingress came or went, and the difference says nothing.
        """
        stages = {name: value - before.stage_s.get(name, 0.0) for name, value in self.stage_s.items()}
        gained = Counters(
            stages,
            self.first_token_s - before.first_token_s,
            self.first_tokens - before.first_tokens,
            self.requests - before.requests,
        )
        if min(gained.requests, gained.first_tokens, *stages.values(), 0.0) < -1e-6:
            raise ValueError("the server's counters went back during the run; was a replica replaced?")
        return gained


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Mean seconds of one request until its first token, as the server and as its clients saw it."""

    stage_s: Mapping[str, float]
    """Most expensive first."""
    server_s: float
    """From arrival to the first delta, by the server's clock alone."""
    client_s: float

    @property
    def sum_s(self) -> float:
        return sum(self.stage_s.values())

    @property
    def ratio(self) -> float:
        """Share of the clients' time that the stages explain."""
        return self.sum_s / self.client_s

    @property
    def adds_up(self) -> bool:
        """Within `TOLERANCE`."""
        return abs(self.ratio - 1) <= TOLERANCE

    def as_json(self) -> dict[str, object]:
        return {
            "stage_ms": {name: round(seconds * 1e3, 4) for name, seconds in self.stage_s.items()},
            "sum_of_stages_ms": round(self.sum_s * 1e3, 4),
            "server_ttft_ms": round(self.server_s * 1e3, 4),
            "client_ttft_ms": round(self.client_s * 1e3, 4),
            "sum_to_client": round(self.ratio, 4),
            "adds_up": self.adds_up,
        }


def first_token(gained: Counters, outcomes: Sequence[Outcome]) -> FirstToken | str:
    """The breakdown, or why there is none: it holds only where server and client count the same requests."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        return "no request was answered"
    if len(good) != len(outcomes):
        return "some requests failed, and the server's stages count those too"
    if round(gained.requests) != len(good) or round(gained.first_tokens) != len(good):
        return f"the server finished {gained.requests:g} requests while this client asked {len(good)}; is it alone?"
    stages = {name: s / len(good) for name, s in gained.stage_s.items() if name not in AFTER_FIRST_TOKEN and s > 0}
    return FirstToken(
        dict(sorted(stages.items(), key=lambda entry: -entry[1])),
        gained.first_token_s / len(good),
        sum(outcome.ttft_s for outcome in good) / len(good),
    )


async def read_counters(url: str, api_key: str | None, at_least: float = 0.0) -> Counters | None:
    """The server's counters once they show `at_least` so many requests, or have had `SETTLE_S` to do so.

    None if the server has no such metrics.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as session:
        waited_s = 0.0
        while True:
            counters = await _read(session, url)
            if counters is None or counters.requests >= at_least or waited_s >= SETTLE_S:
                return counters
            await asyncio.sleep(0.25)
            waited_s += 0.25


async def _read(session: aiohttp.ClientSession, url: str) -> Counters | None:
    try:
        async with session.get(f"{url}/metrics") as response:
            return Counters.parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
