"""The part of a Serve config file that a split stands for."""

from __future__ import annotations

import math
from typing import Any

import yaml

from app.planning.estimate import PREPROCESSOR_CPUS, TARGET_CPU_USE
from app.planning.splits import EngineOptions, Memory, Split

ENGINE_POLICY = "deployments.autoscaling:EnginePolicy"
WORK_POLICY = "deployments.autoscaling:WorkPolicy"


def preprocessors_for(cpu_s: float, rate_per_s: float) -> int:
    """Replicas whose cores are as busy as they should be.

    Args:
        cpu_s: Of the mean request.
    """
    return max(1, math.ceil(cpu_s * rate_per_s / TARGET_CPU_USE / PREPROCESSOR_CPUS))


def serve_fragment(
    model: str,
    least: Split,
    most: Split,
    options: EngineOptions,
    memory: Memory,
    *,
    preprocessors: tuple[int, int],
    patches_per_s: float,
    prompt_tokens_per_s: float,
) -> str:
    """YAML to merge into a Serve config file.

    Args:
        least: The recommended split.
        most: With all GPUs, of the same placement: where autoscaling may go.
        preprocessors: Replicas for the trace's rate, and for as much as `most` carries.
        patches_per_s: Of one vision encoder, at which autoscaling starts before it has measured its own.
        prompt_tokens_per_s: Of one LM engine, likewise.
    """
    engine_options = {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": memory.utilization,
    }
    if options.max_prefill_tokens_while_decoding:
        engine_options["max_prefill_tokens_while_decoding"] = options.max_prefill_tokens_while_decoding
    deployments = [
        {
            "name": "Preprocessor",
            **_replicas(*preprocessors, WORK_POLICY, {"target_cpu": TARGET_CPU_USE}),
            "ray_actor_options": {"num_cpus": PREPROCESSOR_CPUS},
        },
        {
            "name": "LMEngine",
            **_replicas(
                least.engines, most.engines, ENGINE_POLICY, {"assumed_tokens_per_s": round(prompt_tokens_per_s)}
            ),
            "ray_actor_options": {"num_cpus": 2, "num_gpus": 1},
        },
    ]
    if not least.colocated:
        deployments.insert(
            1,
            {
                "name": "VisionEncoder",
                **_replicas(least.encoders, most.encoders, WORK_POLICY, {"assumed_work_per_s": round(patches_per_s)}),
                "ray_actor_options": {"num_cpus": 1, "num_gpus": 1},
            },
        )
    args: dict[str, Any] = {
        "model": model,
        "max_model_len": options.max_model_len,
        "encoder_placement": "colocated" if least.colocated else "deployment",
        "lm_engine": engine_options,
    }
    application = {"name": "sightline", "import_path": "app:build", "args": args, "deployments": deployments}
    return yaml.safe_dump({"applications": [application]}, sort_keys=False, width=120)


def _replicas(least: int, most: int, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    if most <= least:
        return {"num_replicas": least}
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "policy": {"policy_function": policy, "policy_kwargs": options},
        }
    }
