"""Where a tower's tensors come from: a checkpoint, or random numbers in its shape. Knows no architectures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

TOWER_PREFIXES = ("model.visual.", "visual.")
"""As transformers 5 saves it, and as the hub's checkpoints have it."""


class WeightSource(Protocol):
    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor called `name` (without the tower's prefix), in any dtype and on any device.

        Raises:
            ValueError: It is missing or has another shape.
        """


class TensorWeights:
    """Tensors by name, such as a tower's state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"the checkpoint has no tensor {name!r} of the vision tower")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}; the config asks for {shape}")
        return tensor


class DummyWeights:
    """Reproducible random weights: small normal numbers, ones for norms, zeros for biases."""

    def __init__(self, device: torch.device, seed: int = 0, std: float = 0.02) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device, self._std = device, std

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device, generator=self._generator) * self._std


def checkpoint_weights(folder: Path, prefixes: tuple[str, ...] = TOWER_PREFIXES) -> TensorWeights:
    """The tower's tensors of a model folder, prefix removed, on CPU in the checkpoint's precision."""
    from deployments.checkpoint import iter_tensors

    tensors = {}
    for name, tensor in iter_tensors(folder, prefixes):
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        tensors[name.removeprefix(prefix)] = tensor
    return TensorWeights(tensors)
