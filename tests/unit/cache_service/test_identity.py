import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cache_service.identity import (
    DIGEST_BYTES,
    BlockKey,
    ContentDigest,
    EffectiveProcessing,
    EmbeddingIdentity,
    EncoderFingerprint,
    ItemIdentity,
    block_key,
    content_digest,
    embedding_identity,
    encoded_digest,
    item_identity,
    salted_namespace,
    unsalted_namespace,
    uuid_key,
)

DIGESTS = st.binary(min_size=32, max_size=32)
TEXT = st.text(max_size=8)
FLOATS = st.floats(allow_nan=False)
SIZES = st.integers(1, 10_000)

PROCESSING: dict[str, st.SearchStrategy[Any]] = {
    "resized_height": SIZES,
    "resized_width": SIZES,
    "patch_size": SIZES,
    "merge_size": SIZES,
    "temporal_patch_size": SIZES,
    "resample": TEXT,
    "image_mean": st.tuples(FLOATS, FLOATS, FLOATS),
    "image_std": st.tuples(FLOATS, FLOATS, FLOATS),
    "rescale_factor": FLOATS,
    "frame_indices": st.lists(st.integers(0, 1000), max_size=4).map(tuple),
    "frame_seconds": st.lists(FLOATS, max_size=4).map(tuple),
    "processor_revision": TEXT,
}
FINGERPRINT = {field.name: TEXT for field in dataclasses.fields(EncoderFingerprint)}


def test_strategies_cover_every_field() -> None:
    assert set(PROCESSING) == {field.name for field in dataclasses.fields(EffectiveProcessing)}


@given(st.data(), TEXT, DIGESTS, st.fixed_dictionaries(PROCESSING))
def test_any_change_of_any_field_changes_the_item(
    data: st.DataObject, namespace: str, content: bytes, options: dict[str, Any]
) -> None:
    processing = EffectiveProcessing(**options)
    key = item_identity(namespace, ContentDigest(content), processing)
    assert len(key) == DIGEST_BYTES
    assert key == item_identity(namespace, ContentDigest(content), EffectiveProcessing(**options))
    name = data.draw(st.sampled_from(sorted(PROCESSING)))
    other = data.draw(PROCESSING[name])
    assume(other != options[name])
    changed = dataclasses.replace(processing, **{name: other})
    assert item_identity(namespace, ContentDigest(content), changed) != key
    assert item_identity(namespace + "x", ContentDigest(content), processing) != key
    assert (
        item_identity(namespace, ContentDigest(bytes(32 - 1) + b"\1" if not any(content) else bytes(32)), processing)
        != key
    )


@given(st.data(), DIGESTS, st.fixed_dictionaries(FINGERPRINT))
def test_any_change_of_any_field_changes_the_embedding(
    data: st.DataObject, item: bytes, options: dict[str, str]
) -> None:
    fingerprint = EncoderFingerprint(**options)
    key = embedding_identity(ItemIdentity(item), fingerprint)
    name = data.draw(st.sampled_from(sorted(FINGERPRINT)))
    other = data.draw(TEXT)
    assume(other != options[name])
    assert embedding_identity(ItemIdentity(item), dataclasses.replace(fingerprint, **{name: other})) != key
    assert embedding_identity(ItemIdentity(bytes(a ^ 1 for a in item)), fingerprint) != key


@given(TEXT, TEXT, TEXT, TEXT)
def test_neighbouring_fields_do_not_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    assume((a, b) != (c, d))
    item = ItemIdentity(bytes(32))
    left = EncoderFingerprint(model_id=a, weights_revision=b, dtype="x")
    right = EncoderFingerprint(model_id=c, weights_revision=d, dtype="x")
    assert embedding_identity(item, left) != embedding_identity(item, right)


def processing(**changes: Any) -> EffectiveProcessing:
    options: dict[str, Any] = {
        "resized_height": 56,
        "resized_width": 84,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "resample": "bicubic",
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "rescale_factor": 1 / 255,
    }
    return EffectiveProcessing(**(options | changes))


def test_equal_processing_shares_however_its_numbers_are_typed() -> None:
    content = ContentDigest(bytes(32))
    plain = item_identity("n", content, processing(image_mean=(0.0, 0.0, 0.0), image_std=(1.0, 1.0, 1.0)))
    typed = processing(
        image_mean=(0, -0.0, np.float64(0)),
        image_std=(1, np.float32(1), True),
        resized_height=np.int64(56),
        resized_width=np.int32(84),
    )
    assert item_identity("n", content, typed) == plain


