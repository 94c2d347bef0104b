"""Weights of the language model alone: names of either layout mapped, read straight to the device, checked whole.

A vision-language checkpoint names its language model in one of several ways, of which hub and later releases differ:

    model.layers.0...                  hub layout of Qwen2-VL, Qwen2.5-VL, and of plain decoders
    model.language_model.layers.0...   layout of newer checkpoints
    language_model.model.layers.0...   layout of LLaVA-like checkpoints
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from deployments.checkpoint import CheckpointError, iter_tensors
from deployments.lm_engine.tensor_parallel.shards import Shards, Slice

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


def load_weights(
    module: nn.Module,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tied: bool,
    shards: Shards | None = None,
) -> None:
    """Fill the meta parameters of `module` (children `model` and `lm_head`) from a checkpoint.

    Args:
        tied: Whether the head shares the embedding's weights; then a head in the checkpoint is ignored.
        shards: The share of one rank, whose shapes `module` has; the rest is not read. None for all.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape than the config says.
    """
    wanted = {name: parameter.shape for name, parameter in module.named_parameters()}
    if tied:
        del wanted[_HEAD]
    loaded: dict[str, torch.Tensor] = {}

    def part_of(stored_name: str, shape: Sequence[int]) -> tuple[slice, ...] | None:
        part = None if shards is None else shards.of(parameter_name(stored_name) or "")
        if part is None:
            return None
        if len(shape) <= part.dim or shape[part.dim] != part.size:
            shapes = f"{tuple(shape)}, the config asks for {part.size} along dimension {part.dim}"
            raise CheckpointError(f"tensor {stored_name!r} of the checkpoint has shape {shapes}")
        return _index(part)

    with tqdm(total=len(wanted), desc="Loading language model", unit="tensor", disable=None) as progress:
        for stored_name, tensor in iter_tensors(folder, _READ_PREFIXES, str(device), part_of):
            name = parameter_name(stored_name)
            if name is None or (name == _HEAD and tied) or name.endswith("rotary_emb.inv_freq"):
                continue
            if name not in wanted:
                raise CheckpointError(f"tensor {stored_name!r} of the checkpoint is not part of the configured model")
            tensor = _turned(tensor, wanted[name])
            if tensor.shape != wanted[name]:
                shapes = f"{tuple(tensor.shape)}, the config asks for {tuple(wanted[name])}"
                raise CheckpointError(f"tensor {stored_name!r} of the checkpoint has shape {shapes}")
            loaded[name] = tensor.to(dtype).contiguous()
            progress.update()
    missing = sorted(wanted.keys() - loaded.keys())
    if missing:
        raise CheckpointError(f"checkpoint lacks {len(missing)} tensors of the language model, first {missing[0]!r}")
    _assign(module, loaded, tied, shards)


def _turned(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Stacked experts of hub checkpoints are [experts, in, out], those of transformers' modules [experts, out, in]."""
    is_turned = tensor.ndim == 3 and tensor.shape != shape and tensor.mT.shape == shape
    return tensor.mT if is_turned else tensor


def dummy_weights(
    module: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tied: bool,
    std: float,
    shards: Shards | None = None,
) -> None:
    """Random weights that depend only on names and shapes: runs can be compared without a checkpoint.

    Args:
        shards: The share of one rank, which gets its part of the same values; None for all.
    """
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
        shape, part = list(parameter.shape), None if shards is None else shards.of(name)
        if part is not None:
            shape[part.dim] = part.size
        values = torch.empty(shape, device=device, dtype=dtype).normal_(0.0, std, generator=generator)
        loaded[name] = values if part is None else values[_index(part)].clone(memory_format=torch.contiguous_format)
    _assign(module, loaded, tied, shards)


def _index(part: Slice) -> tuple[slice, ...]:
    return (*(slice(None),) * part.dim, slice(part.start, part.stop))


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor], tied: bool, shards: Shards | None) -> None:
    if tied:
        part = None if shards is None else shards.of(_HEAD)
        tensors[_HEAD] = tensors[_EMBEDDING] if part is None else tensors[_EMBEDDING][_index(part)]
    module.load_state_dict(tensors, strict=True, assign=True)
    module.requires_grad_(False)


def meta_buffers(module: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """(owner, name) of every buffer that was built on the meta device and holds no values."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                yield owner, name
