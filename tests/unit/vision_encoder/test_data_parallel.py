"""Items of a round over several devices: a pure decision, and cores that together answer as one."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import ContextLengthError, InternalError, InvalidRequestError
from deployments.vision_encoder import build
from deployments.vision_encoder.adapters.base import VisionItem
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.data_parallel import DataParallelCore
from deployments.vision_encoder.encoder import Deliver, EncoderCore, MemoryLimit
from deployments.vision_encoder.memory_model import MemoryModel
from deployments.vision_encoder.sharding import plan_shards
from deployments.vision_encoder.stats import EncoderStats, sum_stats
from tests.tiny_models import save_tiny_model
from tests.unit.vision_encoder.test_encoder import Saboteur
from tests.unit.vision_encoder.test_graphs import MIXED, arrays, make_core
from tests.unit.vision_encoder.towers import random_items

COSTS = st.lists(st.floats(0, 1e3), max_size=40)


# -- the decision -----------------------------------------------------------------------------------------------------
@given(COSTS, st.integers(1, 8))
def test_every_item_goes_to_one_shard_in_order(costs: list[float], num_shards: int) -> None:
    shards = plan_shards(costs, num_shards)
    assert len(shards) == num_shards
    assert sorted(itertools.chain(*shards)) == list(range(len(costs)))
    assert all(list(shard) == sorted(shard) for shard in shards)


@given(COSTS, st.integers(1, 8))
def test_the_heaviest_shard_exceeds_any_other_by_its_lightest_item_at_most(costs: list[float], num_shards: int) -> None:
    shards = plan_shards(costs, num_shards)
    sums = [sum(costs[i] for i in shard) for shard in shards]
    for shard, total in zip(shards, sums, strict=True):
        if shard:
            assert total - min(sums) <= min(costs[i] for i in shard) + 1e-6


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_never_worse_than_four_thirds_of_the_best(costs: list[int], num_shards: int) -> None:
    best = min(
        max(sum(c for c, where in zip(costs, places, strict=True) if where == shard) for shard in range(num_shards))
        for places in itertools.product(range(num_shards), repeat=len(costs))
    )
    heaviest = max(sum(costs[i] for i in shard) for shard in plan_shards(costs, num_shards))
    assert heaviest <= best * (4 / 3 - 1 / (3 * num_shards)) + 1e-9


@given(st.integers(0, 40), st.integers(1, 8))
def test_equal_items_are_spread_evenly_whatever_they_cost(count: int, num_shards: int) -> None:
    for cost in (0.0, 1.0):
        sizes = [len(shard) for shard in plan_shards([cost] * count, num_shards)]
        assert max(sizes) - min(sizes) <= 1


def test_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards is 0"):
        plan_shards([1.0], 0)


# -- cores ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def cores() -> list[EncoderCore]:
    return [make_core(static_buffers_on_cpu=True) for _ in range(3)]


@pytest.fixture
def parallel(cores: Sequence[EncoderCore]) -> Iterator[DataParallelCore]:
    core = DataParallelCore(cores, num_threads=1)
    yield core
    core.close()


def test_results_equal_those_of_one_core_in_order(parallel: DataParallelCore) -> None:
    alone = make_core(static_buffers_on_cpu=True)
    items = random_items(alone.adapter, MIXED * 3)
    for ours, expected in zip(arrays(parallel.encode_all(items)), arrays(alone.encode_all(items)), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert all(stats.items for stats in parallel.part_stats)
    assert sum_stats(parallel.part_stats).items == alone.stats.items
    assert (parallel.width, parallel.dtype_name) == (alone.width, alone.dtype_name)


def test_each_core_stays_on_a_thread_of_its_own(cores: Sequence[EncoderCore], parallel: DataParallelCore) -> None:
    threads: list[set[int]] = [set() for _ in cores]
    for core, seen in zip(cores, threads, strict=True):
        forward = core.adapter.forward

        def spy(path, inputs, longest, forward=forward, seen=seen):  # type: ignore[no-untyped-def]
            seen.add(threading.get_ident())
            return forward(path, inputs, longest)

        core.adapter.forward = spy  # type: ignore[method-assign, assignment]
    for seed in range(4):
        parallel.encode_all(random_items(cores[0].adapter, MIXED, seed))
    assert [len(seen) for seen in threads] == [1, 1, 1]
    assert len(set.union(*threads)) == 3


def test_large_items_keep_away_from_each_other(cores: Sequence[EncoderCore], parallel: DataParallelCore) -> None:
    items = random_items(cores[0].adapter, [("image", (1, 16, 18))] * 3 + [("image", (1, 2, 2))] * 9)
    parallel.encode_all(items)
    assert [stats.slots["image"] for stats in parallel.part_stats] == [72 + 3] * 3


def test_a_round_may_fill_every_device(cores: Sequence[EncoderCore], parallel: DataParallelCore) -> None:
    assert parallel.limit.slots == 3 * cores[0].limit.slots
    assert parallel.limit.items == 3 * cores[0].limit.items


def test_the_device_with_the_least_memory_says_what_fits(cores: list[EncoderCore]) -> None:
    for core, limit_bytes in zip(cores, (1 << 30, 1000, 1 << 30), strict=True):
        core.memory = MemoryLimit(model=MemoryModel(0.0, 10.0), limit_bytes=limit_bytes)
    parallel = DataParallelCore(cores)
    assert parallel.describe("image", (1, 8, 8)).num_slots == 16
    with pytest.raises(ContextLengthError, match="1000"):
        parallel.describe("image", (1, 16, 18))
    parallel.close()


def test_bad_items_fail_alone_whichever_device_has_them(
    cores: Sequence[EncoderCore], parallel: DataParallelCore
) -> None:
    items = random_items(cores[0].adapter, [("image", (1, 4, 4))] * 6)
    expected = arrays(parallel.encode_all(items))
    items[3].patches[0] = 255
    items[4] = VisionItem("image", (1, 3, 3), items[4].patches)
    for core in cores:
        Saboteur(core, RuntimeError("bad kernel"), poison=255)
    results = parallel.encode_all(items)
    assert isinstance(results[3], InternalError)
    assert isinstance(results[4], InvalidRequestError)
    for position in (0, 1, 2, 5):
        np.testing.assert_allclose(results[position], expected[position], atol=1e-6)


def test_a_core_that_breaks_altogether_raises_after_the_others_have_delivered(
    cores: Sequence[EncoderCore], parallel: DataParallelCore
) -> None:
    def broken(items: Sequence[VisionItem], deliver: Deliver) -> None:
        raise RuntimeError("device lost")

    cores[1].encode = broken  # type: ignore[method-assign]
    delivered: Counter[int] = Counter()
    with pytest.raises(RuntimeError, match="device lost"):
        parallel.encode(
            random_items(cores[0].adapter, [("image", (1, 4, 4))] * 6), lambda position, _: delivered.update([position])
        )
    assert delivered == Counter([0, 2, 3, 5])


# -- options ----------------------------------------------------------------------------------------------------------
def test_the_option_builds_one_core_per_device(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "qwen3_vl")
    config = EncoderConfig(model=str(folder), device="cpu", data_parallel_size=2, capture_progress=False)
    parallel, alone = build.load_core(config), build.load_core(replace(config, data_parallel_size=1))
    assert isinstance(parallel, DataParallelCore)
    assert isinstance(alone, EncoderCore)
    items = random_items(alone.adapter, MIXED)
    for ours, expected in zip(arrays(parallel.encode_all(items)), arrays(alone.encode_all(items)), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    parallel.close()
    with pytest.raises(ValueError, match="data_parallel_size is 2"):
        build.load_core(config, keep_on_device=True)


def test_dummy_weights_are_the_same_on_every_device(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    config = EncoderConfig(model=str(folder), device="cpu", data_parallel_size=2, load_format="dummy")
    parallel = build.load_core(config)
    assert isinstance(parallel, DataParallelCore)
    (item,) = random_items(parallel.cores[0].adapter, [("image", (1, 8, 8))])
    first, second = (arrays(core.encode_all([item]))[0] for core in parallel.cores)
    np.testing.assert_array_equal(first, second)
    parallel.close()


def test_more_devices_than_are_visible_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EncoderConfig(model="m", data_parallel_size=2)
    assert build.pick_devices(config) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match=r"data_parallel_size is 4, but 2 .*num_gpus: 4"):
        build.pick_devices(replace(config, data_parallel_size=4))
    with pytest.raises(ValueError, match="data_parallel_size is 0"):
        EncoderConfig(model="m", data_parallel_size=0)


def test_counters_add_up_and_peaks_do_not() -> None:
    first, second = EncoderStats(), EncoderStats()
    first.items["image"], second.items["image"], second.items["video"] = 2, 3, 1
    first.batch_seconds["image"] = 0.5
    first.isolated_items, second.isolated_items = 1, 2
    first.measured_peak_bytes, second.measured_peak_bytes = 70, 50
    total = sum_stats([first, second])
    assert (total.items, total.isolated_items) == (Counter(image=5, video=1), 3)
    assert (total.batch_seconds["image"], total.measured_peak_bytes) == (0.5, 70)
    assert first.items == Counter(image=2)
