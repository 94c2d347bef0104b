from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.lm_engine.config import EngineConfig, ModelLimits, SchedulerConfig

LIMITS = ModelLimits(max_model_len=4096, num_blocks=100, max_item_slots=1024, max_item_patches=4096)


def test_automatic_budgets_hold_one_worst_case_item() -> None:
    resolved = EngineConfig(model="m", max_num_batched_tokens=512).resolve(LIMITS)
    assert resolved.encoder_cache_slots == 1024
    assert resolved.max_encoder_slots_per_step == 1024
    assert resolved.max_encoder_patches_per_step == 4096
    assert (resolved.max_model_len, resolved.num_blocks) == (4096, 100)


def test_automatic_budgets_follow_the_step_when_it_is_larger() -> None:
    resolved = EngineConfig(model="m", max_num_batched_tokens=2048).resolve(LIMITS)
    assert (resolved.encoder_cache_slots, resolved.max_encoder_patches_per_step) == (2048, 8192)


def test_budgets_that_are_set_are_raised_to_the_worst_case_item_and_else_kept() -> None:
    options = {"encoder_cache_slots": 5000, "max_encoder_slots_per_step": 10, "max_encoder_patches_per_step": 10}
    resolved = EngineConfig(model="m", **options).resolve(LIMITS)  # type: ignore[arg-type]
    assert resolved.encoder_cache_slots == 5000
    assert (resolved.max_encoder_slots_per_step, resolved.max_encoder_patches_per_step) == (1024, 4096)


def test_a_model_without_an_encoder_needs_no_slots() -> None:
    resolved = EngineConfig(model="m").resolve(ModelLimits(max_model_len=64, num_blocks=4))
    assert resolved.encoder_cache_slots == 8192


def test_whole_items_need_a_step_that_holds_one() -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=1000, disable_chunked_mm_input=True)
    with pytest.raises(ValueError, match=r"disable_chunked_mm_input .* 1024 slots; it is 1000"):
        config.resolve(LIMITS)


def test_a_longer_context_than_the_model_has_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 5000 is above the model's own 4096"):
        EngineConfig(model="m", max_model_len=5000).resolve(LIMITS)


def test_the_pool_is_sized_by_override_then_bytes_then_what_is_free() -> None:
    assert EngineConfig(model="m", num_gpu_blocks_override=7, kv_cache_bytes=1000).num_kv_blocks(100, 5000) == 7
    assert EngineConfig(model="m", kv_cache_bytes=1050).num_kv_blocks(100, 5000) == 10
    assert EngineConfig(model="m").num_kv_blocks(100, 5000) == 50
    with pytest.raises(ValueError, match="gpu_memory_utilization leaves 50"):
        EngineConfig(model="m").num_kv_blocks(100, 50)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": ""}, "model must name"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1; it is 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1; it is 1.5"),
        ({"scheduling_policy": "lifo"}, "'fcfs' or 'priority'; it is 'lifo'"),
        ({"max_queue_s": -1}, "max_queue_s must be at least 0; it is -1"),
        ({"embed_pool_bytes": -1}, "embed_pool_bytes must be at least 0; it is -1"),
        ({"embed_pool_ttl_s": 0}, "embed_pool_ttl_s must be above 0; it is 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1; it is 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**{"model": "m", **options})  # type: ignore[arg-type]


def test_all_options_but_the_model_have_defaults() -> None:
    missing = dataclasses.MISSING
    without = [f.name for f in dataclasses.fields(EngineConfig) if f.default is f.default_factory is missing]
    assert without == ["model"]
    assert SchedulerConfig.__dataclass_params__.frozen  # type: ignore[attr-defined]


@settings(deadline=None)
@given(st.integers(1, 1500))
def test_every_batch_fits_a_decode_graph_with_little_padding(max_num_seqs: int) -> None:
    sizes = EngineConfig(model="m", max_num_seqs=max_num_seqs).graph_sizes
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for batch in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch <= max(7, batch // 3)


def test_decode_graphs_of_wanted_sizes() -> None:
    assert EngineConfig(model="m", max_num_seqs=6, cudagraph_capture_sizes=(9, 4, 2)).graph_sizes == (2, 4, 6)
    with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
        EngineConfig(model="m", cudagraph_capture_sizes=(0,))
