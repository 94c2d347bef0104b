"""The application with replicas that die of certain requests: `import_path: tests.serve.poison:build`.

A request dies of its `cache_salt`: POISON + a deployment's name kills each replica of it that gets to see the request.
Every death is counted by the actor `deaths`, which a test must have started with `count_deaths()`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray
from ray.serve.deployment import Application

from app import builder
from deployments.lm_engine.deployment import LMEngine
from deployments.messages import EncodedItem, EncodeRequest, GenerateRequest, PreparedPrompt, PrepareRequest
from deployments.preprocessor.deployment import Preprocessor
from deployments.vision_encoder.deployment import VisionEncoder

POISON = "poison for "
NAMESPACE = "serve"
POISONOUS_GRID = (1, 2, 32)
"""The encoder never sees a salt: it dies of pictures that are cut into this grid."""


class FragilePreprocessor(Preprocessor):
    async def prepare(self, request: PrepareRequest) -> PreparedPrompt:
        if request.cache_salt == POISON + "Preprocessor":
            die("Preprocessor")
        return await super().prepare(request)


class FragileEncoder(VisionEncoder):
    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        if any(item.grid == POISONOUS_GRID for item in request.items):
            die("VisionEncoder")
        return await super().encode(request)


class FragileEngine(LMEngine):
    async def submit(self, request: GenerateRequest) -> str:
        if request.cache_salt == POISON + "LMEngine":
            die("LMEngine")
        return await super().submit(request)


def build(args: dict[str, Any]) -> Application:
    with patch.multiple(
        builder, Preprocessor=FragilePreprocessor, VisionEncoder=FragileEncoder, LMEngine=FragileEngine
    ), _under_their_names():  # fmt: skip
        return builder.build(args)


@contextmanager
def _under_their_names() -> Iterator[None]:
    made = builder._deployment

    def named(cls: type, name: str | None = None, **options: Any) -> Any:
        return made(cls, name=name or cls.__mro__[1].__name__, **options)

    with patch.object(builder, "_deployment", named):
        yield


def die(name: str) -> None:
    ray.get(ray.get_actor("deaths", namespace=NAMESPACE).add.remote(name))
    os.kill(os.getpid(), signal.SIGKILL)


class Deaths:
    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def add(self, name: str) -> None:
        self._count[name] += 1

    def count(self) -> Counter[str]:
        return self._count


def count_deaths() -> Any:
    """The counting actor; lives as long as the handle does."""
    return ray.remote(num_cpus=0)(Deaths).options(name="deaths", namespace=NAMESPACE).remote()
