"""The whole application as a process of its own, `python -m app.serve`, talked to over HTTP alone.

For tests that need another configuration than that of the shared `server` fixture, or that kill replicas.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import ROOT, free_port

Samples = Counter[tuple[str, frozenset[tuple[str, str]]]]
"""Values by (name without prefix, labels)."""

_STOP_TIMEOUT_S = 60.0


class AppProcess:
    """Args:
    folder: For the config file and the log.
    args: Merged into `args:` of serve_configs/dev.yaml.
    replicas: Number of replicas by deployment.
    options: Further options of Serve by deployment.
    dashboard: Whether Ray's dashboard and metric agents run as well.
    """

    def __init__(
        self,
        folder: Path,
        *,
        args: Mapping[str, Any],
        replicas: Mapping[str, int],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        dashboard: bool = False,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        config = yaml.safe_load((ROOT / "serve_configs" / "dev.yaml").read_text())
        (application,) = config["applications"]
        application["args"] = _merged(application["args"], args)
        for deployment in application["deployments"]:
            deployment["num_replicas"] = replicas.get(deployment["name"], deployment["num_replicas"])
            deployment.update((options or {}).get(deployment["name"], {}))
        self.application: str = application["name"]
        self.model: str = application["args"]["served_model_name"]
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "app.serve", str(path), "--port", str(port), "--object-store-mb", "256"]
        command += ["--dashboard"] if dashboard else []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self, timeout_s: float = 240.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            if "ready on" in self.log.read_text(errors="replace"):  # every replica runs, not only one of each kind
                return
            time.sleep(0.2)
        raise RuntimeError(f"the application did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    @property
    def address(self) -> str:
        """Of its Ray cluster."""
        arguments = (argument for process in self.processes() for argument in process.cmdline())
        option = "--gcs-address="
        return next(argument.removeprefix(option) for argument in arguments if argument.startswith(option))

    def signal(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The exit status of the launcher."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """As an operator would: SIGTERM, and SIGKILL for what is left of its own processes."""
        own = self.processes()
        if self._process.poll() is None:
            self.signal()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        for process in own:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(own, timeout=10)

    def processes(self) -> list[psutil.Process]:
        """Everything that the launcher has started."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def samples(self) -> Samples:
        """Counters and gauges of all live replicas, summed by name and labels (the replica among them)."""
        page = httpx.get(f"{self.url}/metrics", timeout=30.0).raise_for_status().text
        found: Samples = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = sample.name.removeprefix("sightline_"), frozenset(sample.labels.items())
                found[key] += sample.value  # type: ignore[assignment]
        return found


@contextmanager
def running_app(folder: Path, **options: Any) -> Iterator[AppProcess]:
    app = AppProcess(folder, **options)
    try:
        app.wait_until_ready()
        yield app
    finally:
        app.stop()


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over all series of a family that have these labels."""
    wanted = frozenset(labels.items())
    return sum(value for (found, having), value in samples.items() if found == name and wanted <= having)


def replicas_with(samples: Samples, name: str, **labels: str) -> set[str]:
    """Replicas that have counted anything in such a series."""
    wanted = frozenset(labels.items())
    return {
        dict(having)["replica"]
        for (found, having), value in samples.items()
        if found == name and value and wanted <= having
    }


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for name, value in changes.items():
        known = merged.get(name)
        merged[name] = _merged(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return merged
