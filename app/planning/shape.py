"""Sizes of a model from its folder: bytes, arithmetic and KV cache, by stage. Reads JSON and file headers, no weights.

Counts are of the decoders and towers that are served (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, with experts or without). Where
the folder holds safetensors, their headers say how many bytes the weights take; else the counts do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.planning.errors import PlanError
from deployments.checkpoint import read_json, weight_files

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound on a file's header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The language model."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_model_len: int
    dense_layers: int
    """Layers whose MLP has no experts."""
    intermediate: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dtype_bytes: int = 2

    @property
    def _attention_params(self) -> int:
        """Of one layer's four products."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def _dense_params(self) -> int:
        """Products that every token passes and every step reads: attention, dense MLPs, routers, head."""
        dense = self.dense_layers * 3 * self.hidden * self.intermediate
        routers = self._sparse_layers * self.hidden * self.experts
        return self.num_layers * self._attention_params + dense + routers + self.hidden * self.vocab

    @property
    def _sparse_layers(self) -> int:
        return self.num_layers - self.dense_layers

    @property
    def _expert_params(self) -> int:
        """Of one expert in all layers."""
        return self._sparse_layers * 3 * self.hidden * self.expert_intermediate

    @property
    def num_params(self) -> int:
        """All but norms and biases, which are below a thousandth of a usual model."""
        embedding = 0 if self.tied else self.hidden * self.vocab
        return self._dense_params + self.experts * self._expert_params + embedding

    @property
    def flops_per_token(self) -> float:
        """Of the products; attention between tokens is `flops_per_pair`."""
        return 2.0 * (self._dense_params + self.experts_per_token * self._expert_params)

    @property
    def flops_per_pair(self) -> float:
        """Of one token's attention to one other, over all layers."""
        return 4.0 * self.num_layers * self.heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def read_bytes(self, rows: float) -> float:
        """Weights that a step of `rows` tokens reads: of the experts, those that at least one row is sent to."""
        touched = 0.0
        if self.experts:
            touched = self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** rows)
        return self.dtype_bytes * (self._dense_params + touched * self._expert_params)

    def step_bytes(self, rows: int, sequences: int) -> int:
        """Activations of a step of `rows` tokens that samples for `sequences`: a few rows of hidden and MLP width, and
        logits in the model's precision, as float32 and in the sampler's copy."""
        inner = max(self.intermediate, self.experts_per_token * self.expert_intermediate)
        return rows * (4 * self.hidden + 3 * inner) * self.dtype_bytes + sequences * self.vocab * (8 + self.dtype_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """The vision encoder."""

    depth: int
    hidden: int
    intermediate: int
    gated: bool
    out: int
    patch: int
    merge: int
    temporal: int
    full_layers: int
    """Layers that attend over whole frames."""
    deepstack: int = 0
    """Further results that a row carries for the decoder's first layers."""
    positions: int = 0
    """Rows of a learned position table."""
    dtype_bytes: int = 2

    @property
    def unit(self) -> int:
        """Patches of a slot."""
        return self.merge**2

    @property
    def _patch_params(self) -> int:
        """Products that every patch passes."""
        block = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.intermediate
        return self.depth * block + self.hidden * 3 * self.temporal * self.patch**2

    @property
    def _merger_params(self) -> int:
        """Products that every slot passes."""
        wide = self.unit * self.hidden
        return (1 + self.deepstack) * (wide * wide + wide * self.out)

    @property
    def num_params(self) -> int:
        """All but norms and biases."""
        return self._patch_params + self._merger_params + self.positions * self.hidden

    @property
    def flops_per_slot(self) -> float:
        return 2.0 * (self.unit * self._patch_params + self._merger_params)

    @property
    def flops_per_pair(self) -> float:
        """Of one patch's attention to one other, over the layers that see whole frames."""
        return 4.0 * self.full_layers * self.hidden

    @property
    def patch_bytes(self) -> int:
        """Of a picture's patch on its way to the encoder: uint8, the temporal copy left out."""
        return 3 * self.patch**2

    @property
    def row_bytes(self) -> int:
        """Of one row of results."""
        return self.out * (1 + self.deepstack) * self.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    decoder: DecoderShape
    tower: TowerShape
    decoder_bytes: int
    """Weights of the language model."""
    tower_bytes: int
    """Weights of the vision encoder."""
    weighed: bool
    """Whether the bytes are those of the folder's files, not of our counts."""


def read_shape(folder: Path, name: str, dtype: str = "auto") -> ModelShape:
    """The sizes of a model folder.

    Args:
        name: What the user calls it.
        dtype: In which it is served; `auto` is the checkpoint's own.

    Raises:
        PlanError: The configuration lacks what is needed.
        CheckpointError: The folder has no readable config.json.
    """
    return shape_of(read_json(folder, "config.json"), name, dtype, _weigh(folder) if dtype == "auto" else None)


def shape_of(
    config: Mapping[str, Any], name: str, dtype: str = "auto", weighed: tuple[int, int] | None = None
) -> ModelShape:
    """The sizes that a config.json describes.

    Args:
        weighed: Bytes of decoder and tower where they are known; counted if None.
    """
    kind = str(config.get("model_type"))
    text = {**config, **(config.get("text_config") or {})}
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise PlanError(f"{name}: config.json has no vision_config; only vision-language models are planned for")
    named = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16") if dtype == "auto" else dtype
    dtype_bytes = _DTYPE_BYTES.get(named.removeprefix("torch."))
    if dtype_bytes is None:
        raise PlanError(f"{name}: dtype is {named!r}; known: {', '.join(_DTYPE_BYTES)}")
    decoder = _decoder(
        text, bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings"))), dtype_bytes, name
    )
    tower = _tower(kind, vision, decoder.hidden, dtype_bytes, name)
    decoder_bytes, tower_bytes = weighed or (decoder.num_params * dtype_bytes, tower.num_params * dtype_bytes)
    return ModelShape(
        name=name,
        decoder=decoder,
        tower=tower,
        decoder_bytes=decoder_bytes,
        tower_bytes=tower_bytes,
        weighed=weighed is not None,
    )


def _decoder(text: Mapping[str, Any], tied: bool, dtype_bytes: int, name: str) -> DecoderShape:
    layers = _whole(text, "num_hidden_layers", name)
    hidden, heads = _whole(text, "hidden_size", name), _whole(text, "num_attention_heads", name)
    experts = int(text.get("num_experts") or 0)
    every = int(text.get("decoder_sparse_step") or 1)
    plain = set(text.get("mlp_only_layers") or ())
    sparse = sum((layer + 1) % every == 0 and layer not in plain for layer in range(layers)) if experts else 0
    return DecoderShape(
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab=_whole(text, "vocab_size", name),
        tied=tied,
        max_model_len=_whole(text, "max_position_embeddings", name),
        dense_layers=layers - sparse,
        intermediate=_whole(text, "intermediate_size", name),
        experts=experts if sparse else 0,
        experts_per_token=_whole(text, "num_experts_per_tok", name) if sparse else 0,
        expert_intermediate=_whole(text, "moe_intermediate_size", name) if sparse else 0,
        dtype_bytes=dtype_bytes,
    )


def _tower(kind: str, vision: Mapping[str, Any], out: int, dtype_bytes: int, name: str) -> TowerShape:
    depth = _whole(vision, "depth", name)
    shared: dict[str, Any] = {
        "depth": depth,
        "patch": int(vision.get("patch_size") or 14),
        "merge": int(vision.get("spatial_merge_size") or 2),
        "temporal": int(vision.get("temporal_patch_size") or 2),
        "dtype_bytes": dtype_bytes,
    }
    if kind == "qwen2_vl":
        width = _whole(vision, "embed_dim", name)
        inner = int(width * float(vision.get("mlp_ratio") or 4))
        return TowerShape(hidden=width, intermediate=inner, gated=False, out=out, full_layers=depth, **shared)
    width, inner = _whole(vision, "hidden_size", name), _whole(vision, "intermediate_size", name)
    out = int(vision.get("out_hidden_size") or out)
    if kind == "qwen2_5_vl":
        full = len(vision.get("fullatt_block_indexes") or ())
        return TowerShape(hidden=width, intermediate=inner, gated=True, out=out, full_layers=full, **shared)
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        return TowerShape(
            hidden=width,
            intermediate=inner,
            gated=False,
            out=out,
            full_layers=depth,
            deepstack=len(vision.get("deepstack_visual_indexes") or ()),
            positions=int(vision.get("num_position_embeddings") or 0),
            **shared,
        )
    raise PlanError(f"{name}: model_type {kind!r} is not known; known: qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe")


def _whole(config: Mapping[str, Any], field: str, name: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}: config.json has no usable {field}: {value!r}")
    return value


def _weigh(folder: Path) -> tuple[int, int] | None:
    """Bytes of (decoder, tower) as the files' headers tell; None without files."""
    files = weight_files(folder)
    if not files:
        return None
    decoder = tower = 0
    for path in files:
        for tensor, num_bytes in _tensor_bytes(path):
            if tensor.removeprefix("model.").startswith("visual."):
                tower += num_bytes
            else:
                decoder += num_bytes
    return decoder, tower


def _tensor_bytes(path: Path) -> list[tuple[str, int]]:
    """(name, bytes) of every tensor of a safetensors file: 8 bytes of the header's length, then the header as JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise PlanError(f"{path} is no safetensors file: its header would be {length} bytes")
        try:
            header = json.loads(file.read(length))
            spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            return [(name, stop - start) for name, (start, stop) in spans.items()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{path} is no safetensors file: {error}") from None
