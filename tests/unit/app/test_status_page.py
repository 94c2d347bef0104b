"""The status page: what is sent, and how it behaves in a real browser in front of a scripted server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from PIL import Image

from app.status_page import load_page, status_router
from deployments.metrics import CONTENT_TYPE, ReplicaMetrics, Sample, render
from tests.unit.app.chromium import PROGRAM, BrowserTab, browser_tab

CHAT = "/v1/chat/completions"


# ---- what is sent
@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(status_router())
    with TestClient(app) as client:
        yield client


def test_page_is_one_answer_with_a_strict_policy(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"(?s)<{tag}>(.*?)</{tag}>", answer.text)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_head_is_answered(client: TestClient) -> None:
    answer = client.head("/")
    assert answer.status_code == 200
    assert answer.content == b""


def test_page_names_no_other_host_and_runs_no_text() -> None:
    text = load_page().html.decode()
    without_namespaces = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?i)(https?:)?//[a-z0-9.-]+\.[a-z]", without_namespaces)
    assert not re.search(r"\b(eval|Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)
    assert not re.search(r"(?i)<[^>]+\s(on\w+|style)=", text)


def test_every_field_has_a_label() -> None:
    text = load_page().html.decode()
    labelled = set(re.findall(r'<label for="([\w-]+)"', text))
    fields = set(re.findall(r'<(?:input|textarea|select) id="([\w-]+)"', text))
    assert fields
    assert fields <= labelled


# ---- a scripted server
@dataclass
class Script:
    """How the server answers, set by a test; and what it has seen."""

    chunks: list[bytes] = field(default_factory=list)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    """Chunk -> what it waits for."""
    refusal: tuple[int, dict[str, Any]] | None = None
    key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)


class Replicas:
    """Three replicas whose metrics move when a chat ends."""

    def __init__(self) -> None:
        self.lookups = {("memory", "hit"): 3.0, ("memory", "miss"): 4.0, ("redis", "miss"): 4.0}
        self.ingress = ReplicaMetrics("Ingress", "i1", self._ingress)
        self.engines = [ReplicaMetrics("LMEngine", replica, self._engine) for replica in ("l1", "l2")]
        self._seconds = self.ingress.histogram("request_seconds")
        self._stages = self.ingress.histogram("request_stage_seconds")

    def chat_ended(self) -> None:
        self._seconds.labels(CHAT).observe(0.75)
        for stage, seconds in {"decode": 0.005, "encode": 0.25, "prefill": 0.04, "generation": 1.5}.items():
            self._stages.labels(stage).observe(seconds)
        self.lookups["memory", "hit"] += 2

    def page(self) -> bytes:
        return render(replica.collect() for replica in (self.ingress, *self.engines))

    def _ingress(self) -> Iterator[Sample]:
        yield "requests_in_flight", ("running",), 2
        yield "requests_in_flight", ("queued",), 1
        for (tier, result), count in self.lookups.items():
            yield "cache_lookups_total", (tier, result), count
        yield "cache_bytes", ("memory",), 3 * 1024 * 1024
        yield "cache_breaker_open", ("redis",), 1

    def _engine(self) -> Iterator[Sample]:
        for state, blocks in {"used": 450, "cached": 40, "free": 10}.items():
            yield "kv_blocks", (state,), blocks
        for state, slots in {"used": 50, "cached": 150, "free": 300}.items():
            yield "embedding_slots", (state,), slots
        yield "scheduler_requests", ("running",), 2
        yield "scheduler_requests", ("waiting",), 4
        yield "budget_rejections_total", ("kv_blocks", "deferred"), 6
        yield "budget_rejections_total", ("context", "rejected"), 1


@dataclass
class Server:
    url: str
    script: Script
    replicas: Replicas


@pytest.fixture
def server() -> Iterator[Server]:
    script, replicas = Script(), Replicas()
    config = uvicorn.Config(
        _application(script, replicas), host="127.0.0.1", port=0, log_level="error", ws="none", lifespan="off"
    )
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        while not runner.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = runner.servers[0].sockets[0].getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}", script, replicas)
    finally:
        for gate in script.gates.values():
            gate.set()
        runner.should_exit = True
        thread.join()


def _application(script: Script, replicas: Replicas) -> FastAPI:
    app = FastAPI()
    app.include_router(status_router())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(replicas.page(), headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return _json(401, {"error": {"message": "No API key was given."}})
        return _json(200, {"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]})

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        script.requests.append({"headers": dict(request.headers), "body": await request.json()})
        if script.refusal is not None:
            return _json(*script.refusal)
        return StreamingResponse(stream(), media_type="text/event-stream")

    async def stream() -> AsyncIterator[bytes]:
        try:
            for number, chunk in enumerate(script.chunks):
                if number in script.gates:
                    await asyncio.to_thread(script.gates[number].wait)
                yield chunk
            replicas.chat_ended()
        except asyncio.CancelledError:
            script.hung_up.set()
            raise

    return app


def _json(status: int, content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def _delta(text: str = "", finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}, ensure_ascii=False).encode() + b"\n\n"


def _usage(**extra: Any) -> bytes:
    usage = {
        "prompt_tokens": 1234,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 16, "image_tokens": 324},
    }
    return b"data: " + json.dumps({"choices": [], "usage": usage, **extra}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


# ---- in a browser
browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")


@pytest.fixture
async def tab(server: Server, tmp_path: Path) -> AsyncIterator[BrowserTab]:
    async with browser_tab(tmp_path / "profile") as tab:
        await tab.look(width=1280, height=900, dark=False)
        await tab.open(server.url + "/")
        await tab.until("document.querySelectorAll('#gauges meter').length === 4")
        await tab.until("document.querySelector('#server').innerText.includes('tiny')")
        yield tab


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGB", (64, 48), (200, 30, 30)).save(path)
    return path


def _file_bytes(path: Path) -> bytes:
    return path.read_bytes()


async def _ask(tab: BrowserTab, question: str = "What color?") -> None:
    await tab.write("#question", question)
    await tab.press("Enter", code=13, ctrl=True)


async def _ended(tab: BrowserTab) -> None:
    await tab.until("!document.querySelector('#send').disabled")


@browser
@pytest.mark.slow
async def test_a_person_asks_about_a_picture(tab: BrowserTab, server: Server, picture: Path) -> None:
    text = _delta("öße: ")
    middle = text.index("ö".encode()) + 1
    server.script.chunks = [
        b": keep-alive\n\n" + _delta("Gr") + text[:middle],  # a chunk that ends inside a character
        text[middle:].replace(b"\n", b"\r\n"),
        _delta("<b>ein</b> roter Kreis"),
        _delta(finish="stop") + _usage() + DONE,
    ]
    first, last = threading.Event(), threading.Event()
    server.script.gates = {1: first, 3: last}
    await tab.choose_file("#picture", picture)
    await tab.until(
        "!document.querySelector('#preview').hidden && document.querySelector('#preview').naturalWidth === 64"
    )
    await _ask(tab)
    await tab.until("document.querySelector('#answer').innerText === 'Gr'")
    first.set()
    await tab.until("document.querySelector('#answer').innerText === 'Größe: <b>ein</b> roter Kreis'")
    assert await tab.value("document.querySelector('#send').disabled && !document.querySelector('#stop').disabled")
    last.set()
    await _ended(tab)

    assert await tab.text("#ending") == "Finished."
    figures = dict(zip(*[iter((await tab.text("#figures")).split("\n"))] * 2, strict=True))
    assert (figures["Prompt tokens"], figures["Image tokens"], figures["Cached tokens"]) == ("1,234", "324", "16")
    assert figures["First text"].endswith("s")
    assert "Mean of" not in await tab.text("#stages-note")
    stages = (await tab.text("#stages")).split()
    assert stages == ["decode", "5.0", "ms", "encode", "250", "ms", "prefill", "40", "ms", "generation", "1.50", "s"]
    assert (await tab.text("#caches")).split() == ["memory", "hit", "2"]

    (request,) = server.script.requests
    (part, question) = request["body"]["messages"][0]["content"]
    assert base64.b64decode(part["image_url"]["url"].partition(",")[2]) == _file_bytes(picture)
    assert question["text"] == "What color?"
    assert request["body"]["model"] == "tiny"
    assert request["body"]["stream_options"] == {"include_usage": True}
    assert "authorization" not in request["headers"]
    assert tab.problems == []


@browser
@pytest.mark.slow
async def test_budgets_and_tiers_are_shown(tab: BrowserTab) -> None:
    gauges = await tab.text("#gauges")
    assert "900 of 1,000 used, 80 cached" in gauges
    assert "100 of 1,000 used, 300 cached" in gauges
    assert "4 running, 8 waiting" in gauges
    assert "2 running, 1 queued" in gauges
    assert await tab.value("[...document.querySelectorAll('#gauges meter')].map(m => m.value / m.max)[0]") == 0.9
    assert (await tab.text("#denials")).split("\n") == ["context\t0\t2", "kv_blocks\t12\t0"]
    assert (await tab.text("#tiers")).split("\n") == ["memory\t3.0 MiB\t3\t4\t0", "redis (skipped)\t–\t0\t4\t0"]


@browser
@pytest.mark.slow
async def test_times_in_the_stream_win_over_metrics(tab: BrowserTab, server: Server) -> None:
    own = {"stage_seconds": {"encode": 0.125}, "cache_results": {"redis hit": 1}}
    server.script.chunks = [_delta("yes"), _delta(finish="length"), _usage(sightline=own), DONE]
    await _ask(tab)
    await _ended(tab)
    assert await tab.text("#ending") == "Cut at the most tokens."
    assert (await tab.text("#stages")).split() == ["encode", "125", "ms"]
    assert (await tab.text("#caches")).split() == ["redis", "hit", "1"]


@browser
@pytest.mark.slow
async def test_what_goes_wrong_is_said(tab: BrowserTab, server: Server) -> None:
    script = server.script
    script.refusal = (400, {"error": {"message": "The picture is too large.", "param": "messages[0]"}})
    await _ask(tab)
    await _ended(tab)
    assert await tab.text("#problem") == "The picture is too large. (messages[0])"
    script.refusal = None
    script.chunks = [_delta("half"), b'data: {"error": {"message": "The server failed."}}\n\n', DONE]
    await _ask(tab)
    await _ended(tab)
    assert await tab.text("#problem") == "The server failed."
    script.chunks = [_delta("half")]
    await _ask(tab)
    await _ended(tab)
    assert "broke off" in await tab.text("#problem")
    assert await tab.text("#answer") == "half"


@browser
@pytest.mark.slow
async def test_stop_hangs_up(tab: BrowserTab, server: Server) -> None:
    server.script.chunks = [_delta("for"), _delta("ever")]
    server.script.gates = {1: threading.Event()}
    await _ask(tab)
    await tab.until("document.querySelector('#answer').innerText === 'for'")
    await tab.value("document.querySelector('#stop').click()")
    await _ended(tab)
    assert await tab.text("#ending") == "Stopped."
    assert await asyncio.to_thread(server.script.hung_up.wait, 10)


@browser
@pytest.mark.slow
async def test_drop_paste_and_remove(tab: BrowserTab, picture: Path) -> None:
    encoded = base64.b64encode(_file_bytes(picture)).decode()
    await tab.value(
        f"""(() => {{
            const bytes = Uint8Array.from(atob("{encoded}"), c => c.charCodeAt(0));
            globalThis.carried = new DataTransfer();
            carried.items.add(new File([bytes], "dropped.png", {{type: "image/png"}}));
            const options = {{dataTransfer: carried, bubbles: true, cancelable: true}};
            document.querySelector("#drop").dispatchEvent(new DragEvent("drop", options));
        }})()"""
    )
    await tab.until("document.querySelector('#picture-note').innerText.startsWith('dropped.png')")
    await tab.value("document.querySelector('#remove').click()")
    assert await tab.value("document.querySelector('#preview').hidden && document.activeElement.id === 'picture'")
    await tab.value("document.body.dispatchEvent(new ClipboardEvent('paste', {clipboardData: carried, bubbles: true}))")
    await tab.until("!document.querySelector('#preview').hidden")
    await tab.value(
        """(() => {
            const carried = new DataTransfer();
            carried.items.add(new File(["text"], "notes.txt", {type: "text/plain"}));
            document.body.dispatchEvent(new ClipboardEvent("paste", {clipboardData: carried, bubbles: true}));
        })()"""
    )
    assert await tab.text("#picture-note") == "notes.txt is not a picture."
    assert tab.problems == []


@browser
@pytest.mark.slow
async def test_keyboard_reaches_everything(tab: BrowserTab) -> None:
    reached = []
    for _ in range(8):
        await tab.press("Tab", code=9)
        reached.append(await tab.value("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:4] == ["A", "picture", "question", "SUMMARY"]
    assert {"send", "answer"} <= set(reached)


@browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_phone_width_and_contrast(tab: BrowserTab, dark: bool) -> None:
    await tab.look(width=340, height=700, dark=dark)
    assert await tab.value("document.documentElement.scrollWidth") <= 340
    for selector in ("body", ".note", "dt", "#send", ".link", "caption", ".problem"):
        assert await tab.value(f"({_CONTRAST})({json.dumps(selector)})") >= 4.5, selector


@browser
@pytest.mark.slow
async def test_a_key_is_asked_for_and_sent(server: Server, tmp_path: Path) -> None:
    server.script.key = "a-long-secret-key"
    server.script.chunks = [_delta("yes", "stop"), DONE]
    async with browser_tab(tmp_path / "profile") as tab:
        await tab.open(server.url + "/")
        await tab.until("document.querySelector('#options').open")
        assert "API key" in await tab.text("#server")
        await tab.write("#key", server.script.key)
        await tab.value("document.querySelector('#key').dispatchEvent(new Event('change'))")
        await tab.until("document.querySelector('#server').innerText.includes('tiny')")
        await _ask(tab)
        await _ended(tab)
    assert server.script.requests[0]["headers"]["authorization"] == "Bearer a-long-secret-key"


def test_scripted_server_shows_the_page(server: Server) -> None:
    assert "Sightline" in httpx.get(server.url + "/").text


_CONTRAST = """selector => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const luminance = color => channels(color).slice(0, 3).map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const element = document.querySelector(selector);
    let behind = element, paint = "rgba(0, 0, 0, 0)";
    while (behind && channels(paint)[3] === 0) {
        paint = getComputedStyle(behind).backgroundColor;
        behind = behind.parentElement;
    }
    const [low, high] = [luminance(paint), luminance(getComputedStyle(element).color)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
}"""
"""WCAG 2.1's contrast ratio of an element's text with what is painted behind it."""
