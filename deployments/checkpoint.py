"""A model folder: where it is, what revision its weights are, and its tensors by name.

Knows nothing about architectures. `huggingface_hub` and `safetensors` are imported where they are used, so that stages
without weights (the ingress, the simulator) do not pay for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from deployments.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
_CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


class CheckpointError(InvalidRequestError):
    """A model folder that cannot be used; raised at start-up only."""

    default_code = "invalid_model"


def resolve_model(model: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """Local folder of `model`: a folder path as it is, else a hub id, downloaded unless cached.

    Args:
        model: Path, or hub id such as `Qwen/Qwen2.5-VL-7B-Instruct`.
        revision: Hub branch, tag or commit; ignored for folders.
        config_only: Leave the weights out (dummy weights, CPU-only stages).

    Raises:
        CheckpointError: Neither a folder with a config.json nor a hub id that can be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"model folder {model!r} has no config.json")
        return folder
    try:
        from huggingface_hub import snapshot_download

        patterns = [*_CONFIG_FILES] if config_only else [*_CONFIG_FILES, "*.safetensors"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as exc:  # the hub client raises many unrelated types; the cause is kept for the log
        raise CheckpointError(f"model {model!r} is neither a folder nor a hub id that could be downloaded") from exc


def read_json(folder: Path, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object of the folder; `default` if the file is missing."""
    path = folder / name
    if not path.is_file():
        if default is None:
            raise CheckpointError(f"model folder has no {name}")
        return default
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of the model folder is not a JSON object")
    return value


def weights_revision(folder: Path, load_format: str = "auto") -> str:
    """Digest that changes when the weights do: of config, index, and each weight file's name, size and time.

    The header of a safetensors file holds names, shapes and offsets but no values, so the file's modification time in
    nanoseconds enters too. A hub snapshot's folder bears the commit's id, which says it all.
    """
    hasher = blake3()
    if folder.parent.name == "snapshots":
        hasher.update(f"{load_format}:{folder.name}".encode())
        return hasher.hexdigest()
    hasher.update(load_format.encode())
    hasher.update((folder / "config.json").read_bytes())
    index = folder / INDEX_NAME
    if index.is_file():
        hasher.update(index.read_bytes())
    for path in weight_files(folder):
        stat = path.stat()
        hasher.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return hasher.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in name order."""
    return sorted(folder.glob("*.safetensors"))


def iter_tensors(
    folder: Path,
    prefixes: tuple[str, ...] = ("",),
    device: str = "cpu",
    part_of: Callable[[str, Sequence[int]], tuple[slice, ...] | None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor whose name starts with one of `prefixes`, one file at a time.

    Args:
        part_of: What of a tensor to read, by name and stored shape; the rest never leaves the file. None reads all.

    Raises:
        CheckpointError: The folder holds no safetensors file.
    """
    from safetensors import safe_open

    files = weight_files(folder)
    if not files:
        raise CheckpointError("model folder holds no *.safetensors file; load_format: dummy starts without weights")
    for path in files:
        with safe_open(str(path), framework="pt", device=device) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                if not name.startswith(prefixes):
                    continue
                part = None if part_of is None else part_of(name, tensors.get_slice(name).get_shape())
                yield name, tensors.get_tensor(name) if part is None else tensors.get_slice(name)[part]
