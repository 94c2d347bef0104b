"""Reading a share: the ranks' tensors put together are the checkpoint's, and each rank reads no more than its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deployments import checkpoint
from deployments.checkpoint import CheckpointError, iter_tensors
from deployments.lm_engine.fused_layers import PlainRowOps
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.tensor_parallel.group import TensorParallelGroup
from deployments.lm_engine.tensor_parallel.shards import DecoderShape, Shards
from tests.tiny_models import FAMILIES, Family, save_tiny_model


def load(folder: Path, rank: int, size: int, **options: Any) -> LanguageModel:
    """A share; nobody is there to compute with."""
    group = cast(TensorParallelGroup, SimpleNamespace(rank=rank, size=size))
    return load_language_model(folder, dtype=torch.float32, group=group, **options)


def shards_of(folder: Path, rank: int, size: int) -> Shards:
    config = json.loads((folder / "config.json").read_text())
    return Shards(DecoderShape.of(config.get("text_config", config)), rank, size)


def put_together(folder: Path, size: int, **options: Any) -> dict[str, torch.Tensor]:
    """Parameters of all ranks, split ones side by side; whole ones must be alike."""
    ranks = [dict(load(folder, rank, size, **options).named_parameters()) for rank in range(size)]
    whole = {}
    for name, first in ranks[0].items():
        parts = [shards_of(folder, rank, size).of(name) for rank in range(size)]
        if parts[0] is None:
            assert all(torch.equal(rank[name], first) for rank in ranks)
            whole[name] = first
            continue
        tensors = {part.start: rank[name] for part, rank in zip(parts, ranks, strict=True) if part is not None}
        held = torch.cat([tensors[start] for start in sorted(tensors)], dim=parts[0].dim)
        for part, rank in zip(parts, ranks, strict=True):
            assert part is not None
            assert torch.equal(rank[name], held.narrow(part.dim, part.start, part.stop - part.start)), name
        whole[name] = held
    return whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"load_format": "dummy"}], ids=str)
def test_shares_make_up_the_checkpoint(tmp_path: Path, family: Family, size: int, options: dict[str, Any]) -> None:
    folder = save_tiny_model(tmp_path / "m", family, seed=3)
    expected = dict(load_language_model(folder, dtype=torch.float32, **options).named_parameters())
    found = put_together(folder, size, **options)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_tied_head_is_a_view_of_the_embedding(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl", tie_word_embeddings=True)
    model = load(folder, 1, 2)
    embedding = model.model.get_parameter("embed_tokens.weight")
    rows = embedding.shape[0] // 2
    assert model.lm_head.weight.data_ptr() == embedding[rows:].data_ptr()
    assert torch.equal(model.lm_head.weight, embedding[rows:])


def test_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=63, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    heads = [load(tmp_path, rank, 2).lm_head.weight for rank in range(2)]
    assert [head.shape[0] for head in heads] == [32, 31]
    assert torch.equal(torch.cat(heads), load_language_model(tmp_path, dtype=torch.float32).lm_head.weight)


def test_a_share_is_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come out of the file, against those of the share."""
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    read = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal read
        for name, tensor in iter_tensors(*args, **kwargs):
            read += tensor.nbytes
            yield name, tensor

    monkeypatch.setattr("deployments.lm_engine.weights.iter_tensors", counting)
    model = load(folder, 1, 2)
    assert read == sum(parameter.nbytes for parameter in model.parameters())
    assert checkpoint.iter_tensors is iter_tensors


def test_stacked_weights_keep_the_order_of_queries_keys_and_values(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen3_vl")
    plain, fused = load(folder, 1, 2), load(folder, 1, 2)
    assert fused.fuse(PlainRowOps())
    attention = plain.model.layers[0].self_attn  # type: ignore[index,union-attr]
    stacked = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])  # type: ignore[union-attr]
    assert torch.equal(fused.model.layers[0].qkv_proj.weight, stacked)  # type: ignore[index,union-attr]
    assert (plain.num_heads, plain.kv_layout(4).num_kv_heads) == (2, 1)


def test_a_bias_after_the_sum_counts_once(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for rank in (0, 1):
        layer = load(tmp_path, rank, 2).model.layers[0]  # type: ignore[index]
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):  # type: ignore[union-attr]
            assert (linear.bias is None) == (rank == 1)  # type: ignore[union-attr]
        assert layer.self_attn.q_proj.bias.shape == (16,)  # type: ignore[union-attr]


def test_a_whole_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 80
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"shape .*96.*, the config asks for 80 along dimension"):
        load(folder, 0, 2)


def test_a_model_that_cannot_be_split_so_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    with pytest.raises(ValueError, match="tensor_parallel_size is 3, but it must divide the model's num_attention_he"):
        load(folder, 0, 3)


def test_layers_of_another_shape_are_named(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but layers of class MixtralDecoderLayer cannot"):
        load(tmp_path, 0, 2, load_format="dummy")
