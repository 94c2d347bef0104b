"""`python -m app.serve CONFIG`: a lean local cluster and the application of a Serve config file, until interrupted.

`serve run CONFIG` does the same on a cluster that is already there. This launcher adds what a laptop wants: no
dashboard processes, a small object store, one line when the server is ready, an exit code when it cannot start, and a
graceful stop on Ctrl-C or SIGTERM: answers under way come to their end, unless the signal comes a second time.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

EXIT_BAD_CONFIG = 2
EXIT_START_FAILED = 3
STOP_TIMEOUT_S = 660.0
WATCH_EVERY_S = 2.0
PROXY_MIDDLEWARES = "app.proxy:middlewares"

log = logging.getLogger("sightline.serve")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m app.serve", description=__doc__.split("\n\n")[0])
    parser.add_argument("config", type=Path, help="Serve config file, such as serve_configs/dev.yaml")
    parser.add_argument("--num-cpus", type=int, default=8, help="logical CPUs to tell Ray of (default: %(default)s)")
    parser.add_argument(
        "--object-store-mb", type=int, default=512, help="shared-memory store (default: %(default)s MB)"
    )
    parser.add_argument(
        "--dashboard", action="store_true", help="start Ray's dashboard, and the agents that export Ray's own metrics"
    )
    parser.add_argument("--start-timeout-s", type=float, default=300, help="give up after (default: %(default)s s)")
    parser.add_argument(
        "--stop-timeout-s", type=float, default=STOP_TIMEOUT_S, help="when stopping, cut answers that are still under "
        "way after (default: %(default)s s)",
    )  # fmt: skip
    parser.add_argument("--port", type=int, help="listen on this port instead of the config's")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="override one of the application's args, "
        "dots for nesting: --set lm_engine.max_num_seqs=8",
    )  # fmt: skip
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = load_config(args.config, args.port, args.set)
    except ValueError as exc:
        log.error("%s", exc)
        return EXIT_BAD_CONFIG
    server = LocalServer(
        config, num_cpus=args.num_cpus, object_store_bytes=args.object_store_mb << 20, dashboard=args.dashboard
    )
    return run_until_signalled(server, args.start_timeout_s, args.stop_timeout_s)


def load_config(path: Path, port: int | None = None, overrides: list[str] | None = None) -> dict[str, Any]:
    """The config file as a dictionary, its application arguments checked.

    Raises:
        ValueError: The file or an option in it is wrong; the message names the option and what is allowed.
    """
    from app.config import AppConfig

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        applications = config["applications"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as exc:
        raise ValueError(f"{path}: not a readable Serve config file with `applications:` ({exc})") from exc
    if port is not None:
        config.setdefault("http_options", {})["port"] = port
    for application in applications:
        values = application.setdefault("args", {})
        for override in overrides or []:
            name, equals, value = override.partition("=")
            if not equals:
                raise ValueError(f"--set {override}: expected NAME=VALUE")
            *parents, leaf = name.split(".")
            target = values
            for parent in parents:
                target = target.setdefault(parent, {})
            target[leaf] = yaml.safe_load(value)
        AppConfig.parse(values)
    return config


class StartError(RuntimeError):
    """The application did not become ready; the message says why."""


class LocalServer:
    """A local Ray cluster running one Serve config, from `start()` to `stop()`. One per process."""

    def __init__(
        self, config: dict[str, Any], *, num_cpus: int, object_store_bytes: int, dashboard: bool = False
    ) -> None:
        self._config = config
        self._dashboard = dashboard
        self._num_cpus = num_cpus
        self._object_store_bytes = object_store_bytes
        http = config.get("http_options", {})
        self.url = f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}"

    def start(self, timeout_s: float, cancelled: threading.Event | None = None) -> None:
        """Return once every deployment runs, or early if `cancelled` is set.

        Raises:
            StartError: A deployment failed, or `timeout_s` passed.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", PROXY_MIDDLEWARES)
        import ray

        ray.init(
            num_cpus=self._num_cpus,
            include_dashboard=self._dashboard,
            object_store_memory=self._object_store_bytes,
            log_to_driver=False,
            namespace="serve",
            logging_level=logging.WARNING,
        )
        try:
            self._deploy()
            self._wait_until_ready(timeout_s, cancelled or threading.Event())
        except BaseException:
            self.stop()
            raise

    def stop(self, drain_timeout_s: float = 0.0, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop Serve and Ray once nothing is under way, `drain_timeout_s` has passed, or `is_hurried` says so."""
        import ray

        from app.shutdown import ServeShutdown

        if not self.is_gone():
            left = ServeShutdown(is_hurried).run(drain_timeout_s)
            if not left.is_over:
                log.warning("cut: %s", left)
        ray.shutdown()

    def is_gone(self) -> bool:
        """Whether Serve was shut down by someone else."""
        from ray import serve
        from ray.exceptions import ActorDiedError

        try:
            status = serve.status()
        except ActorDiedError:  # of the controller, for good
            return True
        except Exception:  # it is busy, or on its way back
            return False
        return not (status.proxies or status.applications)

    def _deploy(self) -> None:
        from ray.serve._private.api import serve_start
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(self._config)
        # What `serve run` itself calls: no public function takes a whole config file.
        client = serve_start(http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location)
        client.deploy_apps(schema, _blocking=False)

    def _wait_until_ready(self, timeout_s: float, cancelled: threading.Event) -> None:
        from ray import serve

        started, shown = time.monotonic(), ""
        while not cancelled.wait(0.25):
            applications = serve.status().applications
            seconds = time.monotonic() - started
            line = "  ".join(
                f"{name} {deployment.status.value.lower()}"
                for application in applications.values()
                for name, deployment in application.deployments.items()
            )
            if line and line != shown:
                log.info("[%5.1f s] %s", seconds, line)
                shown = line
            states = {application.status.value for application in applications.values()}
            if "DEPLOY_FAILED" in states:
                raise StartError("; ".join(application.message for application in applications.values()))
            if states == {"RUNNING"}:
                log.info("[%5.1f s] ready on %s", seconds, self.url)
                return
            if seconds > timeout_s:
                raise StartError(f"not ready after {timeout_s:.0f} s: {line or 'no deployment started'}")


def run_until_signalled(server: LocalServer, start_timeout_s: float, stop_timeout_s: float) -> int:
    """Start, serve until SIGINT or SIGTERM, or until `python -m app.stop`, stop gracefully; the exit code."""
    stop, hurry = threading.Event(), threading.Event()
    _on_signal(stop, hurry)
    try:
        server.start(start_timeout_s, cancelled=stop)
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_START_FAILED
    _on_signal(stop, hurry)  # once more: connecting to Ray has replaced the handlers by ones that end the process
    while not stop.wait(WATCH_EVERY_S):
        if server.is_gone():
            log.info("Serve was shut down from elsewhere")
            break
    else:
        log.info("stopping: answers under way come to their end first; once more cuts them")
    server.stop(stop_timeout_s, hurry.is_set)
    return 0


def _on_signal(stop: threading.Event, hurry: threading.Event) -> None:
    def handle(*_: object) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


if __name__ == "__main__":
    sys.exit(main())
