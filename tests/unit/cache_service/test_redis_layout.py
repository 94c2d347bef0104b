import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.redis_layout import (
    MANIFEST_BYTES,
    KeyLayout,
    ManifestError,
    is_manifest,
    join_parts,
    parse_manifest,
    split_value,
)

LAYOUT = KeyLayout(kind="embedding")


@given(st.binary(min_size=1, max_size=5000), st.integers(128, 2000))
def test_split_and_join(value: bytes, max_value_bytes: int) -> None:
    split = split_value(value, max_value_bytes)
    assert max(len(split.head), *(len(part) for part in split.rest), 0) <= max_value_bytes
    assert is_manifest(split.head)
    manifest = parse_manifest(split.head, max_bytes=len(value))
    assert manifest == split.manifest
    assert join_parts(manifest, split.head, [bytes(part) for part in split.rest]) == value


def test_two_writes_of_one_value_have_different_parts() -> None:
    first, second = split_value(bytes(500), 128), split_value(bytes(500), 128)
    assert first.manifest.write_id != second.manifest.write_id
    assert LAYOUT.part(b"k", first.manifest.write_id, 1) != LAYOUT.part(b"k", second.manifest.write_id, 1)


def test_damaged_manifests_are_refused() -> None:
    head = split_value(bytes(500), 128).head
    for position in range(MANIFEST_BYTES):
        damaged = bytearray(head)
        damaged[position] ^= 0xFF
        try:
            manifest = parse_manifest(bytes(damaged), max_bytes=500)
        except ManifestError:
            continue
        # What got through names other parts (write id), or is not looked at.
        assert manifest.total_bytes == 500
        assert manifest.part_bytes == 64
    for length in range(MANIFEST_BYTES):
        with pytest.raises(ManifestError):
            parse_manifest(head[:length], max_bytes=500)
    with pytest.raises(ManifestError):
        parse_manifest(head, max_bytes=499)


def test_parts_of_other_lengths_are_refused() -> None:
    split = split_value(bytes(500), 128)
    parts = [bytes(part) for part in split.rest]
    with pytest.raises(ManifestError):
        join_parts(split.manifest, split.head[:-1], parts)
    with pytest.raises(ManifestError):
        join_parts(split.manifest, split.head, [*parts[:-1], parts[-1] + b"x"])


def test_names_are_apart_and_share_a_hash_slot() -> None:
    key = bytes(32)
    names = [LAYOUT.value(key), LAYOUT.part(key, b"id", 1), LAYOUT.lease(key), LAYOUT.fence(key)]
    names += [KeyLayout(kind="item").value(key), KeyLayout(kind="embedding", schema=99).value(key)]
    names += [KeyLayout(kind="embedding", prefix="other").value(key), KeyLayout(kind="item").lease(key)]
    assert len(set(names)) == len(names)
    assert {name[name.index(b"{") : name.index(b"}") + 1] for name in names} == {b"{" + b"00" * 32 + b"}"}


def test_key_of_a_name() -> None:
    key = bytes(range(32))
    assert LAYOUT.key_of(LAYOUT.value(key)) == key
    for name in (LAYOUT.part(key, b"id", 1), LAYOUT.lease(key), b"", LAYOUT.value(key)[:-2] + b"z}"):
        assert LAYOUT.key_of(name) is None


@pytest.mark.parametrize(
    "options", [{"kind": ""}, {"kind": "a:b"}, {"kind": "a*"}, {"kind": "lease"}, {"kind": "a", "prefix": "x{"}]
)
def test_names_that_would_confuse_are_refused(options: dict) -> None:
    with pytest.raises(ValueError):
        KeyLayout(**options)
