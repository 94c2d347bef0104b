from __future__ import annotations

import pytest
import torch

from cache_service.identity import EmbeddingIdentity
from deployments.errors import InternalError
from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import EmbedSlice, SequenceChunk, StepPlan
from tests.parity.conftest import MakeVlm, make_vlm  # noqa: F401 - a fixture
from tests.parity.rig import TinyVlm

A, B = EmbeddingIdentity(b"a"), EmbeddingIdentity(b"b")


@pytest.fixture
def vlm(make_vlm: MakeVlm) -> TinyVlm:  # noqa: F811
    return make_vlm("qwen2_5_vl")


@pytest.fixture
def runner(vlm: TinyVlm) -> ModelRunner:
    kv = KVTensors(vlm.lm.kv_layout(4), 16)
    return ModelRunner(vlm.lm, SdpaBackend(kv), EmbedStore())


def chunk(
    vlm: TinyVlm,
    name: str,
    ids: list[int],
    blocks: list[int],
    embeds: tuple[EmbedSlice, ...] = (),
    samples: bool = True,
) -> SequenceChunk:
    positions = vlm.lm.position_rule.positions(len(ids), []).slice(0, len(ids))
    return SequenceChunk(name, 0, ids, positions, blocks, samples, embeds)


def test_logits_only_of_chunks_that_sample_in_the_plans_order(vlm: TinyVlm, runner: ModelRunner) -> None:
    a, b, c = ([20, 21, 22], [30, 31], [40])
    with torch.no_grad():
        alone = [vlm.hf(input_ids=torch.tensor([ids])).logits[0, -1:] for ids in (a, c)]
    plan = StepPlan((chunk(vlm, "a", a, [0]), chunk(vlm, "b", b, [1], samples=False), chunk(vlm, "c", c, [2])))
    logits = runner.run(plan)
    assert logits.shape == (2, vlm.lm.vocab_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_rows_are_spliced_exactly_where_the_plan_says(vlm: TinyVlm, runner: ModelRunner) -> None:
    """Splicing a token's own embedding in the place of another token gives that token's logits."""
    ids = [20, 21, 22, 23]
    expected = runner.run(StepPlan((chunk(vlm, "x", ids, [0]),)))
    rows = vlm.lm.embed_tokens(torch.tensor([99, 21, 22, 99])).detach()
    runner.put_embedding(A, rows)
    spliced = chunk(vlm, "x", [20, 7, 8, 23], [1], (EmbedSlice(A, 1, 1, 2),))
    torch.testing.assert_close(runner.run(StepPlan((spliced,))), expected)


def test_evicted_embeddings_are_dropped_even_without_chunks(runner: ModelRunner) -> None:
    runner.put_embedding(A, torch.zeros(2, runner.embed_width))
    assert runner.embed_bytes > 0
    assert runner.run(StepPlan(evicted_embeds=(A,))).shape[0] == 0
    assert runner.embed_bytes == 0


@pytest.mark.parametrize("piece", [EmbedSlice(B, 0, 0, 1), EmbedSlice(A, 0, 1, 2)])
def test_rows_that_are_not_there_are_a_fault(vlm: TinyVlm, runner: ModelRunner, piece: EmbedSlice) -> None:
    runner.put_embedding(A, torch.zeros(2, runner.embed_width))
    with pytest.raises(InternalError, match="resident"):
        runner.run(StepPlan((chunk(vlm, "x", [20, 21], [0], (piece,)),)))