def test_lists_do_not_run_into_each_other() -> None:
    content = ContentDigest(bytes(32))
    keys = {
        item_identity("n", content, processing(frame_indices=indices, frame_seconds=seconds))
        for indices, seconds in [((), ()), ((0,), ()), ((), (0.0,)), ((0, 1), ()), ((0,), (1.0,)), ((1, 0), ())]
    }
    assert len(keys) == 6
    mean_longer = processing(image_mean=(0.5, 0.5), image_std=(0.5,))
    std_longer = processing(image_mean=(0.5,), image_std=(0.5, 0.5))
    assert item_identity("n", content, mean_longer) != item_identity("n", content, std_longer)


@given(st.integers(1, 60), st.integers(1, 60))
def test_equal_bytes_in_another_shape_or_mode_differ(width: int, height: int) -> None:
    pixels = bytes(width * height)
    key = content_digest("L", (width, height), pixels)
    if width != height:
        assert content_digest("L", (height, width), pixels) != key
    assert content_digest("P", (width, height), pixels) != key
    assert content_digest("L", (width, height), pixels, palette=b"\1") != key
    assert content_digest("L", (width, height), pixels, frame_indices=(0,)) != key
    assert content_digest("L", (width, height), pixels, frame_seconds=(0.0,)) != key


def test_30x150_is_not_150x30() -> None:
    assert content_digest("L", (30, 150), bytes(4500)) != content_digest("L", (150, 30), bytes(4500))


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 100_000])
def test_every_byte_counts_at_any_length(num_bytes: int) -> None:
    data = bytes(num_bytes)
    key = encoded_digest(data)
    assert encoded_digest(data + b"\0") != key
    for position in {0, num_bytes // 2, num_bytes - 1} & set(range(num_bytes)):
        assert encoded_digest(data[:position] + b"\1" + data[position + 1 :]) != key
    assert encoded_digest(memoryview(data)) == key
    assert encoded_digest(np.frombuffer(data, np.uint8).data) == key


def test_alias_depends_on_namespace_and_decode_settings_apart() -> None:
    keys = {
        encoded_digest(b"x"),
        encoded_digest(b"x", namespace="a"),
        encoded_digest(b"x", decode_settings="a"),
        encoded_digest(b"ax"),
    }
    assert len(keys) == 4


def test_kinds_of_key_never_meet() -> None:
    zero = bytes(32)
    keys = [
        encoded_digest(zero),
        content_digest("", (0, 0), zero),
        item_identity("", ContentDigest(zero), processing()),
        embedding_identity(ItemIdentity(zero), EncoderFingerprint(model_id="", weights_revision="", dtype="")),
        block_key(None, ()),
    ]
    assert len(set(keys)) == len(keys)


ITEMS = st.lists(st.tuples(DIGESTS, st.integers(-100, 100)), max_size=3)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=6)


BLOCKS = st.tuples(st.none() | DIGESTS, TOKENS, ITEMS, TEXT, TEXT)


@given(BLOCKS, BLOCKS)
def test_blocks_are_equal_only_if_everything_is(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:

    def key(fields: tuple[Any, ...]) -> BlockKey:
        parent, tokens, items, adapter, salt = fields
        named = [(EmbeddingIdentity(identity), offset) for identity, offset in items]
        return block_key(None if parent is None else BlockKey(parent), tokens, named, adapter=adapter, cache_salt=salt)

    assert (key(left) == key(right)) == (left == right)
    for position in range(5):
        mixed = (*left[:position], right[position], *left[position + 1 :])
        assert (key(mixed) == key(left)) == (mixed == left)


def test_lone_surrogates_of_a_callers_json_are_keys_like_any_other() -> None:
    assert block_key(None, (), cache_salt="\ud800") != block_key(None, (), cache_salt="\udc00")


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        item_identity("n", ContentDigest(bytes(32)), processing(rescale_factor=float("nan")))


@given(st.text(alphabet=st.characters(exclude_characters="\0")), st.text())
def test_salted_namespace_gives_back_the_tenant(namespace: str, salt: str) -> None:
    assert unsalted_namespace(salted_namespace(namespace, salt)) == namespace
    assert salted_namespace(namespace, "") == namespace


@given(
    st.tuples(st.text(alphabet=st.characters(exclude_characters="\0")), st.text()),
    st.tuples(st.text(alphabet=st.characters(exclude_characters="\0")), st.text()),
)
def test_salted_namespaces_and_uuids_never_meet(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (salted_namespace(*one) == salted_namespace(*other)) == (one == other)
    assert (uuid_key(*one) == uuid_key(*other)) == (one == other)


def test_namespace_cannot_forge_a_salt() -> None:
    with pytest.raises(ValueError, match="NUL"):
        salted_namespace("tenant:a\0x", "")
