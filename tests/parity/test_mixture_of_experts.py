"""A model whose layers hold experts, end to end: the engine, and the vision tower read from the same checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.lm_engine.model import load_language_model
from deployments.preprocessor.families.qwen3_vl import Qwen3VLFamily
from deployments.preprocessor.families.registry import load_family
from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.build import load_core
from deployments.vision_encoder.config import EncoderConfig
from tests.parity.conftest import MakeVlm
from tests.parity.rig import Clip, Picture, Rig, TinyVlm


@pytest.fixture(scope="module")
def vlm(make_vlm: MakeVlm) -> TinyVlm:
    return make_vlm("qwen3_vl_moe")


@pytest.mark.parametrize("max_num_batched_tokens", [256, 7, 1])
def test_answers_equal_generate_however_the_batch_is_cut(vlm: TinyVlm, max_num_batched_tokens: int) -> None:
    clip = Clip((Picture(6, 4, 8), Picture(7, 4, 8)))
    prompts = {
        "text": vlm.prompt("The quick brown fox jumps over"),
        "two": vlm.prompt("Compare ", Picture(2, 6, 4), " with ", Picture(3, 8, 8), " Which?"),
        "video": vlm.prompt("See ", clip, " What happens?"),
    }
    rig = Rig(vlm, max_num_batched_tokens=max_num_batched_tokens, delay_steps=1)
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt)


def test_the_tower_gives_what_transformers_gives(vlm: TinyVlm) -> None:
    config = EncoderConfig(model=str(vlm.folder), device="cpu", cudagraph_mm_encoder=False)
    core = load_core(config)
    grid = (1, 6, 8)
    shape = core.describe("image", grid).patches_shape
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (rows,) = core.encode_all([VisionItem("image", grid, pixels.numpy())])  # type: ignore[attr-defined]
    normalised = (pixels.float() / 255 - 0.5) / 0.5
    repeated = normalised.view(len(pixels), 3, 1, -1).expand(-1, -1, 2, -1).reshape(len(pixels), -1)
    with torch.no_grad():
        output = vlm.hf.model.get_image_features(repeated, torch.tensor([grid]))
    levels = [output.pooler_output, *output.deepstack_features]
    expected = torch.cat([torch.cat(list(level)) for level in levels], dim=1)
    torch.testing.assert_close(torch.from_numpy(rows), expected, atol=1e-4, rtol=1e-4)


def test_experts_of_a_hub_checkpoint_are_turned(vlm: TinyVlm, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(vlm.folder, tmp_path / "hub"))
    tensors = load_file(folder / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert experts
    save_file(tensors | {name: tensors[name].mT.contiguous() for name in experts}, folder / "model.safetensors")
    expected = vlm.lm.state_dict()
    for name, tensor in load_language_model(folder, dtype=torch.float32).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_preprocessor_takes_the_folder(vlm: TinyVlm) -> None:
    assert isinstance(load_family(Path(vlm.folder)), Qwen3VLFamily)
