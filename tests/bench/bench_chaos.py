"""Parts of a running application die one after the other while requests come in: what do the clients see?

    python -m tests.bench.bench_chaos [--requests 2000] [--every-s 10] [--out FILE]

The dev configuration with the shipped model, two replicas of each stage and a Valkey server of its own. In turn a
Preprocessor, a VisionEncoder and an LMEngine replica, the Valkey server and Serve's controller are killed (SIGKILL),
and one replica of each stage is frozen (SIGSTOP) for a while. Every other request bears a salt of its own, so that no
cache helps it. Every request streams and has a known answer:

- `right`: the whole answer came, and it is the known one,
- `wrong`: another answer came,
- `failed`: a clear error, as a status with OpenAI's error body or as an error event in the stream,
- `lost`: anything else: a broken connection, a stream that just ends, no end within --timeout-s.

Exit status: 1 if any request was lost or answered wrongly. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
from tqdm import tqdm

from tests.bench.record import header
from tests.redis.rig import Server, running_server
from tests.serve.app_process import AppProcess, running_app
from tests.serve.examples import Example, load_examples

Outcome = Literal["right", "wrong", "failed", "lost"]
STAGES = ("Preprocessor", "VisionEncoder", "LMEngine")
RESTART_S = 3.0
"""After which a killed Valkey server is started again, empty."""


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
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the requests that ended between this event and the next."""
    recovered_s: float = 0.0
    """Until the last request that did not come out right."""


async def ask(client: httpx.AsyncClient, model: str, example: Example, salt: str | None) -> tuple[Outcome, str]:
    body = {"model": model, "messages": example.messages, "temperature": 0, "max_tokens": 96, "stream": True}
    if salt is not None:
        body["cache_salt"] = salt
    text, error, done = [], "", False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                found = json.loads(await response.aread())["error"]
                return "failed", f"{response.status_code} {found['code']}"
            async for data in _events(response):
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    error = f"event {event['error']['code']}"
                elif event["choices"]:
                    text.append(event["choices"][0]["delta"].get("content") or "")
    except (httpx.HTTPError, json.JSONDecodeError, KeyError, TypeError) as exc:
        return "lost", f"{type(exc).__name__}: {exc}"
    if error:
        return "failed", error
    if not done:
        return "lost", "the stream just ended"
    answer = "".join(text)
    return ("right", "") if example.is_answered_by(answer) else ("wrong", f"{example.name}: {answer!r}")


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


class Chaos:
    """Does harm to one application, a step at a time, for ever."""

    def __init__(self, app: AppProcess, valkey: Server, freeze_s: float) -> None:
        self._app, self._valkey, self._freeze_s = app, valkey, freeze_s
        self._tasks: set[asyncio.Task[None]] = set()

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and deeds, in turns."""
        title = f"ServeReplica:{self._app.application}:"
        kills = [(f"kill {stage}", self._killing(title + stage)) for stage in STAGES]
        freezes = [(f"freeze {stage}", self._freezing(title + stage)) for stage in STAGES]
        others = [("kill Redis", self._kill_redis), ("kill the controller", self._killing("ServeController"))]
        turns = itertools.chain.from_iterable(itertools.zip_longest(kills, freezes, others))
        return itertools.cycle([turn for turn in turns if turn is not None])

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)

    def _process(self, title: str) -> psutil.Process:
        for process in self._app.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_STOPPED:
                    return process
        raise RuntimeError(f"there is no process with {title!r} in its title")

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

    def _later(self, seconds: float, deed: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(psutil.NoSuchProcess):  # Serve may have replaced it meanwhile
                await asyncio.to_thread(deed)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def run(
    app: AppProcess, chaos: Chaos, *, requests: int, concurrency: int, every_s: float, timeout_s: float
) -> tuple[list[Ended], list[Event]]:
    numbered = enumerate(itertools.cycle(load_examples()))
    ended: list[Ended] = []
    events = [Event("nothing", time.monotonic())]
    bar = tqdm(total=requests, unit="request")

    async def work(client: httpx.AsyncClient) -> None:
        while bar.n < requests:
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

    async with httpx.AsyncClient(base_url=app.url, timeout=timeout_s) as client:
        harming = asyncio.create_task(harm())
        try:
            await asyncio.gather(*(work(client) for _ in range(concurrency)))
            if harming.done():
                harming.result()  # harm that could not be done proves nothing
        finally:
            harming.cancel()
            await asyncio.gather(harming, return_exceptions=True)
            await chaos.close()
            bar.close()
    for event in events:
        for one in ended:
            if event.at_s <= one.ended_s < event.until_s:
                event.outcomes[one.outcome] += 1
                if one.outcome != "right":
                    event.recovered_s = max(event.recovered_s, one.ended_s - event.at_s)
    return ended, events


def as_json(event: Event, began_s: float) -> dict[str, Any]:
    at_s, recovered_s = round(event.at_s - began_s, 1), round(event.recovered_s, 1)
    return {"name": event.name, "at_s": at_s, "recovered_s": recovered_s, **event.outcomes}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--every-s", type=float, default=10.0, help="between two events (default: %(default)s)")
    parser.add_argument("--freeze-s", type=float, default=15.0, help="length of a freeze (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="a silent request is lost after")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    parser.add_argument("--log", type=Path, help="keep the server's log there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server() as valkey:
        options: dict[str, Any] = {
            "args": {"cache": {"redis": {"url": valkey.url}}}, "replicas": dict.fromkeys(STAGES, 2),
        }  # fmt: skip
        with running_app(Path(folder), **options) as app:
            chaos = Chaos(app, valkey, args.freeze_s)
            ended, events = asyncio.run(
                run(
                    app,
                    chaos,
                    requests=args.requests,
                    concurrency=args.concurrency,
                    every_s=args.every_s,
                    timeout_s=args.timeout_s,
                )
            )
            if args.log:
                args.log.write_bytes(app.log.read_bytes())
    total = Counter(one.outcome for one in ended)
    print(f"\n{'event':22}{'at s':>8}{'right':>8}{'wrong':>8}{'failed':>8}{'lost':>8}{'recovered s':>13}")
    for event in events:
        counts = "".join(f"{event.outcomes[name]:8}" for name in ("right", "wrong", "failed", "lost"))
        print(f"{event.name:22}{event.at_s - events[0].at_s:8.1f}{counts}{event.recovered_s:13.1f}")
    reasons = Counter(f"{one.outcome}: {one.what}" for one in ended if one.outcome != "right")
    for reason, count in reasons.most_common(20):
        print(f"{count:6}  {reason}")
    result = {
        **header("chaos"),
        "requests": len(ended), "outcomes": dict(total), "reasons": dict(reasons.most_common(20)),
        "events": [as_json(event, events[0].at_s) for event in events],
    }  # fmt: skip
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if total["lost"] or total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
