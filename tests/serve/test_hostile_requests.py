"""Requests that mean harm, against the whole application with decoding in processes: each has one planned answer, no
other request notices, and nobody who must not be reached is reached."""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fuzz.over_http import run_over_http
from tests.serve.app_process import AppProcess, running_app
from tests.unit.preprocessor.pictures import bmp_claiming, data_uri, encoded, gif_claiming, noise, png_claiming

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
MIB = 1 << 20
MAX_BODY_BYTES = 8 * MIB
FETCH_TIMEOUT_S = 12.0
PICTURE = encoded(noise(64, 48))
NUM_SILENT_HOSTS = 12


class MediaHost(BaseHTTPRequestHandler):
    """`/picture/N` is a picture of its own; `/to?URL` redirects there."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to?"))
            body = b""
        else:
            self.send_response(200)
            body = encoded(noise(64, 48, seed=int(self.path.rpartition("/")[2])))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Canary:
    """Listens where nobody may connect, and counts who does."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.visits = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def close(self) -> None:
        self._socket.close()


class SilentHost:
    """Takes connections and never says a word: the kernel answers, nobody accepts."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Scene:
    app: AppProcess
    host: str
    """Of sound pictures, as `127.0.0.1:port`."""
    silent: tuple[str, ...]
    canary: Canary
    local: Path
    """Folder that `file:` URLs may name."""

    def post(self, body: Any, **options: Any) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return httpx.post(self.app.url + CHAT, headers=headers, timeout=60.0, **content, **options)

    def ask(self, url: str) -> httpx.Response:
        return self.post(question(self.app.model, url))

    def health(self) -> int:
        return httpx.get(self.app.url + "/health", timeout=5.0).status_code


def question(model: str, url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    local = tmp_path_factory.mktemp("media")
    good = ThreadingHTTPServer(("127.0.0.1", 0), MediaHost)
    threading.Thread(target=good.serve_forever, daemon=True).start()
    silent, canary = [SilentHost() for _ in range(NUM_SILENT_HOSTS)], Canary()
    host = f"127.0.0.1:{good.server_address[1]}"
    quiet = tuple(f"127.0.0.1:{one.port}" for one in silent)
    args = {
        "server": {
            "limits": {"max_body_bytes": MAX_BODY_BYTES},
            "admission": {"max_running_requests": 1024},
            "request_timeout_s": 60,
        },
        "preprocessor": {
            "decode_isolation": "process",
            "decode_threads": 2,
            "max_image_bytes": 2 * MIB,
            "allowed_local_media_path": str(local),
            "fetch": {
                "internal_media_hosts": [host, *quiet],
                "total_timeout_s": FETCH_TIMEOUT_S,
                "idle_timeout_s": FETCH_TIMEOUT_S,
            },
        },
    }
    try:
        with running_app(tmp_path_factory.mktemp("app"), args=args, replicas={}) as app:
            yield Scene(app, host, quiet, canary, local)
    finally:
        good.shutdown()
        good.server_close()
        canary.close()
        for one in silent:
            one.close()


# -- media ------------------------------------------------------------------------------------------------------------
MEDIA = {
    "PNG bomb": (data_uri(png_claiming(60_000, 60_000)), "image_too_large"),
    "GIF bomb": (data_uri(gif_claiming(65_535, 65_535), "image/gif"), "image_too_large"),
    "BMP bomb": (data_uri(bmp_claiming(50_000, -50_000), "image/bmp"), "image_too_large"),
    "long and thin": (data_uri(encoded(noise(2000, 4))), "image_aspect_ratio"),
    "half a picture": (data_uri(PICTURE[: len(PICTURE) // 2]), "invalid_image"),
    "page instead of a picture": (data_uri(b"<!doctype html><p>Sign in"), "unsupported_image_format"),
    "vector picture": (data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "unsupported_image_format"),
    "nothing": ("data:image/png;base64,", "empty_media"),
    "no base64": ("data:image/png;base64,!!!!", "invalid_base64"),
    "no comma": ("data:image/png;base64", "invalid_data_uri"),
    "too many bytes": ("data:image/png;base64," + "A" * 3 * MIB, "media_too_large"),
    "no URL": ("holiday.png", "invalid_url"),
    "other scheme": ("gopher://example.com/1", "url_not_allowed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MEDIA)
def test_media_that_cannot_be_used(scene: Scene, kind: str) -> None:
    url, code = MEDIA[kind]
    answer = scene.ask(url)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert error["param"].startswith("messages[0].content[0].image_url")
    assert len(answer.content) < 1000, "the answer repeats what came"


FORBIDDEN = (
    "http://127.0.0.1:{port}/secret", "http://localhost:{port}/secret", "http://[::1]:{port}/secret",
    "http://[::ffff:127.0.0.1]:{port}/secret", "http://[64:ff9b::7f00:1]:{port}/secret", "http://0.0.0.0:{port}/secret",
    "http://127.1:{port}/secret", "http://2130706433:{port}/secret", "http://0x7f000001:{port}/secret",
    "http://0177.0.0.1:{port}/secret", "http://127.0.0.1.:{port}/secret", "http://user:pw@127.0.0.1:{port}/secret",
    "http://{host}@127.0.0.1:{port}/secret", "http://127.0.0.1:{port}\\@{host}/secret", "http://①②⑦.0.0.1:{port}/secret",
    "http://{host}/to?http://127.0.0.1:{port}/secret", "http://{host}/to?http://{host}/to?http://localhost:{port}/secret",
    "http://{host}/to?//127.0.0.1:{port}/secret", "http://{host}/to?file:///etc/hostname",
    "http://169.254.169.254/latest/meta-data/secret", "http://[fe80::1%25lo]:{port}/secret",
)  # fmt: skip


@pytest.mark.parametrize("form", FORBIDDEN)
def test_addresses_that_must_not_be_reached(scene: Scene, form: str) -> None:
    before = scene.canary.visits
    answer = scene.ask(form.format(port=scene.canary.port, host=scene.host))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] in ("url_not_allowed", "invalid_url", "media_fetch_failed")
    assert "secret" not in answer.text
    assert "127.0.0.1" not in answer.text
    assert scene.canary.visits == before


def test_local_files_only_below_the_folder(scene: Scene, tmp_path: Path) -> None:
    (scene.local / "a.png").write_bytes(PICTURE)
    secret = tmp_path / "secret.png"
    secret.write_bytes(PICTURE)
    (scene.local / "link.png").symlink_to(secret)
    os.mkfifo(scene.local / "pipe.png")
    assert scene.ask(f"file://{scene.local}/a.png").status_code == 200
    texts = set()
    for path in (secret, scene.local / "link.png", scene.local / "pipe.png", f"{scene.local}/../x", "/etc/hostname"):
        answer = scene.ask(f"file://{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "url_not_allowed")
        texts.add(answer.json()["error"]["message"])
    assert len(texts) == 1, "answers tell files apart"


# -- requests ---------------------------------------------------------------------------------------------------------
BODIES = {
    "nothing": (b"", 400, "invalid_json"),
    "half a body": (b'{"model": "x", ', 400, "invalid_json"),
    "not an object": (b"[1]", 400, "invalid_json"),
    "not a number": (b'{"temperature": NaN}', 400, "invalid_json"),
    "deep": (b'{"a":' * 100 + b"1" + b"}" * 100, 400, "json_too_complex"),
    "deep without end": (b"[" * 100_000, 400, "invalid_json"),
    "many values": (b'{"a": [' + b"1," * 300_000 + b"1]}", 400, "json_too_complex"),
    "half a character": (b'{"messages": "\\ud800"}', 400, "invalid_unicode"),
    "no text encoding": (b'{"a": "\xff\xfe"}', 400, "invalid_json"),
    "large": (b'{"a": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, "payload_too_large"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies(scene: Scene, kind: str) -> None:
    body, status, code = BODIES[kind]
    answer = scene.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"]


def test_client_that_sends_far_too_much_still_reads_why(scene: Scene) -> None:
    """It sends all before it reads, as plain clients do."""
    for declared in (True, False):
        connection = http.client.HTTPConnection(scene.app.url.removeprefix("http://"), timeout=60)
        chunks = (b"x" * MIB for _ in range(40))
        headers = {"content-type": "application/json", **({"content-length": str(40 * MIB)} if declared else {})}
        connection.request("POST", CHAT, chunks, headers, encode_chunked=not declared)
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"payload_too_large" in answer.read()
        connection.close()


async def test_mutated_requests(scene: Scene) -> None:
    result = await run_over_http(scene.app.url, scene.app.model, seed=3, count=300, deadline_s=120.0)
    assert result.faults == []
    assert {"200", "400"} <= set(result.outcomes)


# -- isolation --------------------------------------------------------------------------------------------------------
def decode_processes(app: AppProcess) -> list[psutil.Process]:
    """Children of fork servers; the servers themselves are children of replicas."""
    servers = [process for process in app.processes() if _is_fork(process)]
    return [process for process in servers if process.ppid() in {server.pid for server in servers}]


def _is_fork(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.forkserver" in part for part in process.cmdline())
    except psutil.Error:
        return False


def test_killed_decode_processes_are_replaced(scene: Scene) -> None:
    """Idle ones cost nobody anything; the health stays good throughout."""
    for round_ in range(3):
        killed = decode_processes(scene.app)
        assert len(killed) == 2
        for process in killed:
            process.kill()
        answers = [scene.ask(data_uri(encoded(noise(70, 50, seed=1000 * round_ + i)))).status_code for i in range(4)]
        assert answers == [200] * 4
        assert scene.health() == 200
        alive = decode_processes(scene.app)
        assert len(alive) == 2
        assert not {process.pid for process in alive} & {process.pid for process in killed}


async def test_decode_process_killed_at_work_costs_at_most_its_request(scene: Scene) -> None:
    """One kill falls into each batch of large pictures; the job is tried once more in another process."""
    rng = random.Random(5)
    async with httpx.AsyncClient(base_url=scene.app.url, timeout=60.0, trust_env=False) as client:
        statuses: Counter[int] = Counter()
        for batch in range(3):
            urls = [data_uri(encoded(noise(1200, 900, seed=100 * batch + i), "JPEG")) for i in range(6)]
            work = [asyncio.create_task(client.post(CHAT, json=question(scene.app.model, url))) for url in urls]
            await asyncio.sleep(rng.uniform(0.05, 0.2))
            decode_processes(scene.app)[0].kill()
            assert (await client.get("/health")).status_code == 200
            statuses.update(answer.status_code for answer in await asyncio.gather(*work))
    assert statuses[200] >= 15
    assert set(statuses) <= {200, 400}


# -- hosts that hang --------------------------------------------------------------------------------------------------
async def test_hanging_media_hosts_hold_up_nobody_else(scene: Scene) -> None:
    """500 requests wait for silent hosts; 50 sound ones, fetched as well, are answered before any of those gives up."""
    limits = httpx.Limits(max_connections=600)
    async with httpx.AsyncClient(base_url=scene.app.url, timeout=120.0, trust_env=False, limits=limits) as client:

        async def ask(url: str) -> httpx.Response:
            return await client.post(CHAT, json=question(scene.app.model, url))

        hanging = [
            asyncio.create_task(ask(f"http://{scene.silent[i % NUM_SILENT_HOSTS]}/picture/{i}")) for i in range(500)
        ]
        await asyncio.sleep(3.0)
        good = await asyncio.gather(*(ask(f"http://{scene.host}/picture/{i}") for i in range(50)))
        assert [answer.status_code for answer in good] == [200] * 50
        assert not any(task.done() for task in hanging)
        assert (await client.get("/health")).status_code == 200
        refused = Counter(answer.json()["error"]["code"] for answer in await asyncio.gather(*hanging))
        assert refused == {"media_fetch_timeout": 500}
        assert (await ask(f"http://{scene.host}/picture/99")).status_code == 200


def test_nothing_of_the_inside_was_logged(scene: Scene) -> None:
    """Last, over what all replicas wrote in the tests above."""
    whole = base64.b64encode(PICTURE)
    piece = whole[len(whole) // 2 :][:40]
    ingress = list(log_folder(scene.app).glob("*Ingress*.log"))
    stages = list(log_folder(scene.app).glob("*Preprocessor*.log"))
    assert ingress
    assert stages
    assert not any(piece in log.read_bytes() for log in (*ingress, *stages))
    assert not any(b"Traceback" in log.read_bytes() for log in (*ingress, scene.app.log))


def log_folder(app: AppProcess) -> Path:
    """Of the application's own cluster: its processes are told where it is."""
    for process in app.processes():
        for part in process.cmdline():
            name, _, value = part.partition("=")
            if name.replace("-", "_") == "__session_dir":
                return Path(value) / "logs" / "serve"
    raise AssertionError("no process of the cluster names its folder")
