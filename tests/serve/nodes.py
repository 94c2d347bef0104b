"""A Ray cluster of several nodes on one machine: each node is a process tree of its own and can be killed whole."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from app.serve import PROXY_MIDDLEWARES
from tests.serve.conftest import ROOT, free_port

RAY = Path(sys.executable).with_name("ray")
START_TIMEOUT_S = 180.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_MIDDLEWARES,
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}
"""Of every node. What is there of Serve's proxies and of health checks, kuberay.yaml has as well."""


class Node:
    """`ray start --block` and everything below it: raylet, agents, replicas."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name, self._log = name, log
        self._command = [str(RAY), "start", "--block", "--disable-usage-stats", "--include-log-monitor=false"]
        self._command += arguments
        self._process = self._start()

    def wait_until_up(self) -> None:
        """Return once the node has joined. Ray gives up after 30 s, which a busy machine may need; then again."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in (text := self._log.read_text(errors="replace")):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the node {self.name} did not start:\n{text}")
            if self._process.poll() is not None:
                self._process = self._start()
            time.sleep(0.1)

    def _start(self) -> subprocess.Popen[bytes]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._command, cwd=ROOT, env={**inherited, **ENVIRONMENT}, stdout=log, stderr=subprocess.STDOUT
            )

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to all of it, as nearly at once as can be: what the loss of a machine looks like."""
        own = self.processes()
        self._process.kill()
        for process in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        return own


class RayNodes:
    """A head and workers that come and go.

    Args:
        folder: For the nodes' logs.
        num_cpus: Logical CPUs of a worker.
        head_cpus: 0 keeps the replicas on the workers.
        object_store_bytes: Of each node.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_cpus: int = 2,
        head_cpus: int = 0,
        object_store_bytes: int = 128 << 20,
    ) -> None:
        self._folder, self._num_cpus, self._object_store_bytes = folder, num_cpus, object_store_bytes
        # Not the test's own folder: the path of a Unix socket has at most 107 bytes.
        self._temp = tempfile.TemporaryDirectory(prefix="nodes", ignore_cleanup_errors=True)
        self._numbers = itertools.count(1)
        self.address = f"127.0.0.1:{free_port()}"
        head = [
            "--head", f"--port={self.address.rpartition(':')[2]}", f"--ray-client-server-port={free_port()}",
            f"--temp-dir={self._temp.name}", "--include-dashboard=false", f"--dashboard-port={free_port()}",
        ]  # fmt: skip
        self.head = self._node("head", head, head_cpus)
        self.workers: list[Node] = []

    def add_worker(self) -> Node:
        """A node that is still on its way up."""
        name = f"worker{next(self._numbers)}"
        node = self._node(name, [f"--address={self.address}", f'--resources={{"{name}": 1}}'], self._num_cpus)
        self.workers.append(node)
        return node

    def kill(self, node: Node) -> None:
        self.workers.remove(node)
        node.kill()

    def close(self) -> None:
        psutil.wait_procs([process for node in (*self.workers, self.head) for process in node.kill()], timeout=10)
        self._temp.cleanup()

    def _node(self, name: str, arguments: list[str], num_cpus: int) -> Node:
        common = [
            f"--num-cpus={num_cpus}", f"--object-store-memory={self._object_store_bytes}",
            "--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}",
        ]  # fmt: skip
        return Node(name, [*arguments, *common], self._folder / f"{name}.log")


@contextmanager
def running_nodes(folder: Path, *, workers: int) -> Iterator[RayNodes]:
    nodes = RayNodes(folder, head_cpus=0 if workers else 4)
    try:
        nodes.head.wait_until_up()
        for _ in range(workers):  # one by one: nodes that choose their ports at the same moment choose the same
            nodes.add_worker().wait_until_up()
        yield nodes
    finally:
        nodes.close()
