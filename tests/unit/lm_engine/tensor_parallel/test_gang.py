"""Ranks together: what rank 0 does the others do, and a gang that loses one ends in bounded time with a clear error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread, Timer
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cache_service.identity import EmbeddingIdentity, EncoderFingerprint
from deployments.errors import InternalError, ReplicaLostError
from deployments.lm_engine.build import DeviceSide, build_device_side, build_engine
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.fused_layers import PlainRowOps
from deployments.lm_engine.plan import EmbedSlice, SequenceChunk, StepPlan, pending_token
from deployments.lm_engine.sampler import SamplingState
from deployments.lm_engine.tensor_parallel.group import TensorParallelGroup
from deployments.lm_engine.tensor_parallel.leader import CheckedSampler, Gathering, Leader, LeaderRunner
from deployments.lm_engine.tensor_parallel.worker import run_rank
from deployments.messages import GenerateRequest, SamplingParams
from tests.tiny_models import load_hf_model, save_tiny_model
from tests.unit.lm_engine.tensor_parallel.gangs import CPU, Gang, gang_of, side_of

A, B = EmbeddingIdentity(b"a"), EmbeddingIdentity(b"b")
NOTICED_S = 20.0
"""Within which a rank that is gone must be noticed."""
COLLECTIVE_S = 8.0
"""Longest wait for a rank that is frozen."""
processes = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen2_5_vl", seed=1)


def step(ids: Sequence[int], embeds: tuple[EmbedSlice, ...] = (), axes: int = 3) -> StepPlan:
    positions = torch.arange(len(ids), dtype=torch.int32).expand(axes, -1).numpy()
    return StepPlan((SequenceChunk("s", 0, list(ids), positions, [0, 1, 2], True, embeds),))


# -- what rank 0 does the others do ----------------------------------------------------------------------------------
@pytest.mark.parametrize("ops", [None, PlainRowOps()], ids=["library", "fused"])
def test_biases_and_a_vocabulary_that_does_not_divide(tmp_path: Path, ops: PlainRowOps | None) -> None:
    config = LlamaConfig(
        vocab_size=63, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    hf = LlamaForCausalLM(config).eval()
    for name, parameter in hf.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    hf.save_pretrained(tmp_path)
    ids = [5, 40, 3, 62, 11]
    with torch.no_grad():
        expected = hf(input_ids=torch.tensor([ids])).logits[0, -1:]
    with gang_of(2, side_of(tmp_path, num_blocks=4, ops=ops)) as gang:
        logits = gang.runner().run(step(ids, axes=1))
        assert logits.shape == (1, 63)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_embeddings_come_and_go_on_every_rank(folder: Path) -> None:
    """Rows that only one rank had would show in the sums, and rows that one rank kept in its memory."""
    sides: list[DeviceSide] = []
    make = side_of(folder, num_blocks=4)

    def recording(group: TensorParallelGroup) -> DeviceSide:
        sides.append(make(group))
        return sides[-1]

    hf = load_hf_model(folder)
    ids = [20, 21, 22, 23]
    with torch.no_grad():
        expected = hf(input_ids=torch.tensor([ids])).logits[0, -1:]
    with gang_of(2, recording) as gang:
        runner = gang.runner()
        rows = gang.side.model.embed_tokens(torch.tensor([99, 21, 22, 99])).detach()
        runner.put_embedding(A, rows)
        spliced = step([20, 7, 8, 23], (EmbedSlice(A, 1, 1, 2),))
        torch.testing.assert_close(runner.run(spliced), expected, atol=1e-5, rtol=1e-5)
        runner.put_embedding(B, rows)
        runner.drop_embeddings((A,))
        assert not runner.has_embedding(A)
        assert runner.has_embedding(B)
        with pytest.raises(InternalError, match="not resident"):
            runner.run(spliced)
        assert runner.run(StepPlan(evicted_embeds=(B,))).shape[0] == 0
        assert not runner.has_embedding(B)
        runner.put_embedding(A, rows)
        runner.clear_embeddings()
        assert runner.embed_bytes == 0
        torch.testing.assert_close(runner.run(step(ids)), expected, atol=1e-5, rtol=1e-5)
        assert not gang.faults
    assert len(sides) == 2


def test_tokens_that_only_rank_0s_device_knows_reach_every_rank(folder: Path) -> None:
    """Another embedding on one rank would show in the sums."""
    with gang_of(2, side_of(folder, num_blocks=4, ops=PlainRowOps())) as gang:
        runner = gang.runner()
        drawn = runner.run(step([20, 21, 22])).argmax(-1)

        def next_step(token_id: int) -> StepPlan:
            positions = gang.side.model.position_rule.positions(4, ()).slice(3, 4)
            return StepPlan((SequenceChunk("s", 3, [token_id], positions, [0, 1, 2], True),))

        expected = runner.run(next_step(int(drawn)))
        others = torch.tensor([7, 8])
        logits = runner.run(next_step(pending_token(2)), torch.cat([others, drawn]))
        assert torch.equal(logits, expected)
        assert not torch.equal(runner.run(next_step(pending_token(0)), torch.cat([others, drawn])), expected)
        with pytest.raises(InternalError, match="drew none"):
            runner.run(next_step(pending_token(0)))
        assert torch.equal(runner.run(next_step(int(drawn))), expected)
        assert not gang.faults


def test_ranks_agree_on_the_smallest_pool(folder: Path) -> None:
    found: list[int] = []

    def make(group: TensorParallelGroup) -> DeviceSide:
        found.append(group.minimum(100 - 10 * group.rank))
        return side_of(folder, num_blocks=4)(group)

    with gang_of(4, make):
        pass
    assert found == [70] * 4


# -- a rank is lost --------------------------------------------------------------------------------------------------
def assert_lost(gang: Gang, runner: LeaderRunner, words: str) -> None:
    """The gang is over for good, and says why."""
    for call in (
        lambda: runner.run(step([1, 2])),
        lambda: runner.put_embedding(A, torch.zeros(2, runner.embed_width)),
        gang.leader.check,
    ):
        with pytest.raises(ReplicaLostError, match=words):
            call()


def test_a_rank_that_fails_ends_the_gang_with_its_reason(folder: Path) -> None:
    good = side_of(folder, num_blocks=4)

    def bad(group: TensorParallelGroup) -> DeviceSide:
        side = good(group)

        def fail(*args: object, **kwargs: object) -> None:
            raise MemoryError("no room on this rank")

        side.model.model.layers[1].mlp.register_forward_pre_hook(fail)  # type: ignore[index,union-attr]
        return side

    with gang_of(2, good, worker_side=bad) as gang:
        runner = gang.runner()
        begin_s = time.monotonic()
        with pytest.raises(ReplicaLostError):
            runner.run(step([1, 2, 3]))
        assert time.monotonic() - begin_s < NOTICED_S
        assert_lost(gang, runner, "a rank of the language model is lost: rank 1 ended: MemoryError.'no room on this ra")
    assert isinstance(gang.faults[0], MemoryError)


def test_a_fault_of_rank_0_in_a_step_ends_the_gang(folder: Path) -> None:
    with gang_of(2, side_of(folder, num_blocks=4)) as gang:
        runner = gang.runner()

        def fail(*args: object, **kwargs: object) -> None:
            raise MemoryError("no room here")

        gang.side.model.model.layers[1].mlp.register_forward_pre_hook(fail)  # type: ignore[index,union-attr]
        with pytest.raises(ReplicaLostError, match=r"rank 0 could not end a step: MemoryError.'no room here'"):
            runner.run(step([1, 2, 3]))
        assert_lost(gang, runner, "rank 0 could not end a step")


def test_tokens_of_a_step_in_which_a_rank_was_lost_are_not_believed(folder: Path) -> None:
    with gang_of(2, side_of(folder, num_blocks=4)) as gang:
        sampler = CheckedSampler(leader=gang.leader)
        logits = gang.runner().run(step([1, 2, 3]))
        states = [SamplingState(SamplingParams(max_tokens=1, temperature=0.0), ())]
        assert sampler.sample(states, logits)[0].token_id == int(logits.argmax())  # type: ignore[union-attr]
        gang.leader.lose("the test says so")
        with pytest.raises(ReplicaLostError, match="the test says so"):
            sampler.sample(states, logits)


def test_a_rank_that_cannot_start_is_named(folder: Path) -> None:
    good = side_of(folder, num_blocks=4)

    def with_agreement(group: TensorParallelGroup) -> DeviceSide:
        side = good(group)
        group.minimum(1)
        return side

    def bad(group: TensorParallelGroup) -> DeviceSide:
        raise FileNotFoundError("this machine has no such folder")

    with (
        pytest.raises(ReplicaLostError, match=r"rank 1 ended at start: FileNotFoundError.'this machine has no such"),
        gang_of(2, with_agreement, worker_side=bad),
    ):
        raise AssertionError("the gang must not start")


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(ReplicaLostError, match=r"did not come together: ranks \[1, 2\] have not come within 0.2 s"):
        Gathering(3).join(CPU, join_timeout_s=0.2)


# -- the whole engine ------------------------------------------------------------------------------------------------
async def tokens_of(config: EngineConfig, folder: Path, leader: Leader | None = None) -> list[int]:
    """A greedy answer of the engine that `build_engine` makes."""
    engine = build_engine(
        config, folder, encoder=cast(Any, None), store=cast(Any, None), max_item_slots=16, max_item_patches=64,
        fingerprint=EncoderFingerprint(model_id="m", weights_revision="1", dtype="float32"), leader=leader,
    )  # fmt: skip
    engine.start()
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    await engine.submit(GenerateRequest(request_id="r", prompt_token_ids=(20, 21, 22, 23), sampling=params))
    tokens = [token async for batch in engine.stream("r") for delta in batch for token in delta.token_ids]
    await engine.close()
    return tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_the_built_engine_answers_alike_on_one_device_and_on_two(folder: Path, async_scheduling: bool) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 8, "max_model_len": 64, "async_scheduling": async_scheduling}
    alone = await tokens_of(EngineConfig(model=str(folder), device="cpu", **options), folder)
    config = EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=2, **options)
    gathering = Gathering(2)
    worker = Thread(target=run_rank, args=(gathering.address, 1, config, folder))
    worker.start()
    leader = gathering.join(CPU)
    assert await tokens_of(config, folder, leader) == alone
    leader.close()
    worker.join(NOTICED_S)
    assert not worker.is_alive()
    assert len(alone) == 12


# -- real processes --------------------------------------------------------------------------------------------------
@contextmanager
def process_gang(folder: Path) -> Iterator[tuple[Leader, DeviceSide, BaseProcess]]:
    """Two ranks as the server builds them, rank 1 in a process of its own."""
    config = EngineConfig(
        model=str(folder), device="cpu", tensor_parallel_size=2, num_gpu_blocks_override=8, block_size=4,
        max_model_len=64, max_num_seqs=2,
    )  # fmt: skip
    gathering = Gathering(2)
    worker = multiprocessing.get_context("spawn").Process(
        target=run_rank, args=(gathering.address, 1, config, folder, COLLECTIVE_S)
    )
    worker.start()
    leader = gathering.join(CPU, join_timeout_s=60, timeout_s=COLLECTIVE_S)
    try:
        side = build_device_side(config, folder, leader.group)
        leader.start()
        yield leader, side, worker
    finally:
        leader.close()
        worker.join(NOTICED_S)
        worker.kill()
        worker.join()


def runner_of(leader: Leader, side: DeviceSide) -> LeaderRunner:
    return LeaderRunner(side.model, side.backend, EmbedStore(), leader=leader, max_tables=4)


@processes
def test_processes_answer_and_end_with_rank_0(folder: Path) -> None:
    hf = load_hf_model(folder)
    ids = [20, 21, 22, 23]
    with torch.no_grad():
        expected = hf(input_ids=torch.tensor([ids])).logits[0, -1:]
    with process_gang(folder) as (leader, side, worker):
        logits = runner_of(leader, side).run(step(ids))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        leader.close()
        worker.join(NOTICED_S)
        assert worker.exitcode == 0


def until_lost(call: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + NOTICED_S
    while time.monotonic() < deadline_s:
        call()
        time.sleep(0.01)


@processes
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "in a step"])
def test_a_killed_process_is_noticed_at_once(folder: Path, is_idle: bool) -> None:
    with process_gang(folder) as (leader, side, worker):
        runner = runner_of(leader, side)
        runner.run(step([1, 2, 3]))
        assert worker.pid is not None
        if is_idle:
            os.kill(worker.pid, signal.SIGKILL)
        else:
            os.kill(worker.pid, signal.SIGSTOP)  # so that rank 0 waits for it, in the middle of its step
            Timer(0.5, os.kill, (worker.pid, signal.SIGKILL)).start()
        with pytest.raises(ReplicaLostError, match="a rank of the language model is lost"):
            until_lost(leader.check if is_idle else lambda: runner.run(step([1, 2, 3])))
        with pytest.raises(ReplicaLostError, match="a rank of the language model is lost"):
            runner.run(step([1, 2, 3]))


@processes
def test_a_frozen_process_costs_one_time_out(folder: Path) -> None:
    with process_gang(folder) as (leader, side, worker):
        runner = runner_of(leader, side)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        with pytest.raises(ReplicaLostError, match="rank 0 could not end a step"):
            runner.run(step([1, 2, 3]))
        assert time.monotonic() - begin_s < COLLECTIVE_S + NOTICED_S
        os.kill(worker.pid, signal.SIGKILL)
