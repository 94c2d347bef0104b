"""Who may import whom. Reads the sources with `ast`, so a forbidden import fails even where it is lazy.

4 root        app/builder.py, app/serve.py, app/stop.py                 everything
3 shims, edge */deployment.py, handles.py, metrics.py, app/ingress.py   below, plus ray, fastapi, prometheus_client
2 planner     app/plan.py, app/planning/                                layers 0-1 and the stages' deciders
2 cores       the rest of each stage, app/pipeline.py, app/openai_*     layers 0-1 and their own folder
1 contracts   messages, ports, errors, checkpoint, cache_service        stdlib, numpy, blake3
1 arithmetic  fp8, fp8_triton                                           torch, triton
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for top in ("app", "deployments", "cache_service") for path in (ROOT / top).rglob("*.py"))

EDGE_LIBRARIES = {"ray", "fastapi", "starlette", "uvicorn", "prometheus_client"}
ROOT_FILES = {"app/builder.py", "app/serve.py", "app/stop.py", "app/__init__.py"}
APP_EDGE = {"app/deployment.py", "app/replicas.py", "app/shutdown.py"}
CONFIG_FILES = {"app/config.py"}  # composes the stages' option classes, nothing else of theirs
EDGE_FILES = {
    "deployments/telemetry.py",
    "deployments/vllm_names.py",
    "deployments/replica_log.py",
    "deployments/handles.py",
    "deployments/metrics.py",
    "deployments/colocated.py",
    "deployments/direct_store.py",
    "deployments/transfer_meter.py",
    "deployments/request_router.py",
    "deployments/lm_engine/gang.py",
}
CONTRACTS = {
    "deployments.errors",
    "deployments.messages",
    "deployments.ports",
    "deployments.checkpoint",
    "deployments.fp8",
    "deployments.fp8_triton",
    "deployments.work_meter",
    "deployments.hedging",
}
STAGES = ("preprocessor", "vision_encoder", "lm_engine")
# Host-side engine files decide on integers; a tensor there would make a decision depend on a device.
TORCH_FREE = {
    "deployments/autoscaling.py",
    "deployments/hedging.py",
    "deployments/routing.py",
    "deployments/work_meter.py",
    "deployments/vision_encoder/packing.py",
    "deployments/vision_encoder/costs.py",
    "deployments/preprocessor/families/registry.py",
    *(
        f"deployments/lm_engine/{name}.py"
        for name in (
            "admission",
            "block_pool",
            "config",
            "embed_cache",
            "embed_pool",
            "first_fit",
            "kv_manager",
            "load",
            "plan",
            "prefix_cache",
            "queue",
            "request",
            "scheduler",
            "simulator",
            "trace",
            "tensor_parallel/channel",
            "tensor_parallel/shards",
            "tensor_parallel/wire",
        )
    ),
}


# The planner replays the stages' deciders together, as app/builder.py composes the stages, without torch and Ray.
PLANNER = ("app/plan.py", "app/planning/")
DECIDERS = {name.removesuffix(".py").replace("/", ".") for name in TORCH_FREE}


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of every module a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who is imported"
            assert node.module is not None
            yield node.module


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_edge(name: str) -> bool:
    return name in EDGE_FILES or name.endswith("/deployment.py")


def stage_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "deployments" and parts[1] in STAGES else None


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_respect_the_layers(path: Path) -> None:
    name = name_of(path)
    if name in ROOT_FILES:
        return
    for module in imports_of(path):
        top = module.split(".")[0]
        if top == "redis":
            assert name == "cache_service/redis_tier.py", f"{name} imports redis"
        if name.startswith("app/"):
            if name in CONFIG_FILES and module.endswith(".config"):
                continue
            assert module != "app.builder", f"{name} imports the composition root"
            forbidden = {"torch", "transformers"} if name in APP_EDGE else {"ray", "prometheus_client"}
            assert top not in forbidden | {"torch", "transformers"}, f"{name} imports {module}"
            if name.startswith(PLANNER) and module in DECIDERS:
                continue
            assert stage_of(module) is None, f"{name} imports the stage {module}"
            continue
        assert top != "app", f"{name} imports {module}"
        if is_edge(name):
            continue
        assert top not in EDGE_LIBRARIES, f"{name} imports {module}"
        if name.startswith("cache_service/"):
            assert top != "deployments" or module == "deployments.errors", f"{name} imports {module}"
            assert top not in {"torch", "transformers"}, f"{name} imports {module}"
        elif stage := stage_of(name.removesuffix(".py").replace("/", ".")):
            imported = stage_of(module)
            assert imported in (None, stage), f"{name} imports the stage {module}"
            if top == "deployments" and imported is None:
                assert module in CONTRACTS, f"{name} imports {module}"


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_deciders_know_no_tensors(name: str) -> None:
    path = ROOT / name
    assert path.is_file(), f"{name} has moved: update the list"
    assert not {"torch", "transformers"} & {module.split(".")[0] for module in imports_of(path)}


def test_contracts_import_only_the_standard_library_numpy_and_each_other() -> None:
    for dotted in CONTRACTS:
        path = ROOT / (dotted.replace(".", "/") + ".py")
        for module in imports_of(path):
            top = module.split(".")[0]
            assert top not in EDGE_LIBRARIES | {"transformers", "redis"}, f"{dotted} imports {module}"
            assert stage_of(module) is None, f"{dotted} imports the stage {module}"
