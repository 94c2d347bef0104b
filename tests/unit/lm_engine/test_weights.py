"""Loading: names of all layouts, tied heads, complaints that name the tensor, buffers that survive the meta device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.checkpoint import CheckpointError
from deployments.lm_engine.model import load_language_model
from deployments.lm_engine.weights import parameter_name
from tests.tiny_models import FAMILIES, Family, load_hf_model, save_tiny_model


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.visual.merger.mlp.0.weight", None),
    ],
)
def test_names_of_all_layouts(stored: str, name: str | None) -> None:
    assert parameter_name(stored) == name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_buffers_equal_the_librarys(tmp_path: Path, family: Family, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "m", family, tie_word_embeddings=tied)
    ours, theirs = load_language_model(folder, dtype=torch.float32), load_hf_model(folder)
    expected = dict(theirs.model.language_model.named_parameters())
    loaded = dict(ours.model.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    embedding = ours.model.get_parameter("embed_tokens.weight")
    assert (ours.lm_head.weight.data_ptr() == embedding.data_ptr()) == tied
    buffers = dict(theirs.model.language_model.named_buffers())
    for name, buffer in ours.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def rename(folder: Path, old: str, new: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name.replace(old, new, 1): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})


@pytest.mark.parametrize(("old", "new"), [("model.", "model.language_model."), ("model.", "language_model.model.")])
def test_other_layouts_load_the_same(tmp_path: Path, old: str, new: str) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    expected = load_language_model(folder, dtype=torch.float32).state_dict()
    rename(folder, old, new)
    for name, tensor in load_language_model(folder, dtype=torch.float32).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_a_plain_text_decoder_loads(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_language_model(tmp_path, dtype=torch.float32)
    assert (model.vocab_size, model.embed_width, model.position_rule.axes) == (64, 32, 1)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    rename(folder, "model.layers.1.mlp.up_proj.weight", "visual.gone")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_language_model(folder, dtype=torch.float32)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    rename(folder, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.odd.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.odd\.weight"):
        load_language_model(folder, dtype=torch.float32)


def test_another_shape_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_5_vl")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 80
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"shape .*96.*, the config asks for .*80"):
        load_language_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_need_no_files_and_are_always_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen3_vl", tie_word_embeddings=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    first, second = (load_language_model(folder, dtype=dtype, load_format="dummy") for _ in range(2))
    for name, tensor in first.state_dict().items():
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
        assert torch.equal(tensor, second.state_dict()[name]), name
    layers = [first.model.get_parameter(f"layers.{layer}.mlp.up_proj.weight") for layer in (0, 1)]
    assert not torch.equal(*layers)


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen2_vl")
    shutil.rmtree(folder / "none", ignore_errors=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="load_format: dummy"):
        load_language_model(folder, dtype=torch.float32)
