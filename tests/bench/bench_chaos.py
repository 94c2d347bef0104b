"""Parts of a running application die one after the other while requests come in: what do the clients see?

    python -m tests.bench.bench_chaos [--requests 2000] [--every-s 10] [--nodes N] \\
        [--commit $(git rev-parse HEAD)] [--out FILE]

The dev configuration with the shipped model, two replicas of each deployment and a Valkey server of its own. In rounds,
each in an order of its own, a replica of each deployment, the Valkey server and Serve's controller are killed
(SIGKILL), and one replica of each deployment is frozen (SIGSTOP) for a while. With --nodes the replicas are spread over
so many worker nodes of a real Ray cluster on this machine, and whole nodes are killed as well, twice a round; another
one joins some time later. Clients talk to the proxy of the head, as to one that a load balancer finds alive.

Every other request bears a salt of its own, so that no cache helps it. Every request streams and has a known answer;
tests/serve/streams.py says what `right`, `wrong`, `failed` and `lost` mean. `recovered` is the time from an event to
the last request that came out otherwise than right, `slowest` the longest that a request took which was under way at
the event, or began before the next one, and `whole` the time until all replicas ran again (with --nodes, where the next
event waits for that).

Exit status: 1 if any request was lost or answered wrongly, or the application did not become whole again; the load ends
then. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
from tqdm import tqdm

from tests.bench.record import header
from tests.redis.rig import Server, running_server
from tests.serve.app_process import running_app
from tests.serve.cluster_app import DEPLOYMENTS, ClusterApp, deployments_of, dev_config, running_cluster_app
from tests.serve.examples import load_examples
from tests.serve.streams import Outcome, ask

RESTART_S = 3.0
"""After which a killed Valkey server is started again, empty."""
WHOLE_TIMEOUT_S = 180.0
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "failed", "lost")


class App(Protocol):
    url: str
    model: str
    application: str

    def processes(self) -> list[psutil.Process]: ...


@dataclass(frozen=True)
class Ended:
    outcome: Outcome
    began_s: float
    ended_s: float
    what: str = ""


@dataclass
class Event:
    name: str
    at_s: float
    until_s: float = float("inf")
    whole_s: float | None = None
    """Until all replicas ran again."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the requests that ended between this event and the next."""
    recovered_s: float = 0.0
    """Until the last request that did not come out right."""
    slowest_s: float = 0.0
    """Of the requests that were under way at the event or began before the next."""

    def judge(self, requests: list[Ended]) -> None:
        for one in requests:
            if one.began_s < self.until_s and one.ended_s >= self.at_s:
                self.slowest_s = max(self.slowest_s, one.ended_s - one.began_s)
            if self.at_s <= one.ended_s < self.until_s:
                self.outcomes[one.outcome] += 1
                if one.outcome != "right":
                    self.recovered_s = max(self.recovered_s, one.ended_s - self.at_s)

    def as_json(self, began_s: float) -> dict[str, Any]:
        whole = {} if self.whole_s is None else {"whole_s": round(self.whole_s, 1)}
        times = {"recovered_s": round(self.recovered_s, 1), "slowest_s": round(self.slowest_s, 1), **whole}
        return {"name": self.name, "at_s": round(self.at_s - began_s, 1), **times, **self.outcomes}


