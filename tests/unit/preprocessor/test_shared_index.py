"""Two preprocessor cores that share nothing but records in tiers: what one has seen, the other need not do again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from cache_service.codec import encode_record, read_header
from cache_service.identity import EncodedDigest, salted_namespace, uuid_key
from cache_service.memory_tier import MemoryTier
from cache_service.negative_cache import NegativeResult
from cache_service.tier import Lookup, LookupResult
from deployments.errors import PayloadLostError
from deployments.messages import MediaInput
from deployments.preprocessor import preprocess
from deployments.preprocessor.media import Inspection
from deployments.preprocessor.shared_index import KnownMedia, NamedMedia, SharedIndex
from tests.unit.preprocessor.pictures import clip, data_uri, encoded, noise
from tests.unit.preprocessor.test_preprocess import RED, Stage, named

BLUE = data_uri(encoded(Image.new("RGB", (64, 100), (10, 20, 200))))
KEY = EncodedDigest(bytes(range(32)))
VIDEO = KnownMedia(
    content=b"c" * 32,  # type: ignore[arg-type]
    inspection=Inspection(size=(64, 48), frame_indices=(0, 7), frame_seconds=(0.0, 0.7), seconds_per_frame=0.7),
)


class SharedTier(MemoryTier):
    """Memory that several cores see, as they would see Redis; may be down."""

    in_process = False
    down = False

    async def get_many(self, keys: Sequence[bytes]) -> list[Lookup]:
        return [Lookup(LookupResult.ERROR)] * len(keys) if self.down else await super().get_many(keys)

    async def put(self, key: bytes, value: bytes | memoryview) -> bool:
        return not self.down and await super().put(key, value)

    async def delete_now(self, key: bytes) -> bool:
        await self.delete(key)
        return not self.down


class Cluster:
    """Tiers, and as many replicas as are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.aliases, self.refusals, self.names = (SharedTier(1 << 20) for _ in range(3))

    def index(self) -> SharedIndex:
        return SharedIndex(aliases=self.aliases, refusals=self.refusals, names=self.names)

    def replica(self) -> Stage:
        stage = Stage(self.folder)
        stage.core._index = self.index()
        return stage

    def set_down(self, down: bool) -> None:
        self.aliases.down = self.refusals.down = self.names.down = down


@pytest.fixture
def cluster(model_folder: Path) -> Cluster:
    return Cluster(model_folder)


async def test_seen_by_one_replica_is_not_decoded_by_the_other(cluster: Cluster) -> None:
    one, other = cluster.replica(), cluster.replica()
    (made,) = (await one.prepare(RED)).items
    (found,) = (await other.prepare(RED)).items
    assert (one.workers.processed, other.workers.processed, other.workers.inspected) == (1, 0, 0)
    assert found.identity == made.identity
    assert (found.grid, found.num_slots, found.processing) == (made.grid, made.num_slots, made.processing)
    assert found.patches is None  # made on demand, from bytes that came with this very request
    assert len(other.patches(await other.core.make_patches(found))) == found.num_patches


async def test_videos_travel_with_their_frames(cluster: Cluster) -> None:
    film = MediaInput(modality="video", param="m[0]", url=data_uri(clip(num_frames=8), "video/mp4"))
    one, other = cluster.replica(), cluster.replica()
    (made,) = (await one.prepare(film)).items
    (found,) = (await other.prepare(film)).items
    assert other.workers.processed == 0
    assert (found.identity, found.seconds_per_grid) == (made.identity, made.seconds_per_grid)
    assert found.processing == made.processing


async def test_record_is_asked_for_once(cluster: Cluster) -> None:
    one, other = cluster.replica(), cluster.replica()
    await one.prepare(RED)
    for _ in range(3):
        await other.prepare(RED)
    assert other.core.stats().shared_lookups["alias", "hit"] == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"namespace": "tenant:a"}, {"namespace": "tenant:b"}),
        ({"namespace": "tenant:a"}, {}),
        ({"cache_salt": "x"}, {"cache_salt": "y"}),
        ({"cache_salt": "x"}, {}),
    ],
)
async def test_tenants_and_salts_see_nothing_of_each_other(
    cluster: Cluster, first: dict[str, str], second: dict[str, str]
) -> None:
    one, other = cluster.replica(), cluster.replica()
    (mine,) = (await one.prepare(named("u", RED), **first)).items
    (yours,) = (await other.prepare(RED, **second)).items
    assert other.workers.processed == 1
    assert mine.identity != yours.identity
    assert (await other.refused(named("u"), **second)).code == "unknown_media_uuid"
    assert sum(other.core.stats().shared_lookups.get((kind, "hit"), 0) for kind in ("alias", "uuid")) == 0


async def test_operators_find_salted_records_under_the_tenant(cluster: Cluster) -> None:
    index = cluster.index()
    await index.add(salted_namespace("tenant:a", "x"), KEY, VIDEO)
    await index.add("tenant:a", EncodedDigest(bytes(32)), VIDEO)
    labels = {
        read_header(lookup.value).namespace_label
        for lookup in await cluster.aliases.get_many([KEY, bytes(32)])
        if lookup.value is not None
    }
    assert len(labels) == 1


async def test_verdict_of_one_replica_holds_at_the_other(cluster: Cluster) -> None:
    broken = data_uri(encoded(noise(64, 64))[:-400])
    one, other = cluster.replica(), cluster.replica()
    first, second = await one.refused(broken), await other.refused(broken)
    assert (second.code, second.message) == (first.code, first.message)
    assert (other.workers.inspected, other.workers.processed) == (0, 0)


