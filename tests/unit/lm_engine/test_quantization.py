"""Decoders in eight bits, emulated on the CPU, against themselves in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deployments.fp8 import EmulatedFp8, Fp8Linear
from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.build import load_model
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.fused_layers import PlainRowOps
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan
from tests.gpu.lm_steps import forced_logits, make_rig
from tests.tiny_models import FAMILIES, Family, save_tiny_model

PROMPTS = ([20, 21, 22, 23, 24], [30, 31], [40, 41, 42])
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    return save_tiny_model(tmp_path_factory.mktemp("model") / family, family, seed=1)


def make_model(folder: Path, *, fused: bool = True, quantized: bool = True) -> LanguageModel:
    model = load_language_model(folder, dtype=torch.float32)
    if fused:
        assert model.fuse(PlainRowOps())
    if quantized:
        assert model.quantize(EmulatedFp8()) == (12 if fused else 21)
    return model


def logits_of(model: LanguageModel) -> torch.Tensor:
    """[prompts, vocab]"""
    runner = ModelRunner(model, SdpaBackend(KVTensors(model.kv_layout(4), 24)), EmbedStore())
    chunks = []
    for index, text in enumerate(PROMPTS):
        positions = model.position_rule.positions(len(text), ())
        blocks = range(index * 8, index * 8 + 8)
        chunks.append(SequenceChunk(str(index), 0, text, positions.slice(0, len(text)), blocks, True))
    return runner.run(StepPlan(tuple(chunks)))


def test_logits_are_near_those_in_float32(folder: Path) -> None:
    """Three layers of 64 columns average little out: independent errors of 3.6% a product move logits as far."""
    exact, ours = logits_of(make_model(folder, quantized=False)), logits_of(make_model(folder))
    cosine = torch.cosine_similarity(exact, ours)
    assert float(cosine.min()) > 0.975
    assert not torch.equal(exact, ours)


def test_fused_layers_quantise_as_the_librarys_do(folder: Path) -> None:
    assert torch.equal(logits_of(make_model(folder)), logits_of(make_model(folder, fused=False)))


def test_embedding_norms_and_head_stay_as_they_are(folder: Path) -> None:
    model = make_model(folder)
    assert not any(isinstance(module, torch.nn.Linear) for module in model.model.layers.modules())  # type: ignore[union-attr]
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert model.dtype is torch.float32
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert {buffer.dtype for layer in layers for buffer in (layer.values,)} == {torch.float8_e4m3fn}
    plain = make_model(folder, quantized=False)
    weights = sum(parameter.nbytes for parameter in plain.model.layers.parameters() if parameter.ndim == 2)  # type: ignore[union-attr]
    assert sum(layer.values.nbytes for layer in layers) * 4 == weights


def test_the_option_quantises_what_is_loaded(folder: Path) -> None:
    config = EngineConfig(model=str(folder), quantization="fp8")
    loaded = load_model(config, folder, torch.float32, CPU, EmulatedFp8())
    assert torch.equal(logits_of(loaded), logits_of(make_model(folder, fused=False)))


def test_random_weights_are_quantised_too(folder: Path) -> None:
    config = EngineConfig(model=str(folder), quantization="fp8", load_format="dummy")
    model = load_model(config, folder, torch.float32, CPU, EmulatedFp8())
    assert torch.isfinite(logits_of(model)).all()
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 21


def test_a_cpu_without_the_emulation_is_refused_by_the_options_name(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"quantization is 'fp8'.*cpu"):
        load_model(EngineConfig(model=str(folder), quantization="fp8"), folder, torch.float32, CPU)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantization.*'int3'"):
        EngineConfig(model="m", quantization="int3")  # type: ignore[arg-type]


def test_the_shipped_model_answers_as_in_float32() -> None:
    exact, tokens = forced_logits(make_rig("cpu", torch.float32), None, 24)
    rig = make_rig("cpu", torch.float32, fp8=EmulatedFp8(), quantization="fp8")
    ours, _ = forced_logits(rig, tokens, 24)
    same = ours.argmax(-1) == exact.argmax(-1)
    best, second = exact.topk(2).values.unbind(-1)
    assert float(same.float().mean()) >= 0.94
    assert bool(same[best - second > 2].all())
    assert float(torch.cosine_similarity(exact, ours, dim=-1).mean()) > 0.985