class Chaos:
    """Does harm to one application, a step at a time, for ever.

    Args:
        only: Part of the names of the events that take place; empty: all do.
        node_back_s: After which a killed node is replaced.
    """

    def __init__(
        self, app: App, valkey: Server, *, only: str = "", freeze_s: float, node_back_s: float, seed: int
    ) -> None:
        self._app, self._valkey, self._only = app, valkey, only
        self._freeze_s, self._node_back_s = freeze_s, node_back_s
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and deeds, round after round, each in an order of its own."""
        title = f"ServeReplica:{self._app.application}:"
        turns = [("kill Redis", self._kill_redis), ("kill the controller", self._killing("ServeController"))]
        turns += [(f"kill {name}", self._killing(title + name)) for name in DEPLOYMENTS]
        turns += [(f"freeze {name}", self._freezing(title + name)) for name in DEPLOYMENTS]
        if isinstance(self._app, ClusterApp):
            turns += [("kill a node", self._kill_node)] * 2
        turns = [turn for turn in turns if self._only in turn[0]]
        while True:
            self._random.shuffle(turns)
            yield from turns

    async def whole_again(self) -> float | None:
        """Seconds until all replicas run and nothing is frozen, where that can be told."""
        if not isinstance(self._app, ClusterApp):
            return None
        began_s = time.monotonic()
        while time.monotonic() - began_s < WHOLE_TIMEOUT_S:
            if await asyncio.to_thread(self._is_whole, self._app):
                return time.monotonic() - began_s
            await asyncio.sleep(0.5)
        raise RuntimeError(f"not all replicas ran {WHOLE_TIMEOUT_S:.0f} s after the event")

    def _is_whole(self, app: ClusterApp) -> bool:
        try:
            return app.is_whole() and not self._stopped()
        except Exception:  # the controller may be the part that is dead
            return False

    def _stopped(self) -> list[psutil.Process]:
        stopped = []
        for process in self._app.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.append(process)
        return stopped

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)

    def _process(self, title: str) -> psutil.Process:
        found = []
        for process in self._app.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_STOPPED:
                    found.append(process)
        if not found:
            raise RuntimeError(f"there is no process with {title!r} in its title")
        return self._random.choice(found)

    def _killing(self, title: str) -> Callable[[], None]:
        return lambda: self._process(title).kill()

    def _freezing(self, title: str) -> Callable[[], None]:
        def freeze() -> None:
            process = self._process(title)
            process.suspend()
            self._later(self._freeze_s, process.resume)

        return freeze

    def _kill_redis(self) -> None:
        self._valkey.kill()
        self._later(RESTART_S, self._valkey.start)

    def _kill_node(self) -> None:
        assert isinstance(self._app, ClusterApp)
        nodes = self._app.nodes
        nodes.kill(self._random.choice(nodes.workers))
        self._later(self._node_back_s, lambda: nodes.add_worker().wait_until_up())

    def _later(self, seconds: float, deed: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(psutil.NoSuchProcess):  # Serve may have replaced it meanwhile
                await asyncio.to_thread(deed)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def run(
    app: App, chaos: Chaos, *, requests: int, concurrency: int, every_s: float, timeout_s: float
) -> tuple[list[Ended], list[Event], str]:
    """What became of the requests and the events, and what kept the harm from going on."""
    numbered = enumerate(itertools.cycle(load_examples()))
    ended: list[Ended] = []
    events = [Event("nothing", time.monotonic())]
    bar = tqdm(total=requests, unit="request")

    async def work(client: httpx.AsyncClient) -> None:
        while bar.n < requests and not harming.done():
            number, example = next(numbered)
            began_s = time.monotonic()
            outcome, what = await ask(client, app.model, example, f"fresh {number}" if number % 2 else None)
            ended.append(Ended(outcome, began_s, time.monotonic(), what))
            bar.update()
            if outcome == "failed":
                await asyncio.sleep(0.5)  # as Retry-After asks; a loop of refusals would be no load

    async def harm() -> None:
        for name, deed in chaos.steps():
            await asyncio.sleep(every_s)
            events[-1].until_s = time.monotonic()
            events.append(Event(name, events[-1].until_s))
            bar.set_postfix_str(name)
            deed()
            events[-1].whole_s = await chaos.whole_again()

    harming = asyncio.create_task(harm())
    async with httpx.AsyncClient(base_url=app.url, timeout=timeout_s) as client:
        try:
            await asyncio.gather(*(work(client) for _ in range(concurrency)))
        finally:
            # Harm that could not be done proves nothing.
            error = str(harming.exception()) if harming.done() else ""
            harming.cancel()
            await asyncio.gather(harming, return_exceptions=True)
            await chaos.close()
            bar.close()
    for event in events:
        event.judge(ended)
    return ended, events, error


def by_kind(events: list[Event]) -> dict[str, dict[str, Any]]:
    """Sums, and the longest times, of the events of each name."""
    groups: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        groups[event.name].append(event)
    kinds: dict[str, dict[str, Any]] = {}
    for name, group in sorted(groups.items()):
        whole = [event.whole_s for event in group if event.whole_s is not None]
        kinds[name] = {
            "events": len(group),
            **{outcome: sum(event.outcomes[outcome] for event in group) for outcome in OUTCOMES},
            "longest_recovered_s": round(max(event.recovered_s for event in group), 1),
            "slowest_s": round(max(event.slowest_s for event in group), 1),
            "longest_whole_s": round(max(whole), 1) if whole else None,
        }
    return kinds


def print_table(kinds: dict[str, dict[str, Any]]) -> None:
    heads = ("events", *OUTCOMES, "recovered s", "slowest s", "whole s")
    print(f"\n{'event':22}" + "".join(f"{head:>12}" for head in heads))
    for name, values in kinds.items():
        print(f"{name:22}" + "".join(f"{'–' if value is None else value:>12}" for value in values.values()))


@contextmanager
def running(folder: Path, valkey: Server, nodes: int) -> Iterator[App]:
    args = {"cache": {"redis": {"url": valkey.url}}}
    replicas = dict.fromkeys(DEPLOYMENTS, 2)
    if not nodes:
        with running_app(folder, args=args, replicas=replicas) as app:
            yield app
        return
    config = dev_config(**replicas)
    config["applications"][0]["args"] |= args
    for deployment in deployments_of(config).values():
        deployment["max_replicas_per_node"] = 1  # the loss of a node takes no more than half of anything
    with running_cluster_app(folder, config, workers=nodes) as cluster:
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--every-s", type=float, default=10.0, help="between two events (default: %(default)s)")
    parser.add_argument("--freeze-s", type=float, default=15.0, help="length of a freeze (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="a silent request is lost after")
    parser.add_argument("--nodes", type=int, default=0, help="worker nodes; two at least (default: one machine)")
    parser.add_argument(
        "--node-back-s", type=float, default=5.0, help="until a killed node is replaced (default: %(default)s)"
    )
    parser.add_argument("--events", default="", help="only events with this in their names, such as `node`")
    parser.add_argument("--seed", type=int, default=1, help="of the order of events and the choice of victims")
    parser.add_argument("--commit", default="unknown", help="of the tree, for the record (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    if args.nodes == 1:
        parser.error("--nodes is 1; allowed: 0, or 2 and more")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server() as valkey,
        running(Path(folder), valkey, args.nodes) as app,
    ):
        chaos = Chaos(
            app,
            valkey,
            only=args.events,
            freeze_s=args.freeze_s,
            node_back_s=args.node_back_s,
            seed=args.seed,
        )
        ended, events, error = asyncio.run(
            run(
                app,
                chaos,
                requests=args.requests,
                concurrency=args.concurrency,
                every_s=args.every_s,
                timeout_s=args.timeout_s,
            )
        )
    total, kinds = Counter(one.outcome for one in ended), by_kind(events)
    print_table(kinds)
    reasons = Counter(f"{one.outcome}: {one.what}" for one in ended if one.outcome != "right")
    for reason, number in reasons.most_common(20):
        print(f"{number:6}  {reason}")
    result = {
        **header("chaos"), "commit": args.commit, **({"error": error} if error else {}),
        "requests": len(ended), "outcomes": dict(total), "reasons": dict(reasons.most_common(20)), "by_kind": kinds,
        "events": [event.as_json(events[0].at_s) for event in events],
    }  # fmt: skip
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if error or total["lost"] or total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
