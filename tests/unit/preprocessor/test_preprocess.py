from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deployments.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    MediaError,
    PayloadLostError,
    UrlNotAllowedError,
)
from deployments.messages import ChatPrompt, MediaInput, Modality, PreparedPrompt, PrepareRequest, Ref, TextPrompt
from deployments.preprocessor.build import worst_case_item
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.families.registry import load_family
from deployments.preprocessor.fetch import FetchStats
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.preprocess import PreprocessorCore
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.prompt import PromptBuilder
from deployments.preprocessor.sources import MediaSources
from deployments.preprocessor.url_guard import FetchRules, FetchUrl
from deployments.preprocessor.workers import ThreadWorkers
from tests.fakes import MemoryObjectStore
from tests.unit.preprocessor.model_folder import write_model_folder
from tests.unit.preprocessor.pictures import clip, data_uri, encoded, noise, png_claiming

RED = data_uri(encoded(Image.new("RGB", (100, 60), (220, 30, 30))))
PHOTO = data_uri(encoded(noise(300, 200), "JPEG"), "image/jpeg")


class ScriptedFetcher:
    """Answers from a table; `gate` holds every answer back until it is set."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.cancelled = 0
        self.stats = FetchStats()
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, url: FetchUrl, max_bytes: int) -> bytes:
        self.fetched.append(url.target)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.bodies[url.target]

    async def close(self) -> None:
        pass


class CountingWorkers(ThreadWorkers):
    def __init__(self, processor: MediaProcessor) -> None:
        super().__init__(processor, 2)
        self.inspected = self.processed = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.held_inspections: list[asyncio.Event] = []
        """The next inspections each wait for one of these."""

    async def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection:
        self.inspected += 1
        if self.held_inspections:
            await self.held_inspections.pop().wait()
        return await super().inspect(modality, data, options)

    async def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia:
        self.processed += 1
        await self.gate.wait()
        return await super().process(modality, data, inspection, options)


async def reached(condition: Callable[[], bool]) -> None:
    """Wait until something that runs concurrently has got there."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is watched has no event
            await asyncio.sleep(0.001)


