"""A transformers decoder, unmodified, run over a flat batch with paged attention. Knows no requests and no scheduling.

The decoder's attention function is ours, registered under a name of its own; everything else, from rotary embeddings
to norms, is the library's. No cache object is passed: keys and values go to the pools that the attention batch knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PretrainedConfig

from deployments.checkpoint import CheckpointError
from deployments.fp8 import Fp8Ops
from deployments.lm_engine.attention import AttentionBatch
from deployments.lm_engine.families.positions import PositionRule
from deployments.lm_engine.families.registry import family_of
from deployments.lm_engine.fused_layers import RowOps, can_fuse, fuse_layers
from deployments.lm_engine.kv_tensors import KVLayout
from deployments.lm_engine.quantization import quantize_layers
from deployments.lm_engine.tensor_parallel.group import TensorParallelGroup
from deployments.lm_engine.tensor_parallel.layers import Share, leave_biases_to_rank_0, shard_model
from deployments.lm_engine.tensor_parallel.shards import DecoderShape, Shards
from deployments.lm_engine.weights import dummy_weights, load_weights, meta_buffers

LoadFormat = Literal["auto", "safetensors", "dummy"]

# A name with "flash" in it would make the library look for a kernel package.
_ATTENTION_NAME = "sightline_paged"


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    paged: AttentionBatch,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out, no weights."""
    out = paged.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
    )
    return out[None], None


AttentionInterface.register(_ATTENTION_NAME, _paged_attention)


class LanguageModel(nn.Module):
    """Decoder and head of a checkpoint. Built by `load_language_model`.

    Args:
        model: The decoder, of the library's class for the text config.
        config: The checkpoint's whole config.
        share: Which part of it this is, where it is spread over ranks.
    """

    def __init__(
        self, model: nn.Module, lm_head: nn.Linear, config: PretrainedConfig, share: Share | None = None
    ) -> None:
        super().__init__()
        self.model, self.lm_head = model, lm_head
        self._share = share
        options = config.to_dict()
        family = family_of(options)
        text = config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.max_position_embeddings: int = text.max_position_embeddings
        self.position_rule: PositionRule = family.position_rule(options)
        self.deepstack_levels = family.deepstack_levels(options)
        self._text_config = text

    @property
    def embed_width(self) -> int:
        """Columns of an embedding row: hidden size, times (1 + deepstack levels)."""
        return self.hidden_size * (1 + self.deepstack_levels)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self._text_config.num_attention_heads if self._share is None else self._share.shards.num_heads

    def fuse(self, ops: RowOps) -> bool:
        """Put fused layers in the place of the library's; False, and nothing done, for an architecture without them."""
        if not can_fuse(self.model):
            return False
        fuse_layers(self.model, ops, None if self._share is None else self._share.group)
        return True

    def quantize(self, ops: Fp8Ops) -> int:
        """Put 8-bit products in the place of the layers' own, after `fuse` if that is wanted; returns how many."""
        return quantize_layers(self.model, ops)

    def kv_layout(self, block_size: int) -> KVLayout:
        """Of this rank's KV heads."""
        text = self._text_config
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return KVLayout(
            num_layers=text.num_hidden_layers,
            num_kv_heads=kv_heads if self._share is None else self._share.shards.num_kv_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            block_size=block_size,
            dtype=self.dtype,
        )

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size], a new tensor."""
        return self.model.embed_tokens(token_ids)  # type: ignore[operator]

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        paged: AttentionBatch,
        visual_rows: torch.Tensor | None = None,
        deepstack: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """One pass over a flat batch.

        Args:
            hidden: Input embeddings [T, hidden_size].
            positions: int64 [axes, T].
            visual_rows: bool [T], the rows that hold item embeddings; None if no row does.
            deepstack: For each level [visual rows, hidden_size].

        Returns:
            [T, hidden_size], after the final norm.
        """
        extra: dict[str, Any] = {}
        if deepstack and visual_rows is not None:
            extra = {"visual_pos_masks": visual_rows[None], "deepstack_visual_embeds": list(deepstack)}
        output = self.model(
            inputs_embeds=hidden[None],
            position_ids=positions[:, None] if positions.shape[0] > 1 else positions,
            use_cache=False,
            paged=paged,
            **extra,
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]; on a rank other than 0 anything of as many rows."""
        return self.lm_head(hidden)


def load_language_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    group: TensorParallelGroup | None = None,
) -> LanguageModel:
    """The language model of a folder; its vision tower is neither built nor read.

    Args:
        group: Ranks to spread it over: each builds and reads its share alone. None for one device.

    Raises:
        CheckpointError: A family that is not served, or weights that do not fit the config.
        ValueError: The model cannot be spread over so many ranks.
    """
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    target = torch.device(device)
    with torch.device("meta"):
        body = AutoModel.from_config(text, dtype=dtype, attn_implementation=_ATTENTION_NAME)
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False, dtype=dtype)
    share = None if group is None else Share(group, Shards(DecoderShape.of(text.to_dict()), group.rank, group.size))
    if share is not None:
        head = shard_model(body, head, share)
    module = LanguageModel(body, head, config, share).eval()
    tied, shards = bool(config.tie_word_embeddings), None if share is None else share.shards
    if load_format == "dummy":
        dummy_weights(module, device=target, dtype=dtype, tied=tied, std=text.initializer_range, shards=shards)
    else:
        load_weights(module, folder, device=target, dtype=dtype, tied=tied, shards=shards)
    if share is not None:
        leave_biases_to_rank_0(body, share)
    _fill_buffers(module, target)
    return module


def _fill_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers built on the meta device hold no values; their owners (rotary embeddings) are made again for real."""
    rebuilt: dict[int, nn.Module] = {}
    for owner, name in list(meta_buffers(module)):
        if id(owner) not in rebuilt:
            config = getattr(owner, "config", None)
            if config is None:
                raise CheckpointError(f"buffer {name!r} of {type(owner).__name__} cannot be rebuilt")
            rebuilt[id(owner)] = type(owner)(config=config)
        setattr(owner, name, getattr(rebuilt[id(owner)], name).to(device))
