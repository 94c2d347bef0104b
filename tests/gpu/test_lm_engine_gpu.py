"""The LM engine's device side on a CUDA device: paged kernels, fused layers, decode graphs. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.build import capture_mixed, load_model
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.kernel_choice import choose_attention, choose_row_ops
from deployments.lm_engine.kv_tensors import KVLayout, KVTensors
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import SequenceChunk, StepPlan, pending_token
from tests.gpu.lm_steps import BLOCK_SIZE, BLOCKS_EACH, MODEL, QUESTIONS, forced_logits, make_rig
from tests.unit.lm_engine.mixed_steps import MixedSteps
from tests.unit.lm_engine.paged_cases import Case, Heads, largest_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHIPPED, SEVEN_B = Heads(4, 2, 64), Heads(28, 4, 128)
CASES = [
    Case(SHIPPED, lengths=(200, 1, 23, 129, 64), chunks=(0, 1, 1, 2, 40, 128)),
    Case(SHIPPED, lengths=(200, 1, 23, 129, 64), chunks=(1, 2, 40, 128), window=50, fused=True),
    Case(SEVEN_B, lengths=(1500, 300, 17), chunks=(1, 7, 500, 1000), fused=True, seed=1),
    Case(SEVEN_B, lengths=(1500, 300, 17), chunks=(1, 7, 500, 1000), fused=True, norms=True, seed=2),
    Case(SEVEN_B, lengths=(3000,), chunks=(1, 1400), window=1024, seed=3),
    Case(SEVEN_B, lengths=(40,) * 80, chunks=(1, 20), seed=4),
    Case(Heads(8, 8, 80), lengths=(300, 70), chunks=(1, 100, 150), block_size=3, seed=5),
    Case(Heads(7, 1, 96), lengths=(300, 70), chunks=(1, 100, 150), fused=True, seed=6),
    Case(Heads(16, 2, 256), lengths=(300, 70), chunks=(1, 100, 150), window=64, fused=True, seed=7),
]
BOUND = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 2e-5}
NUM_STEPS = 24


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_agree_with_float64_in_bfloat16(case: Case) -> None:
    from deployments.lm_engine.triton_attention import TritonBackend

    assert largest_error(case, TritonBackend, torch.bfloat16, "cuda") < BOUND[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_kernels_agree_with_float64_in_other_precisions(case: Case, dtype: torch.dtype) -> None:
    from deployments.lm_engine.triton_attention import TritonBackend

    assert largest_error(case, TritonBackend, dtype, "cuda") < BOUND[dtype]


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_sdpa_agrees_with_float64(case: Case) -> None:
    assert largest_error(case, SdpaBackend, torch.bfloat16, "cuda") < BOUND[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(4, 2, 64), (28, 4, 128)])
def test_kernels_are_chosen(dtype: torch.dtype, num_heads: int, kv_heads: int, head_dim: int) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype)
    device = torch.device("cuda")
    assert choose_attention("auto", layout, num_heads, device).name == "triton"  # type: ignore[attr-defined]
    ops = choose_row_ops(num_heads * head_dim, dtype, device)
    assert ops is not None
    assert ops.name == "triton"


@pytest.fixture(scope="module")
def exact() -> tuple[torch.Tensor, list[list[int]]]:
    """Logits and greedy tokens of the shipped model by plain torch in float32 on the CPU."""
    return forced_logits(make_rig("cpu", torch.float32), None, NUM_STEPS)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"fuse_layers": False}], ids=str)
def test_float32_equals_the_cpu(exact: tuple[torch.Tensor, list[list[int]]], options: dict[str, bool]) -> None:
    expected, tokens = exact
    logits, _ = forced_logits(make_rig("cuda", torch.float32, **options), tokens, NUM_STEPS)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    assert agreement(logits, expected, gap=1e-2) == 1


@pytest.mark.parametrize("options", [{}, {"attention_backend": "sdpa"}], ids=str)
def test_bfloat16_chooses_the_cpus_tokens(exact: tuple[torch.Tensor, list[list[int]]], options: dict[str, str]) -> None:
    expected, tokens = exact
    logits, _ = forced_logits(make_rig("cuda", torch.bfloat16, **options), tokens, NUM_STEPS)
    assert torch.isfinite(logits).all()
    assert agreement(logits, expected, gap=0.5) >= 0.99


def agreement(logits: torch.Tensor, expected: torch.Tensor, gap: float) -> float:
    """Share of equal most likely tokens, where the expected one leads the next by more than rounding can turn."""
    best, second = expected.topk(2).values.unbind(-1)
    clear = best - second > gap
    assert clear.float().mean() > 0.3, "too few clear choices to tell"
    return float((logits.argmax(-1) == expected.argmax(-1))[clear].float().mean())


def test_replays_equal_the_call_on_the_same_inputs() -> None:
    from deployments.lm_engine.decode_graphs import DecodeGraphs

    rig = make_rig("cuda", torch.bfloat16)
    assert isinstance(rig.decodes, DecodeGraphs)
    assert rig.decodes.sizes == (1, 2, 4, 8)
    forced_logits(rig, None, 2)  # a prompt for each sequence
    lengths = [40, 41, 42, 43, 44]
    for num in (1, 2, 3, 5, 4, 1):
        chunks = [
            SequenceChunk(
                str(index), lengths[index], [100 + index], rig.model.position_rule.positions(50, ()).slice(40, 41),
                range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH), index != 1,
            )
            for index in range(num)
        ]  # fmt: skip
        replayed = rig.decodes.run(chunks).clone()
        size = next(size for size in rig.decodes.sizes if size >= num)
        with torch.inference_mode():
            called = rig.decodes._forward(size)[[row for row in range(num) if row != 1]]
        assert torch.isfinite(replayed).all()
        assert torch.equal(replayed, called)
    assert len(QUESTIONS) == len(lengths)


def test_mixed_replays_equal_the_eager_pass() -> None:
    """Random steps, on a pool of NaN: replays equal the same pass called, and the eager one but for rounding."""
    from deployments.lm_engine.mixed_graphs import MixedGraphs

    config = EngineConfig(model=str(MODEL), device="cuda", max_num_seqs=8)
    model = load_model(config, MODEL, torch.bfloat16, torch.device("cuda"))
    layout = model.kv_layout(BLOCK_SIZE)
    make = choose_attention("triton", layout, model.num_heads, torch.device("cuda"))
    pools = [KVTensors(layout, BLOCKS_EACH * 6, "cuda") for _ in range(2)]
    for pool in pools:
        pool._pools.fill_(float("nan"))
    backends = [make(pool) for pool in pools]
    mixed = capture_mixed(config, model, backends[1], BLOCKS_EACH * BLOCK_SIZE)
    assert isinstance(mixed, MixedGraphs)
    runners = [
        ModelRunner(model, backends[0], EmbedStore()),
        ModelRunner(model, backends[1], EmbedStore(), None, mixed),
    ]
    steps = MixedSteps(
        model, block_size=BLOCK_SIZE, blocks_each=BLOCKS_EACH, num_sequences=6, longest=180, with_pictures=True
    )
    for runner in runners:
        for identity, rows in steps.embeddings().items():
            runner.put_embedding(identity, rows)
    num_replayed = 0
    for plan in steps.plans(24):
        num_replayed += mixed.fits(plan.chunks)
        expected, replayed = (runner.run(plan) for runner in runners)
        assert torch.isfinite(replayed).all()
        if replayed.numel() and mixed.fits(plan.chunks):
            assert torch.cosine_similarity(replayed, expected, dim=-1).min() > 0.999
            num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
            size = mixed._size_for(num_tokens)
            recorded = mixed._replays[size]().clone()
            with torch.inference_mode():
                called = mixed._forward(size)
            assert torch.equal(recorded[:num_tokens], called[:num_tokens])
    assert num_replayed >= 12


def test_pending_tokens_are_those_the_device_drew() -> None:
    """A decode step fed with tokens that only the device knows equals one fed with the tokens themselves."""
    rig = make_rig("cuda", torch.bfloat16)
    forced_logits(rig, None, 2)
    drawn = torch.tensor([100, 200, 300], device="cuda")
    logits = []
    for tokens in ([100, 300], [pending_token(0), pending_token(2)]):
        chunks = tuple(
            SequenceChunk(
                str(index), 40, [token], rig.model.position_rule.positions(50, ()).slice(40, 41),
                range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH), True,
            )
            for index, token in enumerate(tokens)
        )  # fmt: skip
        logits.append(rig.runner.run(StepPlan(chunks), drawn).clone())
    assert torch.equal(*logits)
