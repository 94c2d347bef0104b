"""The whole application on a cluster of several nodes, deployed as an operator would: `serve run CONFIG`.

This process is connected to the cluster, so that it can look at Serve's state.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray import serve
from ray.serve.schema import DeploymentStatusOverview

from tests.serve.conftest import ROOT, free_port
from tests.serve.nodes import ENVIRONMENT, RayNodes, running_nodes

SERVE = Path(sys.executable).with_name("serve")
DEPLOY_TIMEOUT_S = 240.0
DEPLOYMENTS = ("Ingress", "Preprocessor", "VisionEncoder", "LMEngine")


def dev_config(**replicas: int) -> dict[str, Any]:
    """serve_configs/dev.yaml on a free port, with this many replicas."""
    config = yaml.safe_load((ROOT / "serve_configs" / "dev.yaml").read_text())
    config["http_options"]["port"] = free_port()
    for deployment in deployments_of(config).values():
        deployment["num_replicas"] = replicas.get(deployment["name"], deployment["num_replicas"])
    return config


def deployments_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    (application,) = config["applications"]
    return {deployment["name"]: deployment for deployment in application["deployments"]}


class ClusterApp:
    """Args:
    config: A Serve config with one application, its port free on the head.
    """

    def __init__(self, nodes: RayNodes, folder: Path, config: Mapping[str, Any]) -> None:
        self.nodes, self._folder, self.config = nodes, folder, copy.deepcopy(dict(config))
        (application,) = self.config["applications"]
        self.application: str = application["name"]
        self.model: str = application["args"]["served_model_name"]
        self.url = f"http://127.0.0.1:{self.config['http_options']['port']}"

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Hand a config to Serve, which carries it out by and by."""
        path = self._folder / "serve.yaml"
        path.write_text(yaml.safe_dump(dict(config)))
        command = [str(SERVE), "run", "--non-blocking", "--address", self.nodes.address, str(path)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment = {**inherited, **ENVIRONMENT}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`serve run` failed:\n{done.stderr[-4000:]}")
        self.config = dict(config)

    def running(self) -> dict[str, int]:
        """Running replicas by deployment."""
        deployments = serve.status().applications[self.application].deployments
        return {name: _counts(deployment).get("RUNNING", 0) for name, deployment in deployments.items()}

    def is_whole(self) -> bool:
        """Whether all replicas that the config asks for run, and no others. Serve may not have noticed yet that one has
        died, so the processes must be there as well."""
        if len(self.replicas()) != sum(d["num_replicas"] for d in deployments_of(self.config).values()):
            return False
        application = serve.status().applications.get(self.application)
        if application is not None and application.status == "DEPLOY_FAILED":
            raise RuntimeError(application.message)
        wanted = {name: {"RUNNING": d["num_replicas"]} for name, d in deployments_of(self.config).items()}
        return application is not None and application.status == "RUNNING" and wanted == {
            name: _counts(deployment) for name, deployment in application.deployments.items()
        }  # fmt: skip

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = DEPLOY_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not after {timeout_s:.0f} s: {serve.status()}")
            time.sleep(0.1)

    def replicas(self) -> dict[int, str]:
        """Deployments by the process ids of their replicas."""
        title, found = f"ServeReplica:{self.application}:", {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                _, is_replica, rest = " ".join(process.cmdline()).partition(title)
                if is_replica:
                    found[process.pid] = rest.split(".")[0].strip()
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on the nodes."""
        return [process for node in (self.nodes.head, *self.nodes.workers) for process in node.processes()]


def _counts(deployment: DeploymentStatusOverview) -> dict[str, int]:
    """Replicas by state."""
    return {str(state): number for state, number in deployment.replica_states.items() if number}


@contextmanager
def running_cluster_app(folder: Path, config: Mapping[str, Any], *, workers: int) -> Iterator[ClusterApp]:
    with running_nodes(folder, workers=workers) as nodes:
        app = ClusterApp(nodes, folder, config)
        app.deploy(config)
        ray.init(address=nodes.address, namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
        try:
            app.wait_until(app.is_whole)
            yield app
        finally:
            ray.shutdown()
