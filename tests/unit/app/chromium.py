"""A headless Chromium driven over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)
_WAIT_S = 20.0


class BrowserTab:
    """One page. `problems` gathers what the page logs as errors, its uncaught exceptions and policy violations."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []

    async def call(self, method: str, *, limit_s: float = _WAIT_S, **parameters: Any) -> dict[str, Any]:
        number = len(self._replies)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        message = await asyncio.wait_for(reply, limit_s)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "DOM"):
            await self.call(f"{domain}.enable")
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), _WAIT_S)

    async def value(self, expression: str, limit_s: float = _WAIT_S) -> Any:
        """Of a JavaScript expression in the page; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", limit_s=limit_s, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    async def until(self, expression: str, limit_s: float = _WAIT_S) -> None:
        """Wait until the expression is true."""
        look = f"new Promise(done => {{ const look = () => ({expression}) ? done() : setTimeout(look, 20); look(); }})"
        try:
            await self.value(look, limit_s)
        except TimeoutError:
            raise TimeoutError(f"never true: {expression}") from None

    async def text(self, selector: str) -> str:
        return await self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    async def choose_file(self, selector: str, path: Path) -> None:
        root = await self.call("DOM.getDocument")
        node = await self.call("DOM.querySelector", nodeId=root["root"]["nodeId"], selector=selector)
        await self.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(path)])

    async def write(self, selector: str, text: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).select()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, code: int, ctrl: bool = False) -> None:
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                self._replies[message["id"]].set_result(message)
            elif message["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif message["method"] == "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"]["exception"].get("description", "exception"))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])


@asynccontextmanager
async def browser_tab(profile: Path) -> AsyncIterator[BrowserTab]:
    """A fresh browser with one empty tab; ends with every process it has started.

    Args:
        profile: Empty folder for the browser's own files.
    """
    process = _start(profile)
    try:
        port = await asyncio.to_thread(_debugging_port, profile, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = [t for t in await answer.json() if t["type"] == "page"]
            socket = await session.ws_connect(targets[0]["webSocketDebuggerUrl"], max_msg_size=0)
            tab = BrowserTab(socket)
            try:
                yield tab
            finally:
                await tab.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # The session holds this browser's own processes only.
        process.wait()


def _start(profile: Path) -> subprocess.Popen[bytes]:
    assert PROGRAM is not None
    command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _debugging_port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    announced = profile / "DevToolsActivePort"
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if announced.exists() and (lines := announced.read_text().splitlines()):
            return int(lines[0])
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with {process.returncode}")
        time.sleep(0.05)
    raise TimeoutError("the browser did not open its debugging port")
