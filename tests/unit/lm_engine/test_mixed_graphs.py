"""Mixed steps on static, padded inputs against the eager pass; under Triton's interpreter, without recording."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.fused_layers import PlainRowOps
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.model_runner import MixedReplay, ModelRunner
from tests.tiny_models import Family, save_tiny_model
from tests.unit.lm_engine.mixed_steps import MixedSteps

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

BLOCK_SIZE, BLOCKS_EACH, NUM_SEQUENCES = 4, 16, 5


def make_model(folder: Path) -> LanguageModel:
    model = load_language_model(folder, dtype=torch.float32)
    assert model.fuse(PlainRowOps())
    return model


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_static_inputs_give_what_the_eager_pass_gives(tmp_path: Path, family: Family) -> None:
    pytest.importorskip("triton")
    from deployments.lm_engine.mixed_graphs import MixedGraphs
    from deployments.lm_engine.triton_attention import TritonBackend

    model = make_model(save_tiny_model(tmp_path, family, seed=1))
    layout = model.kv_layout(BLOCK_SIZE)
    steps = MixedSteps(model, block_size=BLOCK_SIZE, blocks_each=BLOCKS_EACH, num_sequences=NUM_SEQUENCES)
    pools = [KVTensors(layout, BLOCKS_EACH * NUM_SEQUENCES) for _ in range(2)]
    for pool in pools:
        pool._pools.fill_(float("nan"))
    backend = TritonBackend(pools[1])
    mixed = MixedGraphs(model, backend, (8, 16, 48), block_size=BLOCK_SIZE, max_blocks=BLOCKS_EACH, capture=False)
    mixed.prepare()
    counted = Counted(mixed)
    runners = [
        ModelRunner(model, SdpaBackend(pools[0]), EmbedStore()),
        ModelRunner(model, backend, EmbedStore(), None, counted),
    ]
    for runner in runners:
        for identity, rows in steps.embeddings().items():
            runner.put_embedding(identity, rows)
    for plan in steps.plans(12):
        expected, replayed = (runner.run(plan) for runner in runners)
        torch.testing.assert_close(replayed, expected, atol=1e-4, rtol=1e-4)
    assert counted.num_runs >= 4


class Counted:
    def __init__(self, mixed: MixedReplay) -> None:
        self._mixed, self.num_runs = mixed, 0

    def fits(self, chunks: object) -> bool:
        return self._mixed.fits(chunks)  # type: ignore[arg-type]

    def run(self, chunks: object, hidden: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        return self._mixed.run(chunks, hidden)  # type: ignore[arg-type]
