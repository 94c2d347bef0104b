"""prod.yaml starts, with the shipped model and without GPUs: every option but sizes is the file's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from ray import serve

from tests.serve.conftest import ROOT, RunningServer, free_port, served
from tests.serve.examples import load_examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The production file at the size of a laptop."""
    dev = yaml.safe_load((ROOT / "serve_configs" / "dev.yaml").read_text())["applications"][0]["args"]
    (application,) = config["applications"]
    args = application["args"]
    args.update({name: dev[name] for name in ("model", "served_model_name", "dtype")})
    del args["max_model_len"]
    args["preprocessor"]["decode_threads"] = 1
    args["lm_engine"].update(kv_cache_bytes=dev["lm_engine"]["kv_cache_bytes"], max_num_batched_tokens=2048)
    for deployment in application["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0.1}
    config["proxy_location"] = "HeadOnly"
    config["http_options"].update(host="127.0.0.1", port=free_port())
    return config


@pytest.fixture(scope="module")
def production() -> Iterator[RunningServer]:
    config = small(yaml.safe_load((ROOT / "serve_configs" / "prod.yaml").read_text()))
    with served(config) as running:
        yield running


def test_it_answers_right_and_every_deployment_runs_at_its_least(production: RunningServer) -> None:
    for example in load_examples():
        body = {"model": production.model, "messages": example.messages, "temperature": 0, "max_tokens": 96}
        answer = httpx.post(f"{production.api}/chat/completions", json=body, timeout=120.0).raise_for_status().json()
        assert example.is_answered_by(answer["choices"][0]["message"]["content"]), example.name
    (application,) = serve.status().applications.values()
    running = {name: d.replica_states.get("RUNNING", 0) for name, d in application.deployments.items()}
    assert running == {"Ingress": 2, "Preprocessor": 2, "VisionEncoder": 1, "LMEngine": 1}
