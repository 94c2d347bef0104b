"""Against transformers' generate(): logits within 1e-4 and the same greedy tokens, however the engine schedules."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.parity.conftest import MakeVlm
from tests.parity.rig import Clip, Picture, Prompt, Rig, TinyVlm
from tests.tiny_models import FAMILIES, Family, load_hf_model

DEMO_MODEL = Path(__file__).parents[2] / "serve_configs" / "demo_model"

families = pytest.mark.parametrize("family", FAMILIES)


overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["step by step", "overlapped"])


def mixed_prompts(vlm: TinyVlm) -> dict[str, Prompt]:
    """Text only, one picture, several of different sizes, a picture first, the same picture twice."""
    return {
        "text": vlm.prompt("The quick brown fox jumps over"),
        "one": vlm.prompt("See ", Picture(1), " What is in the picture?"),
        "two": vlm.prompt("Compare ", Picture(2, 6, 4), " with ", Picture(3, 8, 8), " Which?"),
        "first": vlm.prompt(Picture(4, 2, 2), "blue"),
        "twice": vlm.prompt(Picture(1), " and ", Picture(1), " same?"),
        "tall": vlm.prompt("a", Picture(5, 16, 2), "b"),
        "short": vlm.prompt("hi"),
    }


@overlaps
@families
@pytest.mark.parametrize("max_num_batched_tokens", [256, 16, 7, 3, 1])
def test_mixed_batch_with_chunks_that_cut_inside_pictures(
    make_vlm: MakeVlm, family: Family, max_num_batched_tokens: int, overlap: bool
) -> None:
    vlm = make_vlm(family)
    prompts = mixed_prompts(vlm)
    rig = Rig(vlm, max_num_batched_tokens=max_num_batched_tokens, delay_steps=2, async_scheduling=overlap)
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt)


@pytest.mark.parametrize("max_num_batched_tokens", [256, 7, 1])
def test_a_video_whose_steps_stand_apart_beside_a_picture(make_vlm: MakeVlm, max_num_batched_tokens: int) -> None:
    vlm = make_vlm("qwen3_vl")
    clip = Clip((Picture(6, 4, 8), Picture(7, 4, 8), Picture(8, 4, 8)))
    prompts = {
        "video": vlm.prompt("See ", clip, " What happens?"),
        "both": vlm.prompt(Picture(1), "and", clip, " Compare."),
    }
    rig = Rig(vlm, max_num_batched_tokens=max_num_batched_tokens, delay_steps=1)
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt)


@families
def test_a_long_answer_decodes_across_many_blocks(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    prompts = mixed_prompts(vlm)
    rig = Rig(vlm, block_size=2, num_gpu_blocks_override=512)
    for name in ("one", "short"):
        rig.add(name, prompts[name], num_tokens=40)
    rig.run()
    for name in ("one", "short"):
        rig.assert_equals_generate(name, prompts[name], num_tokens=40)


@families
def test_requests_join_and_leave_midway(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    prompts = list(mixed_prompts(vlm).items())
    rig = Rig(vlm, max_num_batched_tokens=9, delay_steps=1)
    for name, prompt in prompts:
        rig.add(name, prompt)
        rig.add(f"{name}-leaves", prompt)
        for _ in range(3):
            rig.step()
        rig.engine.abort(f"{name}-leaves")
    rig.run()
    for name, prompt in prompts:
        rig.assert_equals_generate(name, prompt)
        assert not any(delta.finish_reason for delta in rig.deltas[f"{name}-leaves", 0])


@overlaps
@families
def test_preemption_recomputes_the_same(make_vlm: MakeVlm, family: Family, overlap: bool) -> None:
    vlm = make_vlm(family)
    prompts = mixed_prompts(vlm)
    rig = Rig(vlm, num_gpu_blocks_override=16, enable_prefix_caching=False, async_scheduling=overlap)
    for name, prompt in prompts.items():
        rig.add(name, prompt, num_tokens=16)
    rig.run()
    assert rig.engine.stats().scheduler.preemptions > 0
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt, num_tokens=16)


@families
def test_encoder_budget_of_exactly_one_item(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    pictures = [Picture(seed, 8, 8) for seed in range(10, 14)]
    prompts = {
        "four": vlm.prompt(*[part for picture in pictures for part in ("next ", picture)], " which?"),
        "other": vlm.prompt(Picture(14, 8, 8), "red"),
    }
    rig = Rig(
        vlm,
        max_item_slots=16,
        encoder_cache_slots=16,
        max_encoder_slots_per_step=16,
        max_num_batched_tokens=5,
        delay_steps=1,
    )
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.run()
    assert rig.engine.stats().scheduler.slots_total == 16
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt)


@families
def test_chunks_that_stop_before_pictures(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    prompts = mixed_prompts(vlm)
    rig = Rig(vlm, max_num_batched_tokens=17, disable_chunked_mm_input=True)
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt)


@families
def test_a_repeated_prompt_hits_the_prefix_cache_and_needs_no_encode(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    prompt = mixed_prompts(vlm)["two"]
    rig = Rig(vlm)
    rig.add("cold", prompt)
    rig.run()
    encodes = len(rig.encodes.started)
    rig.add("warm", prompt)
    rig.run()
    for name in ("cold", "warm"):
        rig.assert_equals_generate(name, prompt)
    stats = rig.result("warm").stats
    assert stats is not None
    assert stats.cached_tokens >= len(prompt.token_ids) - 4
    assert len(rig.encodes.started) == encodes


@families
def test_a_hit_that_ends_inside_a_picture(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    picture = Picture(3, 8, 8)
    cold, warm = vlm.prompt("look ", picture), vlm.prompt("look ", picture, " What now?")
    rig = Rig(vlm, block_size=8, num_gpu_blocks_override=64)
    rig.add("cold", cold, num_tokens=1)
    rig.run()
    rig.add("warm", warm)
    rig.run()
    rig.assert_equals_generate("warm", warm)
    stats = rig.result("warm").stats
    assert stats is not None
    assert warm.items[0].offset < stats.cached_tokens < warm.items[0].end


@families
def test_equal_text_with_another_picture_shares_nothing_over_it(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    prompts = {seed: vlm.prompt("The left of the chart ", Picture(seed), " What is there?") for seed in (1, 2)}
    rig = Rig(vlm)
    for seed, prompt in prompts.items():
        rig.add(f"{seed}", prompt)
        rig.run()
        rig.assert_equals_generate(f"{seed}", prompt)
    stats = rig.result("2").stats
    assert stats is not None
    assert 0 < stats.cached_tokens <= prompts[2].items[0].offset
    assert rig.result("1").token_ids != rig.result("2").token_ids


@families
def test_the_same_picture_at_another_offset_does_not_alias(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family)
    prompts = {
        "early": vlm.prompt("aa", Picture(1), Picture(2), "x"),
        "late": vlm.prompt("aaaa", Picture(1), Picture(2), "x"),
        "swapped": vlm.prompt("aa", Picture(2), Picture(1), "x"),
    }
    rig = Rig(vlm, block_size=2)
    for name, prompt in prompts.items():
        rig.add(name, prompt)
        rig.run()
        rig.assert_equals_generate(name, prompt)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_sliding_window_layers(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family, sliding_window=6)
    vlm.hf.model.language_model.set_attn_implementation("eager")
    prompts = mixed_prompts(vlm)
    for max_num_batched_tokens in (256, 7, 1):
        rig = Rig(vlm, max_num_batched_tokens=max_num_batched_tokens)
        for name, prompt in prompts.items():
            rig.add(name, prompt)
        rig.run()
        for name, prompt in prompts.items():
            rig.assert_equals_generate(name, prompt)


@families
def test_tied_embeddings(make_vlm: MakeVlm, family: Family) -> None:
    vlm = make_vlm(family, tie_word_embeddings=True)
    prompt = mixed_prompts(vlm)["one"]
    rig = Rig(vlm)
    rig.add("one", prompt)
    rig.run()
    rig.assert_equals_generate("one", prompt)


@overlaps
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_answers_are_the_same(make_vlm: MakeVlm, seed: int, overlap: bool) -> None:
    """Random budgets, arrivals, encoder delays and departures; small pools, so preemption and eviction happen."""
    rng = random.Random(seed)
    vlm = make_vlm(rng.choice(FAMILIES))
    prompts = mixed_prompts(vlm)
    rig = Rig(
        vlm,
        max_num_batched_tokens=rng.choice([1, 2, 5, 11, 40]),
        block_size=rng.choice([1, 2, 4, 16]),
        num_gpu_blocks_override=rng.choice([80, 120, 400]),
        max_num_seqs=rng.choice([1, 3, 16]),
        encoder_cache_slots=rng.choice([16, 24, 64]),
        enable_prefix_caching=rng.random() < 0.7,
        delay_steps=rng.choice([0, 1, 4]),
        async_scheduling=overlap,
    )
    stay: dict[str, Prompt] = {}
    for number in range(14):
        name = rng.choice(sorted(prompts))
        request_id = f"{number}-{name}"
        rig.add(request_id, prompts[name], num_tokens=8)
        for _ in range(rng.randrange(4)):
            rig.step()
        if rng.random() < 0.25:
            rig.engine.abort(request_id)
        else:
            stay[request_id] = prompts[name]
    rig.run()
    for request_id, prompt in stay.items():
        rig.assert_equals_generate(request_id, prompt)
    stats = rig.engine.stats().scheduler
    assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_held) == (0, 0, 0, 0)


@pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="the shipped model is not trained yet")
@pytest.mark.parametrize("max_num_batched_tokens", [256, 5])
def test_the_shipped_model(max_num_batched_tokens: int) -> None:
    vlm = TinyVlm(DEMO_MODEL, load_hf_model(DEMO_MODEL))
    prompts = {
        "text": vlm.prompt("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"),
        "one": vlm.prompt("<|im_start|>user\n", Picture(1, 8, 8), "What is this?<|im_end|>\n<|im_start|>assistant\n"),
        "two": vlm.prompt("<|im_start|>user\n", Picture(2, 8, 4), Picture(3, 4, 8), "Which one?<|im_end|>\n"),
    }
    rig = Rig(vlm, max_num_batched_tokens=max_num_batched_tokens)
    for name, prompt in prompts.items():
        rig.add(name, prompt, num_tokens=12)
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_equals_generate(name, prompt, num_tokens=12)
