"""A language model over two GPUs: NCCL between real processes, fused layers and decode graphs. Skipped without them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from deployments.errors import ReplicaLostError
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.plan import SequenceChunk, StepPlan, pending_token
from deployments.lm_engine.sampler import SamplingState
from deployments.lm_engine.tensor_parallel.leader import CheckedSampler
from deployments.messages import SamplingParams
from tests.gpu.lm_steps import BLOCK_SIZE, BLOCKS_EACH, MODEL, QUESTIONS, Rig, forced_logits, make_rig
from tests.gpu.ranks import device_sides, runner_of
from tests.gpu.test_lm_engine_gpu import agreement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NUM_STEPS = 16
NOTICED_S = 20.0
"""Within which a rank that is gone must be noticed."""
Answers = tuple[torch.Tensor, list[list[int]]]


def options_of(dtype: str, **options: object) -> EngineConfig:
    return EngineConfig(
        model=str(MODEL),
        device="cuda",
        dtype=dtype,  # type: ignore[arg-type]
        tensor_parallel_size=2,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=BLOCKS_EACH * len(QUESTIONS),
        max_model_len=BLOCKS_EACH * BLOCK_SIZE,
        max_num_seqs=8,
        **options,  # type: ignore[arg-type]
    )


@contextmanager
def gang(config: EngineConfig) -> Iterator[Rig]:
    with device_sides(config, MODEL) as (side, leader, _):
        yield Rig(side.model, runner_of(side, leader), side.decodes)


@pytest.fixture(scope="module")
def exact() -> Answers:
    """Logits and greedy tokens of the shipped model by plain torch in float32 on the CPU."""
    return forced_logits(make_rig("cpu", torch.float32), None, NUM_STEPS)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"fuse_layers": False}], ids=str)
def test_float32_equals_the_cpu_with_graphs_and_without(exact: Answers, options: dict[str, bool]) -> None:
    expected, tokens = exact
    with gang(options_of("float32", **options)) as rig:
        assert (rig.decodes is None) == bool(options.get("enforce_eager"))
        logits, _ = forced_logits(rig, tokens, NUM_STEPS)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    assert agreement(logits, expected, gap=1e-2) == 1


def test_bfloat16_is_as_exact_as_on_one_device(exact: Answers) -> None:
    expected, tokens = exact
    alone, _ = forced_logits(make_rig("cuda", torch.bfloat16), tokens, NUM_STEPS)
    with gang(options_of("bfloat16")) as rig:
        logits, _ = forced_logits(rig, tokens, NUM_STEPS)
    assert agreement(logits, expected, gap=0.5) >= 0.99
    assert (logits - expected).square().mean() <= 2 * (alone - expected).square().mean()


def test_eight_bits(exact: Answers) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs CUDA capability 8.9")
    expected, tokens = exact
    with gang(options_of("bfloat16", quantization="fp8")) as rig:
        logits, _ = forced_logits(rig, tokens, NUM_STEPS)
    assert agreement(logits, expected, gap=1.0) >= 0.95


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_tokens_that_only_rank_0s_device_knows_reach_the_others(options: dict[str, bool]) -> None:
    """Steps queued on both devices without waiting, as overlapped scheduling does."""
    with gang(options_of("float32", **options)) as rig:
        forced_logits(rig, None, 1)

        def steps(*, known: bool) -> list[torch.Tensor]:
            previous, found = torch.tensor([100, 200], device="cuda"), list[torch.Tensor]()
            for start in range(60, 66):
                ids = previous.tolist() if known else [pending_token(0), pending_token(1)]
                positions = rig.model.position_rule.positions(start + 1, ()).slice(start, start + 1)
                plan = StepPlan(
                    tuple(
                        SequenceChunk(
                            f"{index}", start, [token], positions, list(range(6 * index, 6 * index + 6)), True
                        )
                        for index, token in enumerate(ids)
                    )
                )
                logits = rig.runner.run(plan, None if known else previous)
                previous = logits.argmax(-1)
                found.append(logits.clone())
            return found

        for pending, known in zip(steps(known=False), steps(known=True), strict=True):
            assert torch.equal(pending, known)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_a_killed_rank_is_noticed_and_its_steps_tokens_are_not_believed(options: dict[str, bool]) -> None:
    state = SamplingState(SamplingParams(max_tokens=1, temperature=0.0), ())
    with device_sides(options_of("bfloat16", **options), MODEL) as (side, leader, (worker,)):
        assert leader is not None
        runner = runner_of(side, leader)
        sampler = CheckedSampler(leader=leader, device="cuda")
        positions = side.model.position_rule.positions(41, ()).slice(40, 41)
        plan = StepPlan((SequenceChunk("s", 40, [100], positions, range(BLOCKS_EACH), True),))

        def run_steps(for_s: float) -> None:
            deadline_s = time.monotonic() + for_s
            while time.monotonic() < deadline_s:
                sampler.sample([state], runner.run(plan))

        run_steps(0.5)
        worker.kill()
        with pytest.raises((ReplicaLostError, RuntimeError)):  # the device may miss the rank's memory first
            run_steps(NOTICED_S)
        time.sleep(1.0)
        with pytest.raises(ReplicaLostError, match="a rank of the language model is lost: rank 1 ended"):
            runner.run(plan)
