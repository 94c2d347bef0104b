"""Weights of the language model alone: names of either layout mapped, read straight to the device, checked whole.

A vision-language checkpoint names its language model in one of several ways, of which hub and later releases differ:

    model.layers.0...                  hub layout of Qwen2-VL, Qwen2.5-VL, and of plain decoders
    model.language_model.layers.0...   layout of newer checkpoints
    language_model.model.layers.0...   layout of LLaVA-like checkpoints
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from deployments.checkpoint import CheckpointError, iter_tensors

_BODY_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_BODY_PARTS = ("layers.", "embed_tokens.", "norm.")
_READ_PREFIXES = (*(prefix + part for prefix in _BODY_PREFIXES for part in _BODY_PARTS), *_HEAD_NAMES)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def parameter_name(name: str) -> str | None:
    """Name under {model, lm_head} of a checkpoint's tensor; None if it is not the language model's."""
    if name in _HEAD_NAMES:
        return _HEAD
    for prefix in _BODY_PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and rest.startswith(_BODY_PARTS):
            return "model." + rest
    return None


def load_weights(module: nn.Module, folder: Path, *, device: torch.device, dtype: torch.dtype, tied: bool) -> None:
    """Fill the meta parameters of `module` (children `model` and `lm_head`) from a checkpoint.

    Args:
        tied: Whether the head shares the embedding's weights; then a head in the checkpoint is ignored.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape than the config says.
    """
    wanted = {name: parameter.shape for name, parameter in module.named_parameters()}
    if tied:
        del wanted[_HEAD]
    loaded: dict[str, torch.Tensor] = {}
    with tqdm(total=len(wanted), desc="Loading language model", unit="tensor", disable=None) as progress:
        for stored_name, tensor in iter_tensors(folder, _READ_PREFIXES, device=str(device)):
            name = parameter_name(stored_name)
            if name is None or (name == _HEAD and tied) or name.endswith("rotary_emb.inv_freq"):
                continue
            if name not in wanted:
                raise CheckpointError(f"tensor {stored_name!r} of the checkpoint is not part of the configured model")
            if tensor.shape != wanted[name]:
                shapes = f"{tuple(tensor.shape)}, the config asks for {tuple(wanted[name])}"
                raise CheckpointError(f"tensor {stored_name!r} of the checkpoint has shape {shapes}")
            loaded[name] = tensor.to(dtype)
            progress.update()
    missing = sorted(wanted.keys() - loaded.keys())
    if missing:
        raise CheckpointError(f"checkpoint lacks {len(missing)} tensors of the language model, first {missing[0]!r}")
    _assign(module, loaded, tied)


def dummy_weights(module: nn.Module, *, device: torch.device, dtype: torch.dtype, tied: bool, std: float) -> None:
    """Random weights that depend only on names and shapes: runs can be compared without a checkpoint."""
    loaded: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if name == _HEAD and tied:
            continue
        if parameter.ndim == 1:
            fill = 1.0 if name.endswith("norm.weight") else 0.0
            loaded[name] = torch.full(parameter.shape, fill, device=device, dtype=dtype)
            continue
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator(device).manual_seed(seed)
        loaded[name] = torch.empty(parameter.shape, device=device, dtype=dtype).normal_(0.0, std, generator=generator)
    _assign(module, loaded, tied)


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor], tied: bool) -> None:
    if tied:
        tensors[_HEAD] = tensors[_EMBEDDING]
    module.load_state_dict(tensors, strict=True, assign=True)
    module.requires_grad_(False)


def meta_buffers(module: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """(owner, name) of every buffer that was built on the meta device and holds no values."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                yield owner, name
