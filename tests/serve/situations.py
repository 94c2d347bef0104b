"""An application that is short of everything, and what brings each of its limits about. For tests and for pictures.

One replica of each deployment, a real Valkey server, tight budgets: four pictures do not fit the embedding slots, two
long answers do not fit the KV blocks, and most pictures are above the encoder's only static budget.
"""

from __future__ import annotations

import base64
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.redis.rig import Server, running_server
from tests.serve.app_process import AppProcess, running_app

CHAT = "/v1/chat/completions"
PICTURE_SLOTS = 36
"""Of a picture of 168 x 168 pixels."""
ARGS: dict[str, Any] = {
    "max_model_len": 512,
    "limit_mm_per_prompt": {"image": 32},
    "mm_processor_kwargs": {"max_pixels": 168 * 168},
    "preprocessor": {"fetch": {"internal_media_hosts": ["127.0.0.1"]}, "max_image_pixels": 1_000_000},
    "vision_encoder": {
        # Nothing stays in the replica's own cache, so that repeats ask the shared one.
        "cache_bytes": 1,
        "static_buffers_on_cpu": True,
        "encoder_cudagraph_token_budgets": [16],
        "num_threads": 1,
    },
    "lm_engine": {"num_gpu_blocks_override": 40, "encoder_cache_slots": 100, "max_num_seqs": 16},
    "server": {"enable_operator_routes": True},
}