class Stage:
    """A core with everything around it at hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        config = PreprocessorConfig(**options)
        family = load_family(folder)
        processor = MediaProcessor(config, family)
        self.store = MemoryObjectStore()
        self.fetcher = ScriptedFetcher()
        self.workers = CountingWorkers(processor)
        self.now_s = 1000.0
        self.core = PreprocessorCore(
            config,
            family=family,
            prompts=PromptBuilder.from_folder(folder, family),
            processor=processor,
            workers=self.workers,
            sources=MediaSources(FetchRules(denied=("denied.test",)), self.fetcher, config.source_cache_bytes),
            store=self.store,
            clock=lambda: self.now_s,
        )

    def patches(self, ref: Ref) -> np.ndarray:
        patches = self.store.values[ref]
        assert isinstance(patches, np.ndarray)
        return patches

    async def prepare(self, *pictures: str | MediaInput, text: str = "Which?", **options: Any) -> PreparedPrompt:
        media = tuple(
            MediaInput(modality="image", param=f"m[{i}]", url=picture) if isinstance(picture, str) else picture
            for i, picture in enumerate(pictures)
        )
        content = [*({"type": item.modality} for item in media), {"type": "text", "text": text}]
        prompt = ChatPrompt(messages=({"role": "user", "content": content},))
        return await self.core.prepare(PrepareRequest(request_id="r", prompt=prompt, media=media, **options))

    async def refused(self, *pictures: str | MediaInput, **options: Any) -> InvalidRequestError:
        with pytest.raises(InvalidRequestError) as caught:
            await self.prepare(*pictures, **options)
        return caught.value


MakeStage = Callable[..., Stage]


@pytest.fixture
async def make_stage(model_folder: Path) -> AsyncIterator[MakeStage]:
    stages: list[Stage] = []

    def make(**options: Any) -> Stage:
        stages.append(Stage(model_folder, **options))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.core.close()


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    return make_stage()


def named(uuid: str | None, url: str | None = None, **options: Any) -> MediaInput:
    return MediaInput(modality="image", param="m[0]", uuid=uuid, url=url, **options)


# -- the result -------------------------------------------------------------------------------------------------------
async def test_items_spans_and_patches(stage: Stage, model_folder: Path) -> None:
    placeholder = json.loads((model_folder / "config.json").read_text())["image_token_id"]
    prepared = await stage.prepare(RED, PHOTO)
    assert [item.param for item in prepared.items] == ["m[0]", "m[1]"]
    covered = set()
    for item in prepared.items:
        assert set(prepared.token_ids[item.offset : item.end]) == {placeholder}
        assert item.num_patches == np.prod(item.grid) == 4 * item.num_slots
        assert stage.patches(item.patches).shape == (item.num_patches, 3 * 14 * 14)
        covered |= set(range(item.offset, item.end))
    assert covered == {i for i, token_id in enumerate(prepared.token_ids) if token_id == placeholder}
    assert set(prepared.stage_seconds) == {"tokenize", "fetch", "decode", "preprocess"}
    assert prepared.cache_results == {"alias:miss": 2}


async def test_text_only(stage: Stage) -> None:
    prepared = await stage.prepare()
    assert prepared.items == ()
    raw = await stage.core.prepare(PrepareRequest(request_id="r", prompt=TextPrompt(text="the fox")))
    assert raw.token_ids


async def test_same_picture_by_every_way_has_one_identity(stage: Stage) -> None:
    image = noise(90, 70)
    stage.fetcher.bodies = {"/a.png": encoded(image), "/a.bmp": encoded(image, "BMP")}
    prepared = await stage.prepare(
        data_uri(encoded(image)),
        "http://media.test/a.png",
        "https://media.test/a.bmp",
        data_uri(encoded(image, "TIFF")),
    )
    assert len({item.identity for item in prepared.items}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (encoded(noise(30, 150)), encoded(Image.frombytes("RGB", (150, 30), noise(30, 150).tobytes()))),
        (encoded(Image.new("RGB", (64, 64), (255, 0, 0))), encoded(Image.new("RGB", (64, 64), (254, 0, 0)))),
    ],
)
async def test_other_pictures_have_other_identities(stage: Stage, one: bytes, other: bytes) -> None:
    prepared = await stage.prepare(data_uri(one), data_uri(other))
    assert prepared.items[0].identity != prepared.items[1].identity


async def test_identity_follows_effective_processing_and_namespace(stage: Stage) -> None:
    async def identity(**options: Any) -> bytes:
        return (await stage.prepare(PHOTO, **options)).items[0].identity

    plain = await identity()
    assert await identity(mm_processor_kwargs={"max_pixels": 9_000_000}) == plain
    assert await identity(mm_processor_kwargs={"max_pixels": 20_000}) != plain
    assert await identity(namespace="other") != plain


async def test_detail_low_caps_the_size(stage: Stage) -> None:
    large = data_uri(encoded(Image.new("RGB", (1200, 1200))))
    low = await stage.prepare(named(None, large, detail="low"))
    high = await stage.prepare(named(None, large, detail="high"))
    assert low.items[0].num_slots == 324
    assert high.items[0].num_slots > 1800


# -- repeats ----------------------------------------------------------------------------------------------------------
async def test_repeat_is_not_decoded(stage: Stage) -> None:
    first = (await stage.prepare(PHOTO)).items[0]
    again = await stage.prepare(PHOTO, mm_processor_kwargs={"max_pixels": 20_000})
    repeat = (await stage.prepare(PHOTO)).items[0]
    assert (stage.workers.inspected, stage.workers.processed) == (1, 1)
    assert repeat.patches is None
    assert (repeat.identity, repeat.grid, repeat.num_slots) == (first.identity, first.grid, first.num_slots)
    assert again.cache_results == {"alias:hit": 1}


async def test_patches_can_be_made_from_a_repeat(stage: Stage) -> None:
    first = (await stage.prepare(PHOTO)).items[0]
    repeat = (await stage.prepare(PHOTO)).items[0]
    remade = await stage.core.make_patches(repeat)
    assert np.array_equal(stage.patches(remade), stage.patches(first.patches))
    assert stage.core.stats().remakes == 1


async def test_lost_source_is_told(stage: Stage) -> None:
    item = (await stage.prepare(PHOTO)).items[0]
    stage.store.lose(item.source)
    with pytest.raises(PayloadLostError):
        await stage.core.make_patches(item)


async def test_other_tenants_repeat_is_decoded(stage: Stage) -> None:
    await stage.prepare(PHOTO, namespace="a")
    prepared = await stage.prepare(PHOTO, namespace="b")
    assert prepared.cache_results == {"alias:miss": 1}
    assert stage.workers.processed == 2


async def test_equal_pictures_of_one_request_are_processed_once(stage: Stage) -> None:
    prepared = await stage.prepare(PHOTO, RED, PHOTO, PHOTO)
    assert stage.workers.processed == 2
    assert len({item.identity for item in prepared.items}) == 2
    assert len({item.offset for item in prepared.items}) == 4


async def test_same_url_in_one_request_is_fetched_once(stage: Stage) -> None:
    stage.fetcher.bodies = {"/a": encoded(noise(40, 40))}
    await stage.prepare("http://media.test/a", "http://media.test/a")
    assert stage.fetcher.fetched == ["/a"]


async def test_concurrent_requests_share_one_decode(stage: Stage) -> None:
    stage.workers.gate.clear()
    tasks = [asyncio.create_task(stage.prepare(PHOTO)) for _ in range(5)]
    await reached(lambda: stage.workers.inspected == 5 and stage.workers.processed > 0)
    await asyncio.sleep(0.01)
    stage.workers.gate.set()
    results = await asyncio.gather(*tasks)
    assert stage.workers.processed == 1
    assert len({result.items[0].patches for result in results}) == 1
    assert sum(result.cache_results.get("flight:join", 0) for result in results) == 4


async def test_a_decode_that_ended_since_the_look_up_is_not_repeated(stage: Stage) -> None:
    go_on = asyncio.Event()
    stage.workers.held_inspections.append(go_on)
    late = asyncio.create_task(stage.prepare(PHOTO))
    await reached(lambda: stage.workers.inspected == 1)  # it has found no alias
    first = await stage.prepare(PHOTO)
    go_on.set()
    assert (await late).items[0].identity == first.items[0].identity
    assert stage.workers.processed == 1


async def test_cancelled_request_takes_nothing_from_its_neighbour(stage: Stage) -> None:
    stage.workers.gate.clear()
    first, second = (asyncio.create_task(stage.prepare(PHOTO)) for _ in range(2))
    await reached(lambda: stage.workers.inspected == 2 and stage.workers.processed > 0)
    await asyncio.sleep(0.01)
    first.cancel()
    stage.workers.gate.set()
    assert (await second).items[0].patches is not None
    assert first.cancelled() or (await asyncio.gather(first, return_exceptions=True))


# -- uuids ------------------------------------------------------------------------------------------------------------
async def test_uuid_stands_for_its_picture(stage: Stage) -> None:
    first = (await stage.prepare(named("u", PHOTO))).items[0]
    later = (await stage.prepare(named("u"))).items[0]
    assert later.identity == first.identity
    assert np.array_equal(stage.patches(await stage.core.make_patches(later)), stage.patches(first.patches))


async def test_uuid_is_known_in_its_namespace_only(stage: Stage) -> None:
    await stage.prepare(named("u", PHOTO), namespace="a")
    error = await stage.refused(named("u"), namespace="b")
    assert (error.code, error.param) == ("unknown_media_uuid", "m[0]")


async def test_conflicting_payload_rebinds_the_uuid(stage: Stage) -> None:
    await stage.prepare(named("u", PHOTO))
    red = (await stage.prepare(named("u", RED))).items[0]
    assert (await stage.prepare(named("u"))).items[0].identity == red.identity
    assert stage.core.stats().uuids.rebound == 1


async def test_forgotten_bytes_make_the_uuid_unknown(make_stage: MakeStage) -> None:
    stage = make_stage(source_cache_bytes=10)
    await stage.prepare(named("u", PHOTO))
    assert (await stage.refused(named("u"))).code == "unknown_media_uuid"


@pytest.mark.parametrize("uuid", ["../../x", "*", "a\0b", "a b\r\nDEL x", "x" * 256])
async def test_uuid_is_only_a_name(stage: Stage, uuid: str) -> None:
    await stage.prepare(named(uuid, RED))
    assert (await stage.prepare(named(uuid))).items


@pytest.mark.parametrize("uuid", ["", "x" * 257])
async def test_senseless_uuids(stage: Stage, uuid: str) -> None:
    assert (await stage.refused(named(uuid, RED))).code == "invalid_uuid"


async def test_neither_url_nor_uuid(stage: Stage) -> None:
    assert (await stage.refused(named(None))).code == "invalid_url"


# -- admission --------------------------------------------------------------------------------------------------------
async def test_too_many_pictures(make_stage: MakeStage) -> None:
    stage = make_stage(limit_mm_per_prompt={"image": 2})
    error = await stage.refused(RED, RED, RED)
    assert "3 items" in error.message
    assert "at most 2" in error.message


async def test_modality_that_is_switched_off(make_stage: MakeStage) -> None:
    stage = make_stage(limit_mm_per_prompt={"image": 2})
    error = await stage.refused(MediaInput(modality="video", param="v", url=RED))
    assert "1 items of type video; at most 0" in error.message


async def test_nothing_is_fetched_for_a_request_that_cannot_be_served(stage: Stage) -> None:
    good = "http://media.test/a"
    assert isinstance(await stage.refused(good, "http://denied.test/b"), UrlNotAllowedError)
    assert isinstance(await stage.refused(good, "http://127.0.0.1/b"), UrlNotAllowedError)
    await stage.refused(good, "data:no-comma")
    await stage.refused(good, mm_processor_kwargs={"x": 1})
    await stage.refused(good, text="fox " * 500, max_prompt_tokens=100)
    assert stage.fetcher.fetched == []


async def test_prompt_that_does_not_fit_is_refused_before_pixels(stage: Stage) -> None:
    fitting = len((await stage.prepare(data_uri(encoded(noise(280, 280), "BMP")))).token_ids)
    stage.workers.processed = 0
    picture = data_uri(encoded(noise(280, 280)))
    with pytest.raises(ContextLengthError) as caught:
        await stage.prepare(picture, max_prompt_tokens=fitting - 1)
    assert str(fitting) in caught.value.message
    assert str(fitting - 1) in caught.value.message
    assert stage.workers.processed == 0
    assert len((await stage.prepare(picture, max_prompt_tokens=fitting)).token_ids) == fitting


async def test_no_item_is_larger_than_the_worst_case(make_stage: MakeStage, model_folder: Path) -> None:
    options = {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 16}}
    stage = make_stage(**options)
    worst_slots, worst_patches = worst_case_item(PreprocessorConfig(**options), model_folder)  # type: ignore[arg-type]
    assert worst_patches == 4 * worst_slots
    long = data_uri(encoded(Image.new("L", (10_000, 50))))
    assert 16 < (await stage.prepare(long)).items[0].num_slots <= worst_slots
    error = await stage.refused(
        data_uri(encoded(Image.new("L", (1000, 5)))), mm_processor_kwargs={"min_pixels": 28 * 28 * 16}
    )
    assert error.code == "image_too_large"
    assert str(worst_slots) in error.message


# -- faults -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (data_uri(b"<html>"), "unsupported_image_format"),
        (data_uri(encoded(noise(90, 90))[:500]), "invalid_image"),
        (data_uri(png_claiming(30_000, 30_000)), "image_too_large"),
        (data_uri(encoded(Image.new("L", (500, 1)))), "image_aspect_ratio"),
        ("data:image/png;base64,", "empty_media"),
        ("/etc/passwd", "invalid_url"),
        ("file:///etc/passwd", "url_not_allowed"),
    ],
)
async def test_the_bad_picture_is_named(stage: Stage, bad: str, code: str) -> None:
    error = await stage.refused(RED, bad, RED)
    assert isinstance(error, MediaError)
    assert (error.code, error.param) == (code, "m[1]")
    assert "passwd" not in error.message


async def test_a_verdict_is_remembered(stage: Stage) -> None:
    bad = data_uri(encoded(noise(90, 90))[:500])
    first = await stage.refused(bad)
    again = await stage.refused(RED, bad)
    assert (again.code, again.message, again.param) == (first.code, first.message, "m[1]")
    assert stage.workers.processed == 1
    await stage.refused(bad, namespace="other")
    assert stage.workers.processed == 2


async def test_picture_over_the_byte_limit(make_stage: MakeStage) -> None:
    stage = make_stage(max_image_bytes=100)
    assert (await stage.refused(PHOTO)).code == "media_too_large"


async def test_tenants_own_byte_limit(stage: Stage) -> None:
    photo = encoded(noise(300, 200), "JPEG")
    stage.fetcher.bodies["/a"] = photo
    for picture in (PHOTO, named("x", PHOTO), MediaInput(modality="video", param="m[0]", frames=(PHOTO, PHOTO))):
        refused = await stage.refused(picture, max_item_bytes=len(photo) - 1)
        assert (refused.code, refused.param) == ("media_too_large", "m[0]")
    assert (await stage.prepare(PHOTO, max_item_bytes=len(photo))).items
    await stage.prepare(named("y", PHOTO))
    assert (await stage.refused(named("y"), max_item_bytes=len(photo) - 1)).code == "media_too_large"


# -- deadline and cancellation ----------------------------------------------------------------------------------------
async def test_passed_deadline_costs_nothing(stage: Stage) -> None:
    with pytest.raises(DeadlineError):
        await stage.prepare("http://media.test/a", deadline_s=999.0)
    assert stage.fetcher.fetched == []


async def test_deadline_stops_a_fetch(stage: Stage) -> None:
    stage.fetcher.gate.clear()
    with pytest.raises(DeadlineError):
        await stage.prepare("http://media.test/a", deadline_s=stage.now_s + 0.05)
    assert stage.fetcher.cancelled == 1


async def test_cancelling_stops_fetches(stage: Stage) -> None:
    stage.fetcher.gate.clear()
    task = asyncio.create_task(stage.prepare("http://media.test/a", "http://media.test/b"))
    await reached(lambda: len(stage.fetcher.fetched) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.fetcher.cancelled == 2
    assert not stage.workers.processed


# -- videos -----------------------------------------------------------------------------------------------------------
def video(**options: Any) -> MediaInput:
    return MediaInput(modality="video", param="v", **options)


async def test_video_beside_a_picture(stage: Stage) -> None:
    prepared = await stage.prepare(RED, video(url=data_uri(clip(num_frames=10, fps=5), "video/mp4")))
    picture, item = prepared.items
    assert item.modality == "video"
    assert item.grid[0] == 2
    assert item.num_slots == item.num_patches // 4
    assert stage.patches(item.patches).shape == (item.num_patches, 3 * 2 * 14 * 14)
    assert item.seconds_per_grid == pytest.approx(1.0)
    assert item.offset > picture.end
    assert picture.seconds_per_grid == 0.0


async def test_repeated_video_is_not_decoded(stage: Stage) -> None:
    url = data_uri(clip(num_frames=8, fps=4), "video/mp4")
    first = (await stage.prepare(video(url=url))).items[0]
    repeat = (await stage.prepare(video(url=url))).items[0]
    other = (await stage.prepare(video(url=url), mm_processor_kwargs={"num_frames": 6})).items[0]
    assert repeat.patches is None
    assert repeat.identity == first.identity != other.identity
    assert (first.grid[0], other.grid[0]) == (2, 3)
    remade = await stage.core.make_patches(repeat)
    assert np.array_equal(stage.patches(remade), stage.patches(first.patches))


async def test_video_options_leave_pictures_alone(stage: Stage) -> None:
    plain = (await stage.prepare(PHOTO)).items[0]
    again = await stage.prepare(PHOTO, mm_processor_kwargs={"num_frames": 6})
    assert again.items[0].identity == plain.identity
    assert again.cache_results == {"alias:hit": 1}


async def test_video_as_a_list_of_pictures(stage: Stage) -> None:
    frames = tuple(data_uri(encoded(noise(60, 40, seed))) for seed in range(4))
    item = (await stage.prepare(video(frames=frames))).items[0]
    assert item.grid[0] == 2
    repeat = (await stage.prepare(video(frames=frames))).items[0]
    assert np.array_equal(stage.patches(await stage.core.make_patches(repeat)), stage.patches(item.patches))
    backwards = (await stage.prepare(video(frames=frames[::-1]))).items[0]
    assert backwards.identity != item.identity


async def test_steps_of_a_video_become_items_of_their_own(tmp_path: Path) -> None:
    stage = Stage(write_model_folder(tmp_path, model_type="qwen3_vl", patch_size=16))
    frames = tuple(data_uri(encoded(noise(64, 96, seed))) for seed in range(5))
    prepared = await stage.prepare(RED, video(frames=frames))
    _, *steps = prepared.items
    assert [step.grid for step in steps] == [(1, *steps[0].grid[1:])] * 2
    assert len({step.identity for step in steps}) == 2
    pad = prepared.token_ids[steps[0].offset]
    for step in steps:
        assert set(prepared.token_ids[step.offset : step.end]) == {pad}
        assert stage.patches(step.patches).shape == (step.num_patches, 3 * 2 * 16 * 16)
    assert prepared.token_ids.count(pad) == sum(step.num_slots for step in steps)
    again = (await stage.prepare(RED, video(frames=frames))).items[1:]
    for step, repeat in zip(steps, again, strict=True):
        assert (repeat.patches, repeat.identity, repeat.offset) == (None, step.identity, step.offset)
        remade = stage.patches(await stage.core.make_patches(repeat))
        assert np.array_equal(remade, stage.patches(step.patches))


async def test_bad_frame_is_refused(stage: Stage) -> None:
    frames = (data_uri(encoded(noise(60, 40))), data_uri(png_claiming(30_000, 30_000)))
    error = await stage.refused(video(frames=frames))
    assert (error.code, error.param) == ("image_too_large", "v")