async def test_other_decoders_do_not_vouch_for_each_other(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.replica().prepare(RED)
    monkeypatch.setattr(preprocess, "decoder_versions", lambda: "pillow=another")
    other = cluster.replica()
    await other.prepare(RED)
    assert other.workers.processed == 1


# -- uuids ------------------------------------------------------------------------------------------------------------
async def test_uuid_alone_works_where_the_picture_was_never_seen(cluster: Cluster) -> None:
    one, other = cluster.replica(), cluster.replica()
    (made,) = (await one.prepare(named("u", RED))).items
    (found,) = (await other.prepare(named("u"))).items
    assert (found.identity, found.num_slots) == (made.identity, made.num_slots)
    assert (found.patches, found.source) == (None, None)


async def test_uuid_without_bytes_or_embedding_becomes_unknown(cluster: Cluster) -> None:
    """The encoder asks for patches only when no cache has the embedding; the request is then prepared again."""
    one, other = cluster.replica(), cluster.replica()
    await one.prepare(named("u", RED))
    (found,) = (await other.prepare(named("u"))).items
    with pytest.raises(PayloadLostError):
        await other.core.make_patches(found)
    assert (await other.refused(named("u"))).code == "unknown_media_uuid"
    assert (await one.prepare(named("u"))).items[0].source is not None  # who has the bytes goes on serving them


async def test_newest_payload_wins_everywhere(cluster: Cluster) -> None:
    one, other = cluster.replica(), cluster.replica()
    await one.prepare(named("u", RED))
    (blue,) = (await other.prepare(named("u", BLUE))).items
    assert (await one.prepare(named("u"))).items[0].identity == blue.identity
    (red,) = (await one.prepare(named("u", RED))).items
    assert (await other.prepare(named("u"))).items[0].identity == red.identity


async def test_uuid_alone_needs_the_options_it_came_with(cluster: Cluster) -> None:
    film = MediaInput(modality="video", param="m[0]", uuid="u", url=data_uri(clip(num_frames=8), "video/mp4"))
    one, other = cluster.replica(), cluster.replica()
    await one.prepare(film, mm_processor_kwargs={"fps": 2})
    bare = MediaInput(modality="video", param="m[0]", uuid="u")
    assert (await other.prepare(bare, mm_processor_kwargs={"fps": 2})).items
    assert (await other.refused(bare, mm_processor_kwargs={"fps": 1})).code == "unknown_media_uuid"


# -- trouble ----------------------------------------------------------------------------------------------------------
async def test_without_the_tiers_each_replica_knows_its_own(cluster: Cluster) -> None:
    cluster.set_down(True)
    one, other = cluster.replica(), cluster.replica()
    await one.prepare(named("u", RED))
    await one.prepare(named("u"))
    assert (one.workers.processed, one.core.stats().alias.hits) == (1, 1)
    assert (await other.refused(named("u"))).code == "unknown_media_uuid"
    await other.prepare(RED)
    assert other.workers.processed == 1
    assert other.core.stats().shared_lookups["alias", "error"] == 1


RECORD = {
    "content": "63" * 32,
    "size": [64, 48],
    "frame_indices": [],
    "frame_seconds": [],
    "seconds_per_frame": 0.0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"content": "63" * 31},
        {"content": 7},
        {"content": "zz" * 32},
        {"size": [64]},
        {"size": [0, 48]},
        {"size": [True, 48]},
        {"size": [64.5, 48]},
        {"size": None},
        {"frame_indices": [1]},
        {"frame_indices": [-1], "frame_seconds": [0.0]},
        {"frame_seconds": "x"},
        {"seconds_per_frame": "0"},
    ],
)
async def test_record_of_the_wrong_form_is_deleted(cluster: Cluster, change: dict[str, object]) -> None:
    index = cluster.index()
    await cluster.aliases.put(KEY, encode_record(KEY, RECORD))
    assert isinstance(await index.find(KEY), KnownMedia)
    await cluster.aliases.put(KEY, encode_record(KEY, RECORD | change))
    assert await index.find(KEY) is None
    assert index.lookups()["alias", LookupResult.CORRUPT] == 1
    assert (await cluster.aliases.get_many([KEY]))[0].result is LookupResult.MISS


async def test_record_of_another_key_is_refused(cluster: Cluster) -> None:
    index = cluster.index()
    await cluster.aliases.put(KEY, encode_record(bytes(32), RECORD))
    assert await index.find(KEY) is None


async def test_records_come_back_as_they_went(cluster: Cluster) -> None:
    index = cluster.index()
    await index.add("n", KEY, VIDEO)
    assert await index.find(KEY) == VIDEO
    name = uuid_key("n", "u")
    await index.bind_name("n", name, NamedMedia(VIDEO, "settings"))
    assert await index.find_name(name) == NamedMedia(VIDEO, "settings")
    await index.forget_name(name)
    assert await index.find_name(name) is None


async def test_a_decoded_file_beats_an_old_refusal(cluster: Cluster) -> None:
    index = cluster.index()
    await index.refuse("n", KEY, NegativeResult("invalid_image", "no"))
    assert await index.find(KEY) == NegativeResult("invalid_image", "no")
    await index.add("n", KEY, VIDEO)
    assert await index.find(KEY) == VIDEO


async def test_bytes_are_counted(cluster: Cluster) -> None:
    index = cluster.index()
    await index.add("n", KEY, VIDEO)
    written = index.transferred_bytes()["write"]
    await index.find(KEY)
    assert index.transferred_bytes() == {"write": written, "read": written}
    assert 0 < written < 1024