SCALED_TO_ONE = {"num_replicas": None, "autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
"""Ray exports a target for deployments that scale by themselves only."""


class Collector:
    """A little HTTP server: takes OTLP exports, and serves one picture, at /moved.png by a redirect."""

    def __init__(self) -> None:
        self.exports: list[bytes] = []
        picture = png()
        exports = self.exports

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                exports.append(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(b"")

            def do_GET(self) -> None:
                if self.path == "/moved.png":
                    self.send_response(302)
                    self.send_header("Location", "/picture.png")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self._send(picture)

            def _send(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_seeds = itertools.count(1)


def png(side: int = 168) -> bytes:
    """A picture that nobody has seen."""
    file = io.BytesIO()
    pixels = np.random.default_rng(next(_seeds)).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(side: int = 168) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(png(side))}}


def text(words: str = "What is this?") -> dict[str, Any]:
    return {"type": "text", "text": words}


@dataclass
class Situations:
    """Each method brings one situation about and returns once it is over."""

    app: AppProcess
    valkey: Server
    collector: Collector
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.app.url, timeout=120, trust_env=False)

    def body(self, *parts: dict[str, Any], **options: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": list(parts)}]
        return {"model": self.app.model, "messages": messages, "max_tokens": 4, "ignore_eos": True, **options}

    def ask(self, *parts: dict[str, Any], headers: Mapping[str, str] | None = None, **options: Any) -> httpx.Response:
        return self.client.post(CHAT, json=self.body(*parts, **options), headers=dict(headers or {}))

    def repeat(self) -> None:
        """A new picture, then the same again."""
        known = picture()
        for _ in range(2):
            assert self.ask(known, text()).status_code == 200

    def same_picture_at_once(self) -> None:
        known = picture()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self.ask, known, text(f"Number {i}.")) for i in range(4)]
            assert {reply.result().status_code for reply in asked} == {200}

    def named_picture(self) -> None:
        """A picture with a uuid, then the uuid with another one's bytes."""
        for _ in range(2):
            assert self.ask({**picture(), "uuid": "the-boat"}, text()).status_code == 200

    def more_pictures_than_slots(self) -> None:
        assert self.ask(*(picture() for _ in range(6)), text()).status_code == 200

    def more_pictures_than_context(self) -> httpx.Response:
        return self.ask(*(picture() for _ in range(16)), text())

    def more_pixels_than_allowed(self) -> httpx.Response:
        return self.ask(picture(1200), text())

    def long_answers_at_once(self) -> None:
        """Each fits the KV blocks alone, together they do not."""
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self.ask, text(f"Number {i}."), max_tokens=400) for i in range(4)]
            assert {reply.result().status_code for reply in asked} == {200}

    def small_picture(self) -> None:
        """Fits the encoder's static buffers."""
        assert self.ask(picture(56), text()).status_code == 200

    def broken_picture(self) -> httpx.Response:
        return self.ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, text())

    def fetched_picture(self) -> None:
        part = {"type": "image_url", "image_url": {"url": f"{self.collector.url}/moved.png"}}
        assert self.ask(part, text()).status_code == 200

    def refused_url(self) -> httpx.Response:
        return self.ask({"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}, text())

    def completion(self) -> None:
        body = {"model": self.app.model, "prompt": "Once", "max_tokens": 4}
        assert self.client.post("/v1/completions", json=body).status_code == 200

    def cancelled(self) -> None:
        """A client that leaves in the middle of its answer."""
        body = self.body(text("Go on."), stream=True, max_tokens=400)
        with self.client.stream("POST", CHAT, json=body) as answer:
            next(line for line in answer.iter_lines() if '"content":"' in line)

    def corrupt_entry(self) -> None:
        """Every embedding in the shared tier is damaged, then one of them asked for."""
        known = picture()
        assert self.ask(text("A."), known).status_code == 200
        self._wait_for_embedding()
        with self.valkey.admin() as admin:
            for key in self._embedding_keys():
                data = bytearray(admin.get(key) or b"")
                data[-1] ^= 255
                admin.set(key, bytes(data), keepttl=True)
        self._forget_embeddings()
        assert self.ask(text("B."), known).status_code == 200

    def shared_hit(self) -> None:
        known = picture()
        assert self.ask(text("C."), known).status_code == 200
        self._wait_for_embedding()
        self._forget_embeddings()
        assert self.ask(text("D."), known).status_code == 200

    def redis_killed(self) -> None:
        self.valkey.kill()
        for _ in range(6):
            assert self.ask(picture(), text()).status_code == 200

    def redis_back(self) -> None:
        self.valkey.start()

    def _forget_embeddings(self) -> None:
        """Other pictures take the engine's slots."""
        for _ in range(2):
            assert self.ask(picture(), picture(), text()).status_code == 200

    def _embedding_keys(self) -> list[bytes]:
        with self.valkey.admin() as admin:
            return list(admin.scan_iter("sightline:*:embedding:{*}", count=1000))

    def _wait_for_embedding(self) -> None:
        until(lambda: bool(self._embedding_keys()))
        time.sleep(0.3)  # writes are behind the response


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.1)


@contextmanager
def _started(folder: Path, args: Mapping[str, Any], *, dashboard: bool, tries: int = 3) -> Iterator[AppProcess]:
    """Once more where Ray gave up: it allows a node 30 s to start, which a busy machine may need for itself."""
    options = {"Preprocessor": SCALED_TO_ONE} if dashboard else {}
    with ExitStack() as stack:
        for attempt in range(tries):
            try:
                app = stack.enter_context(
                    running_app(folder, args=args, replicas={}, options=options, dashboard=dashboard)
                )
                break
            except RuntimeError as error:
                if attempt == tries - 1 or "timed out during startup" not in str(error):
                    raise
        yield app


@contextmanager
def running_situations(
    folder: Path, telemetry: Mapping[str, Any] | None = None, *, dashboard: bool = False
) -> Iterator[Situations]:
    """Args:
    telemetry: Options of that section; `otlp_traces_endpoint` is set here if it is there and empty.
    dashboard: Whether Ray's dashboard and metric agents run as well.
    """
    options = dict(telemetry or {})
    collector = Collector()
    try:
        if "otlp_traces_endpoint" in options:
            options["otlp_traces_endpoint"] = f"{collector.url}/v1/traces"
        with running_server() as valkey:
            redis = {"url": valkey.url, "read_timeout_s": 1.0, "connect_timeout_s": 0.5, "breaker_open_s": 5.0}
            args = {**ARGS, "cache": {"redis": redis}, "telemetry": options}
            with _started(folder, args, dashboard=dashboard) as app:
                made = Situations(app, valkey, collector)
                with made.client:
                    assert made.ask(picture(), text()).status_code == 200
                    yield made
    finally:
        collector.close()
