"""A language model spread over ranks says what it says on one device, and what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deployments.lm_engine.fused_layers import PlainRowOps, RowOps
from tests.parity.conftest import MakeVlm
from tests.parity.rig import Clip, Picture, Prompt, Rig, TinyVlm
from tests.tiny_models import FAMILIES, Family
from tests.unit.lm_engine.tensor_parallel.gangs import gang_of, side_of

families = pytest.mark.parametrize("family", FAMILIES)
LAYERS = {"library": None, "fused": PlainRowOps()}
layers = pytest.mark.parametrize("ops", LAYERS.values(), ids=LAYERS.keys())
TOLERANCE = 1e-5
"""Of logits; sums of two ranks are rounded in another order."""


@contextmanager
def parallel_rig(vlm: TinyVlm, size: int, ops: RowOps | None, **options: Any) -> Iterator[Rig]:
    """A rig whose steps run on a gang."""
    rig = Rig(vlm, **options)
    config = rig.scheduler_config
    with gang_of(
        size, side_of(vlm.folder, num_blocks=config.num_blocks, block_size=config.block_size, ops=ops)
    ) as gang:
        rig.runner = gang.runner(rig.store, max_tables=3)  # fewer than sequences: tables are forgotten and sent again
        rig.engine = rig.make_engine(rig.encodes)
        yield rig
        assert not gang.faults


def prompts_of(vlm: TinyVlm) -> dict[str, Prompt]:
    return {
        "text": vlm.prompt("The quick brown fox jumps over the lazy dog."),
        "one": vlm.prompt("What is in ", Picture(1, 8, 4), " the picture?"),
        "two": vlm.prompt(Picture(2), "and", Picture(1, 8, 4), " Compare."),
        "short": vlm.prompt("red"),
    }


def assert_same(rig: Rig, alone: Rig, prompts: dict[str, Prompt], num_tokens: int) -> None:
    for name, prompt in prompts.items():
        tokens, logits = rig.vlm.expected(prompt, num_tokens)
        assert rig.result(name).error is None
        assert list(rig.result(name).token_ids) == tokens == list(alone.result(name).token_ids), name
        for expected in (logits, alone.logits(name)):
            assert (rig.logits(name) - expected).abs().max() <= TOLERANCE * logits.abs().max(), name


@families
@layers
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 7, "async_scheduling": True},
    ],
    ids=str,
)
def test_answers_equal_one_devices_and_transformers(
    make_vlm: MakeVlm, family: Family, ops: RowOps | None, options: dict[str, Any]
) -> None:
    vlm = make_vlm(family)
    prompts = prompts_of(vlm)
    options = options | {"delay_steps": 1}
    alone = Rig(vlm, **options)
    with parallel_rig(vlm, 2, ops, **options) as rig:
        for each in (alone, rig):
            for name, prompt in prompts.items():
                each.add(name, prompt, num_tokens=12)
            each.run()
        assert_same(rig, alone, prompts, 12)


@layers
def test_more_ranks_than_kv_heads(make_vlm: MakeVlm, ops: RowOps | None) -> None:
    vlm = make_vlm("qwen3_vl")
    prompts, alone = prompts_of(vlm), Rig(vlm)
    with parallel_rig(vlm, 4, ops) as rig:
        for each in (alone, rig):
            for name, prompt in prompts.items():
                each.add(name, prompt)
            each.run()
        assert_same(rig, alone, prompts, 8)


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"sliding_window": 6}], ids=str)
@layers
def test_tied_heads_and_windows(make_vlm: MakeVlm, ops: RowOps | None, options: dict[str, Any]) -> None:
    vlm = make_vlm("qwen2_5_vl", **options)
    prompts, alone = prompts_of(vlm), Rig(vlm)
    with parallel_rig(vlm, 2, ops) as rig:
        for each in (alone, rig):
            for name, prompt in prompts.items():
                each.add(name, prompt)
            each.run()
        for name in prompts:
            assert rig.result(name).token_ids == alone.result(name).token_ids
            assert (rig.logits(name) - alone.logits(name)).abs().max() <= TOLERANCE * alone.logits(name).abs().max()


def test_a_video_and_its_deeper_levels(make_vlm: MakeVlm) -> None:
    vlm = make_vlm("qwen3_vl")
    prompts = {"video": vlm.prompt("See ", Clip((Picture(6, 4, 8), Picture(7, 4, 8))), " What happens?")}
    alone = Rig(vlm, max_num_batched_tokens=9)
    with parallel_rig(vlm, 2, PlainRowOps(), max_num_batched_tokens=9) as rig:
        for each in (alone, rig):
            each.add("video", prompts["video"])
            each.run()
        assert_same(rig, alone, prompts, 8)


@families
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prefix_hits_and_preemption(make_vlm: MakeVlm, family: Family, async_scheduling: bool) -> None:
    """A pool too small for all at once, and repeats that find their blocks: what the ranks keep must follow."""
    vlm = make_vlm(family)
    prompts = prompts_of(vlm)
    options = {"num_gpu_blocks_override": 16, "async_scheduling": async_scheduling}
    with parallel_rig(vlm, 2, PlainRowOps(), **options) as rig:
        for turn in ("cold", "warm"):
            for name, prompt in prompts.items():
                rig.add(f"{turn}-{name}", prompt, num_tokens=16)
            rig.run()
        stats = rig.engine.stats()
        assert stats.scheduler.preemptions > 0
        assert stats.prompt_tokens_cached > 0
        for turn in ("cold", "warm"):
            for name, prompt in prompts.items():
                rig.assert_equals_generate(f"{turn}-{name}", prompt, num_tokens=16)


def test_a_step_that_lacks_an_embedding_harms_no_other(make_vlm: MakeVlm) -> None:
    vlm = make_vlm("qwen2_5_vl")
    prompts = prompts_of(vlm)
    with parallel_rig(vlm, 2, PlainRowOps()) as rig:
        rig.add("one", prompts["one"])
        rig.step()
        rig.encodes.deliver(rig)
        rig.store.clear()  # behind the scheduler's back
        rig.run()
        assert rig.result("one").error is not None
        rig.add("text", prompts["text"])
        rig.run()
        rig.assert_equals_generate("text", prompts["text"])
