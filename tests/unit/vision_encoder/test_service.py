"""The encoder stage through its port: a tiny model folder, the real core and batcher, a fake object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_service.identity import EncoderFingerprint, ItemIdentity, embedding_identity
from cache_service.memory_tier import MemoryTier
from cache_service.read_through import ReadThrough
from cache_service.single_flight import SingleFlight
from cache_service.tiered import TieredCache
from deployments.errors import ContextLengthError, DeadlineError, InternalError, PayloadLostError, SightlineError
from deployments.messages import EncodeRequest, MediaItem, Modality, Ref
from deployments.vision_encoder.adapters.factory import read_normalisation
from deployments.vision_encoder.batcher import DynamicBatcher
from deployments.vision_encoder.build import load_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.embedding_codec import Embedding, decode_embedding, encode_embedding
from deployments.vision_encoder.encoder import EncoderCore
from deployments.vision_encoder.service import EncoderService
from tests.fakes import MemoryObjectStore
from tests.tiny_models import load_hf_model, save_tiny_model

FINGERPRINT = EncoderFingerprint(model_id="tiny", weights_revision="1", dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen2_5_vl")


@pytest.fixture(scope="module")
def core(folder: Path) -> EncoderCore:
    torch.set_num_threads(1)
    core = load_core(EncoderConfig(model=str(folder), device="cpu", max_batch_slots=512))
    assert isinstance(core, EncoderCore)
    return core


class RemakingPreprocessor:
    """Makes the same patches again, from what it was given."""

    def __init__(self, store: MemoryObjectStore) -> None:
        self.store, self.originals, self.calls = store, dict[bytes, np.ndarray](), 0

    async def prepare(self, request: object) -> None:
        raise NotImplementedError

    async def make_patches(self, item: MediaItem, deadline_s: float | None = None) -> Ref:
        self.calls += 1
        return self.store.put(self.originals[item.identity])


class Stage:
    def __init__(
        self, core: EncoderCore, cache_bytes: int = 1 << 20, lower: ReadThrough[Embedding] | None = None
    ) -> None:
        self.core, self.store = core, MemoryObjectStore()
        self.encoded: list[int] = []
        self.gate: asyncio.Event | None = None
        self.preprocessor = RemakingPreprocessor(self.store)
        self.stats = type(core.stats)()
        self.core.stats = self.stats
        self.batcher = DynamicBatcher(
            self._encode, core.limit, max_wait_s=0.0, max_queued_items=1_000, stats=self.stats, num_threads=1
        )
        self.service = EncoderService(
            core,
            self.batcher,
            self.store,
            fingerprint=FINGERPRINT,
            cache_bytes=cache_bytes,
            stats=self.stats,
            preprocessor=self.preprocessor,  # type: ignore[arg-type]
            lower=lower,
        )

    def _encode(self, items, deliver) -> None:  # type: ignore[no-untyped-def]
        self.encoded.append(len(items))
        self.core.encode(items, deliver)

    def item(
        self, seed: int, grid: tuple[int, int, int] = (1, 4, 6), modality: Modality = "image", **changes: object
    ) -> MediaItem:
        spec = self.core.adapter.describe(modality, grid)
        pixels = np.random.default_rng(seed).integers(0, 256, spec.patches_shape, dtype=np.uint8)
        identity = ItemIdentity(seed.to_bytes(32, "little"))
        self.preprocessor.originals[identity] = pixels
        item = MediaItem(
            modality=modality,
            identity=identity,
            grid=grid,
            offset=0,
            num_slots=spec.num_slots,
            num_patches=spec.patches_shape[0],
            param=f"messages[0].content[{seed}].image_url",
            patches=self.store.put(pixels),
        )
        return replace(item, **changes)  # type: ignore[arg-type]

    async def encode(self, *items: MediaItem, **options: object) -> list[np.ndarray]:
        request = EncodeRequest(request_id="r", items=items, **options)  # type: ignore[arg-type]
        return [await self.store.get(encoded.embeddings) for encoded in await self.service.encode(request)]


@pytest.fixture
async def stage(core: EncoderCore) -> AsyncIterator[Stage]:
    stage = Stage(core)
    yield stage
    await stage.service.close()


async def test_results_are_in_order_and_equal_what_each_item_gives_alone(stage: Stage) -> None:
    items = [stage.item(1, (1, 8, 8)), stage.item(2, (1, 2, 2)), stage.item(3, (2, 4, 4), "video"), stage.item(4)]
    together = await stage.encode(*items)
    stage.service.memory.clear()
    for item, rows in zip(items, together, strict=True):
        (alone,) = await stage.encode(item)
        assert rows.shape == (item.num_slots, stage.core.width)
        np.testing.assert_allclose(rows, alone, atol=1e-5)


async def test_a_hundred_equal_requests_are_one_encode(stage: Stage) -> None:
    item = stage.item(1)
    results = await asyncio.gather(*(stage.encode(item) for _ in range(100)))
    assert stage.stats.items == {"image": 1}
    assert stage.stats.single_flight_joins == 99
    assert all(np.array_equal(result[0], results[0][0]) for result in results)


async def test_a_repeat_comes_from_memory_with_the_same_ref(stage: Stage) -> None:
    item = stage.item(1)
    (first,) = await stage.service.encode(EncodeRequest(request_id="a", items=(item,)))
    (second,) = await stage.service.encode(EncodeRequest(request_id="b", items=(replace(item, patches=None),)))
    assert (first.origin, second.origin) == ("computed", "memory")
    assert first.embeddings == second.embeddings
    assert stage.preprocessor.calls == 0


async def test_refresh_makes_a_new_ref(stage: Stage) -> None:
    item = stage.item(1)
    (first,) = await stage.service.encode(EncodeRequest(request_id="a", items=(item,)))
    stage.store.lose(first.embeddings)
    (rows,) = await stage.encode(item, refresh=True)
    assert rows.shape[0] == item.num_slots


async def test_equal_items_of_one_request_are_computed_once(stage: Stage) -> None:
    a, b = await stage.encode(stage.item(1), stage.item(1))
    assert stage.stats.items == {"image": 1}
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("how", ["lost", "absent"])
async def test_patches_that_are_lost_or_never_came_are_made_again(stage: Stage, how: str) -> None:
    (expected,) = await stage.encode(stage.item(1))
    stage.service.memory.clear()
    item = stage.item(1)
    if how == "lost":
        stage.store.lose(item.patches)
    else:
        item = replace(item, patches=None)
    (rows,) = await stage.encode(item)
    assert stage.preprocessor.calls == 1
    np.testing.assert_array_equal(rows, expected)


async def test_without_a_preprocessor_lost_patches_are_said_to_be_lost(stage: Stage) -> None:
    stage.service._preprocessor = None
    with pytest.raises(PayloadLostError):
        await stage.encode(replace(stage.item(1), patches=None))


@pytest.mark.parametrize(
    "patches", [np.zeros((24, 588), np.float32), np.zeros((23, 588), np.uint8), np.zeros((24, 587), np.uint8)]
)
async def test_bad_patches_fail_their_own_request_only(stage: Stage, patches: np.ndarray) -> None:
    bad = stage.item(1, patches=stage.store.put(patches))
    results = await asyncio.gather(
        stage.encode(bad), *(stage.encode(stage.item(seed)) for seed in range(2, 6)), return_exceptions=True
    )
    assert isinstance(results[0], InternalError)
    assert "uint8 (24, 588)" in results[0].message
    assert all(isinstance(result, list) for result in results[1:])


async def test_a_placeholder_count_that_differs_never_leaves(stage: Stage) -> None:
    with pytest.raises(InternalError) as caught:
        await stage.encode(stage.item(1, num_slots=5))
    assert caught.value.code == "embedding_count_mismatch"
    assert not stage.encoded


async def test_rows_of_another_count_never_leave(stage: Stage) -> None:
    stage.core.adapter.assemble, kept = (lambda item, rows: rows[item.modality][:-1]), stage.core.adapter.assemble  # type: ignore[method-assign]
    try:
        with pytest.raises(InternalError) as caught:
            await stage.encode(stage.item(1))
    finally:
        stage.core.adapter.assemble = kept  # type: ignore[method-assign]
    assert caught.value.code == "embedding_count_mismatch"
    assert len(stage.service.memory) == 0


async def test_an_item_over_a_limit_is_a_400_that_names_limit_value_and_place(stage: Stage) -> None:
    with pytest.raises(ContextLengthError) as caught:
        await stage.encode(stage.item(1, (1, 64, 64)), stage.item(2))
    assert "1024 slots" in caught.value.message
    assert "512 (max_batch_slots)" in caught.value.message
    assert caught.value.param == "messages[0].content[1].image_url"
    assert caught.value.status == 400
    assert stage.stats.rejected_items == {"image_too_large": 1}


async def test_the_good_items_of_a_failed_request_are_cached(stage: Stage) -> None:
    good = stage.item(2)
    with pytest.raises(SightlineError):
        await stage.encode(stage.item(1, num_slots=5), good)
    (encoded,) = await stage.service.encode(EncodeRequest(request_id="r", items=(good,)))
    assert encoded.origin == "memory"


async def test_a_cancelled_caller_takes_nothing_from_those_who_joined(stage: Stage) -> None:
    item = stage.item(1)
    first = asyncio.create_task(stage.encode(item))
    second = asyncio.create_task(stage.encode(item))
    await asyncio.sleep(0)
    first.cancel()
    (rows,) = await second
    assert rows.shape[0] == item.num_slots
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_work_that_nobody_waits_for_is_not_done(stage: Stage) -> None:
    blocker = asyncio.create_task(stage.encode(stage.item(1)))
    task = asyncio.create_task(stage.encode(stage.item(2)))
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await blocker
    await stage.encode(stage.item(3))
    # Either it had been taken into the first round, or it was dropped from the queue: never run alone for nobody.
    assert stage.stats.items["image"] + stage.stats.abandoned_items == 3


async def test_a_deadline_that_passed_is_a_504(stage: Stage) -> None:
    with pytest.raises(DeadlineError):
        await stage.encode(stage.item(1), deadline_s=1.0)


async def test_the_memory_cache_is_bounded_in_bytes(core: EncoderCore) -> None:
    one = 6 * core.width * 4
    stage = Stage(core, cache_bytes=2 * one)
    for seed in range(5):
        await stage.encode(stage.item(seed))
        stage.service.memory.check_integrity()
    assert set(stage.service.memory) == {embedding_identity(stage.item(seed).identity, FINGERPRINT) for seed in (3, 4)}
    await stage.service.close()
    assert len(stage.service.memory) == 0


async def test_a_loaded_folder_gives_what_transformers_computes(folder: Path, stage: Stage) -> None:
    item = stage.item(1, (1, 8, 12))
    (encoded,) = await stage.service.encode(EncodeRequest(request_id="r", items=(item,)))
    pixels = stage.preprocessor.originals[item.identity]
    usual = read_normalisation(folder, {"model_type": "qwen2_5_vl"})["image"]
    mean, std = torch.tensor(usual.mean).view(3, 1, 1), torch.tensor(usual.std).view(3, 1, 1)
    wide = (torch.from_numpy(pixels).float().view(-1, 3, 1, 196) / 255 - mean) / std
    tower = load_hf_model(folder).model.visual
    with torch.inference_mode():
        output = tower(wide.expand(-1, -1, 2, -1).reshape(len(pixels), -1), torch.tensor([item.grid]))
    assert (encoded.dtype, encoded.width) == ("float32", output.pooler_output.shape[1])
    np.testing.assert_allclose(await stage.store.get(encoded.embeddings), output.pooler_output.numpy(), atol=1e-4)


async def test_lower_tiers_answer_without_pixels_and_are_written_behind(core: EncoderCore) -> None:
    tier = MemoryTier(1 << 20)

    def lower() -> ReadThrough[Embedding]:
        return ReadThrough(TieredCache([tier], decode_embedding), encode_embedding, flights=SingleFlight())

    first = Stage(core, lower=lower())
    item = first.item(1)
    (rows,) = await first.encode(item)
    await first.service.close()
    second = Stage(core, lower=lower())
    (encoded,) = await second.service.encode(EncodeRequest(request_id="r", items=(replace(item, patches=None),)))
    assert encoded.origin == "redis"
    np.testing.assert_array_equal(await second.store.get(encoded.embeddings), rows)
    assert not second.encoded
    await second.service.close()
