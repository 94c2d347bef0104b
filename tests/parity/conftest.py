"""Tiny checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.parity.rig import TinyVlm
from tests.tiny_models import Family, load_hf_model, save_tiny_model

MakeVlm = Callable[..., TinyVlm]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order, and room for whatever else runs on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_vlm(tmp_path_factory: pytest.TempPathFactory) -> MakeVlm:
    """A tiny model by family and `save_tiny_model` options; equal calls share one, oracle answers included."""
    made: dict[tuple[Any, ...], TinyVlm] = {}

    def make(family: Family, **options: Any) -> TinyVlm:
        key = (family, *sorted(options.items()))
        if key not in made:
            folder = save_tiny_model(tmp_path_factory.mktemp(family) / "model", family, seed=1, **options)
            made[key] = TinyVlm(folder, load_hf_model(folder))
        return made[key]

    return make
