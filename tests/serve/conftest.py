"""The real application: a local Ray cluster, every deployment, real HTTP on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.serve import LocalServer, load_config

ROOT = Path(__file__).parent.parent.parent
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


@contextmanager
def served(config: dict[str, Any]) -> Iterator[RunningServer]:
    """A Serve config in this process, so that a test can look into the cluster. One at a time."""
    local = LocalServer(config, num_cpus=8, object_store_bytes=256 << 20)
    local.start(START_TIMEOUT_S)
    try:
        yield RunningServer(local.url, config["applications"][0]["args"]["served_model_name"])
    finally:
        local.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """serve_configs/dev.yaml. Ends with its module, since other modules start clusters of their own."""
    with served(load_config(ROOT / "serve_configs" / "dev.yaml", free_port())) as running:
        yield running
