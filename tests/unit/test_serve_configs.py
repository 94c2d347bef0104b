"""Every file of serve_configs means what it says: Serve's schema, our options, and the code's deployments."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from app.builder import MAX_ONGOING_REQUESTS, build
from app.config import AppConfig
from deployments import autoscaling
from deployments.autoscaling import EnginePolicy, WorkPolicy
from deployments.lm_engine.deployment import LMEngine
from deployments.preprocessor.deployment import Preprocessor
from deployments.vision_encoder.deployment import VisionEncoder

FOLDER = Path(__file__).parents[2] / "serve_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
STAGES: dict[str, type] = {"Preprocessor": Preprocessor, "VisionEncoder": VisionEncoder, "LMEngine": LMEngine}
POLICIES = {"Preprocessor": WorkPolicy, "VisionEncoder": WorkPolicy, "LMEngine": EnginePolicy}


def text_of(path: Path) -> str:
    """The Serve config in a file: the file itself, or what a RayService carries."""
    text = path.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    return str(document["spec"]["serveConfigV2"]) if document.get("kind") == "RayService" else text


def config_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(text_of(path))


def deployments_of(path: Path) -> dict[str, dict[str, Any]]:
    (application,) = config_of(path)["applications"]
    return {deployment["name"]: deployment for deployment in application["deployments"]}


PROD = deployments_of(FOLDER / "prod.yaml")
PROD_ARGS: dict[str, Any] = config_of(FOLDER / "prod.yaml")["applications"][0]["args"]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def test_the_files_are_those_that_the_readme_names() -> None:
    assert {path.name for path in FILES} == {"dev.yaml", "kuberay.yaml", "prod.yaml", "single_gpu.yaml"}


@every_file
def test_serve_takes_the_file_and_no_option_is_misspelt(path: Path) -> None:
    config = config_of(path)
    ServeDeploySchema.model_validate(config)
    # Serve ignores what it does not know, so a typing error would go unseen.
    assert set(config) <= set(ServeDeploySchema.model_fields)
    for application in config["applications"]:
        assert set(application) <= set(ServeApplicationSchema.model_fields)
        for deployment in application["deployments"]:
            assert set(deployment) <= set(DeploymentSchema.model_fields), deployment["name"]
            scaling = deployment.get("autoscaling_config", {})
            assert set(scaling) <= set(AutoscalingConfig.model_fields)
            AutoscalingConfig(**scaling)  # imports the policy, too


@every_file
def test_the_application_takes_its_arguments(path: Path) -> None:
    for application in config_of(path)["applications"]:
        assert application["import_path"] == f"app:{build.__name__}"
        AppConfig.parse(application["args"])


@every_file
def test_every_deployment_of_the_code_is_configured_and_no_other(path: Path) -> None:
    (application,) = config_of(path)["applications"]
    colocated = AppConfig.parse(application["args"]).encoder_placement == "colocated"
    expected = {"Ingress", *STAGES} - ({"VisionEncoder"} if colocated else set())
    assert set(deployments_of(path)) == expected


@every_file
def test_each_deployment_says_how_many_replicas_and_what_one_takes(path: Path) -> None:
    for name, deployment in deployments_of(path).items():
        assert ("num_replicas" in deployment) != ("autoscaling_config" in deployment), name
        assert "num_cpus" in deployment["ray_actor_options"], f"{name} would ask for a whole CPU"


@every_file
def test_policies_exist_and_take_their_options(path: Path) -> None:
    for name, deployment in deployments_of(path).items():
        policy = deployment.get("autoscaling_config", {}).get("policy")
        if policy is None:
            continue
        module, _, attribute = policy["policy_function"].partition(":")
        assert module == autoscaling.__name__
        assert getattr(autoscaling, attribute) is POLICIES[name]
        POLICIES[name](**policy["policy_kwargs"])


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.__name__)
def test_every_stage_reports_its_work_and_its_health(stage: type) -> None:
    for method in ("record_autoscaling_stats", "check_health"):
        assert inspect.iscoroutinefunction(getattr(stage, method, None)), f"{stage.__name__}.{method}"


# -- production --------------------------------------------------------------------------------------------------------
def test_kubernetes_runs_the_production_file_word_for_word() -> None:
    prod = (FOLDER / "prod.yaml").read_text(encoding="utf-8")
    assert text_of(FOLDER / "kuberay.yaml").rstrip() == prod[prod.index("proxy_location:") :].rstrip()


def test_production_scales_every_deployment_and_the_stages_by_work() -> None:
    for name, deployment in PROD.items():
        scaling = deployment["autoscaling_config"]
        assert scaling["min_replicas"] >= 1
        assert scaling["max_replicas"] > scaling["min_replicas"]
        assert scaling["downscale_delay_s"] > scaling["upscale_delay_s"], "losing a replica is dearer than keeping it"
        assert ("policy" in scaling) == (name in STAGES)


def test_production_writes_down_every_limit() -> None:
    for name, deployment in PROD.items():
        for option in (
            "max_ongoing_requests", "max_queued_requests", "graceful_shutdown_timeout_s", "health_check_period_s",
            "health_check_timeout_s", "max_surge_percent",
        ):  # fmt: skip
            assert option in deployment, f"{name}.{option}"
        assert deployment["max_ongoing_requests"] <= MAX_ONGOING_REQUESTS


def test_our_own_queues_refuse_before_serve_does() -> None:
    """What Serve refuses gets no OpenAI error."""
    config = AppConfig.parse(PROD_ARGS)
    admission, engine = config.server.admission, config.lm_engine
    assert PROD["Ingress"]["max_ongoing_requests"] > admission.max_running_requests + admission.max_queued_requests
    assert PROD["LMEngine"]["max_ongoing_requests"] > engine.max_num_seqs + engine.max_queued_requests
    assert PROD["Ingress"]["max_queued_requests"] == PROD["LMEngine"]["max_queued_requests"] == -1


def test_streams_may_end_before_a_replica_and_its_pod_do() -> None:
    longest_s = AppConfig.parse(PROD_ARGS).server.request_timeout_s
    assert config_of(FOLDER / "prod.yaml")["http_options"]["request_timeout_s"] > longest_s
    draining = [PROD[name]["graceful_shutdown_timeout_s"] for name in ("Ingress", "LMEngine")]
    assert min(draining) > longest_s
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] > max(draining)
    for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > max(draining)


def test_secrets_come_from_the_environment_on_every_pod() -> None:
    redis_variable = AppConfig.parse(PROD_ARGS).cache.redis_url_env
    assert "redis" not in PROD_ARGS.get("cache", {})
    cluster = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        by_name = {variable["name"]: variable for variable in container["env"]}
        for name in (redis_variable, "SIGHTLINE_API_KEYS"):
            assert "secretKeyRef" in by_name[name]["valueFrom"], name
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_every_pod_hides_the_loss_of_an_ingress_replica_and_sees_that_of_a_node_soon() -> None:
    cluster = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        values = {variable["name"]: variable.get("value") for variable in container["env"]}
        module, _, attribute = values["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
        assert validate_http_proxy_callback_return(getattr(importlib.import_module(module), attribute)())
        checks = [int(values[f"RAY_health_check_{name}_ms"]) for name in ("period", "timeout")]
        assert 5 * sum(checks) <= 20_000  # Ray's threshold is five failures


def test_the_largest_deployment_fits_the_cluster_at_its_largest() -> None:
    groups = {
        group["groupName"]: group
        for group in yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterConfig"][
            "workerGroupSpecs"
        ]
    }

    def capacity(group: dict[str, Any], resource: str) -> float:
        (container,) = group["template"]["spec"]["containers"]
        return group["maxReplicas"] * float(container["resources"]["limits"].get(resource, 0))

    def needed(resource: str, names: tuple[str, ...]) -> float:
        return sum(
            PROD[name]["autoscaling_config"]["max_replicas"] * PROD[name]["ray_actor_options"].get(resource, 0)
            for name in names
        )

    assert capacity(groups["gpu"], "nvidia.com/gpu") >= needed("num_gpus", ("VisionEncoder", "LMEngine"))
    assert capacity(groups["cpu"], "cpu") >= needed("num_cpus", ("Ingress", "Preprocessor"))


def test_the_ray_version_is_one_that_the_project_takes() -> None:
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]
    pinned = re.search(r"^ray(?:\[serve\])?==(\S+)", (FOLDER.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayClusterConfig"]["rayVersion"] == pinned[1]
