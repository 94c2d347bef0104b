"""Asks one question over HTTP and times the answer. Cheap enough that the server is what is measured."""

from __future__ import annotations

import io
import time

import aiohttp
import orjson

from tests.bench.load.answer import AnswerReader, Outcome, describe

PATH = "/v1/chat/completions"


def open_session(timeout_s: float, api_key: str | None) -> aiohttp.ClientSession:
    """Any number of connections; one that is idle is used again."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 18,
    )


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> Outcome:
    """Send one body; failures are in the outcome, none is raised."""
    # aiohttp sends a stream piece by piece, so that a large body does not keep the loop from reading answers.
    payload = io.BytesIO(body)
    outcome = Outcome(begun_s=time.monotonic())
    reader = AnswerReader(outcome)
    try:
        async with session.post(url + PATH, data=payload) as response:
            if response.status != 200:
                outcome.fail(*_refusal(response.status, await response.read()))
            else:
                async for data in response.content.iter_any():
                    reader.feed(data, time.monotonic())
    except TimeoutError:
        outcome.fail("timeout", f"after {time.monotonic() - outcome.begun_s:.1f} s")
    except aiohttp.ClientPayloadError as error:
        outcome.fail("stream cut", str(error))
    except (aiohttp.ClientError, OSError) as error:
        outcome.fail(f"connection: {type(error).__name__}", str(error))
    reader.end(time.monotonic())
    return outcome


def _refusal(status: int, body: bytes) -> tuple[str, str]:
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"HTTP {status}", body.decode(errors="replace")
    return describe(f"HTTP {status}", error)
