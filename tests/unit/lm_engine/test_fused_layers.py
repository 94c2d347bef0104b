"""Fused layers, and decode steps on static inputs, against transformers' own model; on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deployments.lm_engine.attention import AttentionBackend, SdpaBackend
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.fused_layers import PlainRowOps, RowOps
from deployments.lm_engine.kernel_choice import check_attention, check_row_ops, choose_attention, choose_row_ops
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.model_runner import DecodeReplay, ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan
from tests.tiny_models import FAMILIES, Family, load_hf_model, save_tiny_model

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

BLOCK_SIZE = 4
PROMPTS = ([20, 21, 22, 23, 24], [30, 31], [40, 41, 42])
NUM_STEPS = 4
MakeDecodes = Callable[[LanguageModel, AttentionBackend], DecodeReplay | None]


@pytest.fixture(scope="module", params=[*FAMILIES, "sliding"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / request.param
    if request.param == "sliding":
        return save_tiny_model(target, "qwen2_5_vl", seed=1, sliding_window=3)
    family: Family = request.param
    return save_tiny_model(target, family, seed=1)


def run(
    folder: Path,
    ops: RowOps,
    make: Callable[[KVTensors], AttentionBackend],
    make_decodes: MakeDecodes = lambda model, backend: None,
) -> list[torch.Tensor]:
    """Logits of each step, [sequences, vocab]: one prefill of all prompts, then the most likely tokens."""
    model = load_language_model(folder, dtype=torch.float32)
    assert model.fuse(ops)
    kv = KVTensors(model.kv_layout(BLOCK_SIZE), 24)
    kv._pools.fill_(float("nan"))
    backend = make(kv)
    runner = ModelRunner(model, backend, EmbedStore(), make_decodes(model, backend))
    texts = [list(prompt) for prompt in PROMPTS]
    starts, found = [0] * len(texts), list[torch.Tensor]()
    for _ in range(NUM_STEPS):
        chunks = []
        for index, (text, start) in enumerate(zip(texts, starts, strict=True)):
            positions = model.position_rule.positions(len(text), ()).slice(start, len(text))
            blocks = range(index * 8, index * 8 + 8)
            chunks.append(SequenceChunk(str(index), start, text[start:], positions, blocks, True))
        logits = runner.run(StepPlan(tuple(chunks))).clone()
        found.append(logits)
        for index, token in enumerate(logits.argmax(-1).tolist()):
            starts[index] = len(texts[index])
            texts[index].append(token)
    return found


@torch.no_grad()
def expected(folder: Path) -> list[torch.Tensor]:
    hf = load_hf_model(folder)
    texts, found = [list(prompt) for prompt in PROMPTS], list[torch.Tensor]()
    for _ in range(NUM_STEPS):
        logits = torch.cat([hf(input_ids=torch.tensor([text])).logits[:, -1] for text in texts])
        found.append(logits)
        for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token)
    return found


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            left, right, atol=1e-4, rtol=1e-4, msg=lambda text, step=step: f"step {step}: {text}"
        )


def test_fused_layers_equal_the_librarys(folder: Path) -> None:
    assert_close(run(folder, PlainRowOps(), SdpaBackend), expected(folder))


@interpreted
def test_triton_kernels_equal_the_librarys_layers(folder: Path) -> None:
    pytest.importorskip("triton")
    from deployments.lm_engine.kernels.row_ops import TritonRowOps
    from deployments.lm_engine.triton_attention import TritonBackend

    assert_close(run(folder, TritonRowOps(), TritonBackend), expected(folder))


@interpreted
def test_decode_steps_on_static_inputs_equal_the_librarys(folder: Path) -> None:
    """Three sequences in a pass for four: the padding row must neither store nor show."""
    pytest.importorskip("triton")
    from deployments.lm_engine.decode_graphs import DecodeGraphs
    from deployments.lm_engine.triton_attention import TritonBackend

    replayed: list[int] = []

    def make_decodes(model: LanguageModel, backend: AttentionBackend) -> DecodeReplay:
        assert isinstance(backend, TritonBackend)
        graphs = DecodeGraphs(model, backend, (1, 4), block_size=BLOCK_SIZE, max_blocks=8, capture=False)
        graphs.prepare()
        replay = graphs.run
        graphs.run = lambda chunks: replayed.append(len(chunks)) or replay(chunks)  # type: ignore[method-assign,func-returns-value]
        return graphs

    assert_close(run(folder, PlainRowOps(), TritonBackend, make_decodes), expected(folder))
    assert replayed == [3] * (NUM_STEPS - 1)


@interpreted
def test_the_check_at_start_accepts_the_kernels(folder: Path) -> None:
    pytest.importorskip("triton")
    from deployments.lm_engine.kernels.row_ops import TritonRowOps
    from deployments.lm_engine.triton_attention import TritonBackend

    model = load_language_model(folder, dtype=torch.float32)
    device = torch.device("cpu")
    check_attention(TritonBackend, model.kv_layout(16), model.num_heads, device)
    check_row_ops(TritonRowOps(), model.hidden_size, torch.float32, device)


def test_the_check_at_start_refuses_wrong_kernels(folder: Path) -> None:
    class Wrong(PlainRowOps):
        def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
            return super().gated_silu(gate_up) * 1.1

    with pytest.raises(RuntimeError, match="gated_silu differs"):
        check_row_ops(Wrong(), 64, torch.float32, torch.device("cpu"))


def test_a_cpu_takes_plain_torch(folder: Path) -> None:
    model, device = load_language_model(folder, dtype=torch.float32), torch.device("cpu")
    assert choose_attention("auto", model.kv_layout(16), model.num_heads, device) is SdpaBackend
    assert choose_row_ops(model.hidden_size, torch.float32, device) is None
    with pytest.raises(ValueError, match=r"'triton'.*cpu"):
        choose_attention("triton", model.kv_layout(16), model.num_heads, device)
