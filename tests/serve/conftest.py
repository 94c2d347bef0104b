"""One real application for all tests of this folder: a local Ray cluster, every deployment, real HTTP on loopback."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.serve import LocalServer, load_config

ROOT = Path(__file__).parent.parent.parent
MODEL_FOLDER = ROOT / "serve_configs" / "demo_model"
START_TIMEOUT_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/serve" in item.path.as_posix():
            item.add_marker(pytest.mark.serve)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: str

    @property
    def api(self) -> str:
        return self.url + "/v1"


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    config = load_config(ROOT / "serve_configs" / "dev.yaml", free_port())
    local = LocalServer(config, num_cpus=8, object_store_bytes=256 << 20)
    local.start(START_TIMEOUT_S)
    try:
        yield RunningServer(local.url, config["applications"][0]["args"]["served_model_name"])
    finally:
        local.stop()


@dataclass(frozen=True)
class Turn:
    """One question of the shipped examples, with everything said before it."""

    messages: list[dict[str, object]]
    answer: str


def data_uri(path: Path) -> str:
    kind = "jpeg" if path.suffix in (".jpg", ".jpeg") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
