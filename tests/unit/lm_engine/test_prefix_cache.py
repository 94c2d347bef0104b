"""What may share KV and what must not, by key and by the blocks found."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cache_service.identity import BlockKey, EmbeddingIdentity, _digest, block_key
from deployments.lm_engine.kv_manager import KVManager
from deployments.lm_engine.prefix_cache import PrefixCache
from deployments.lm_engine.request import Sequence
from tests.unit.lm_engine.host_side import Part, sequence

BLOCK = 4


def computed(kv: KVManager, seq: Sequence) -> Sequence:
    """Compute and cache all of a sequence."""
    kv.allocate(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    kv.commit(seq)
    return seq


def hit_tokens(first: Sequence, second: Sequence) -> int:
    kv = KVManager(64, BLOCK)
    computed(kv, first)
    prefix = kv.find_prefix(second)
    assert prefix == first.block_ids[: len(prefix)]
    return BLOCK * len(prefix)


TEXT = list(range(1, 9))


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        pytest.param([[*TEXT, 9]], [[*TEXT, 9]], 8, id="equal text"),
        pytest.param([TEXT], [TEXT], 4, id="the last token is always computed"),
        pytest.param([[*TEXT, 9]], [[*TEXT[:5], 0, 0, 0, 9]], 4, id="text differs in the second block"),
        pytest.param([[1, 2], (5, 6), [3]], [[1, 2], (5, 6), [3]], 8, id="same picture hits"),
        pytest.param([[1, 2], (5, 6), [3]], [[1, 2], (6, 6), [3]], 0, id="another picture, from the first block on"),
        pytest.param(
            [[1, 2, 3, 4], (5, 6), [3]], [[1, 2, 3, 4], (6, 6), [3]], 4, id="text before the picture is shared"
        ),
        pytest.param([[9], (5, 11), [1]], [[9, 9], (5, 10), [1]], 0, id="same picture at another offset in the block"),
        pytest.param([(5, 4), (6, 4), [1]], [(6, 4), (5, 4), [1]], 0, id="same pictures swapped"),
        pytest.param([(5, 4), TEXT], [(6, 4), TEXT], 0, id="text after another picture is not shared"),
        pytest.param([(5, 8), [1]], [(5, 4), (5, 4), [1]], 4, id="one picture, twice or once long"),
    ],
)
def test_what_is_shared(first: list[Part], second: list[Part], shared: int) -> None:
    assert hit_tokens(sequence("a", *first), sequence("b", *second)) == shared


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": "n"},
        {"cache_salt": "s"},
        {"adapter": "lora"},
        # Namespace and salt must not run together: ("ab", "c") is not ("a", "bc").
        {"namespace": "a", "cache_salt": "bc"},
    ],
)
def test_nothing_is_shared_across_tenants_salts_and_adapters(other: dict[str, str]) -> None:
    own = {"namespace": "ab", "cache_salt": "c"}
    assert hit_tokens(sequence("a", TEXT, [9], **own), sequence("b", TEXT, [9], **own)) == 8
    assert hit_tokens(sequence("a", TEXT, [9], **own), sequence("b", TEXT, [9], **other)) == 0


def test_a_block_in_the_middle_of_a_picture_names_it_with_a_negative_offset() -> None:
    """Two pictures of equal length: only the identity tells blocks apart that hold nothing but placeholders."""
    kv = KVManager(64, BLOCK)
    cache = PrefixCache(kv.pool, BLOCK)
    one, other = sequence("a", (5, 12), [1]), sequence("b", (6, 12), [1])
    assert cache.key(one, 1) != cache.key(other, 1)
    assert cache.key(one, 0) != cache.key(one, 1)
    # The same block contents behind another parent is another key.
    assert cache.key(sequence("c", [1, 2, 3, 4], (5, 4)), 1) != cache.key(sequence("d", [1, 2, 3, 5], (5, 4)), 1)


def test_only_blocks_full_of_computed_positions_are_found() -> None:
    kv = KVManager(64, BLOCK)
    first = sequence("a", TEXT, [9])
    kv.allocate(first, first.num_tokens)
    first.num_computed_tokens = 7
    kv.commit(first)
    assert len(kv.find_prefix(sequence("b", TEXT, [9]))) == 1


def test_a_hole_in_the_chain_ends_the_hit() -> None:
    kv = KVManager(4, BLOCK)
    first = computed(kv, sequence("a", TEXT, [9, 10, 11, 12], [13]))
    kv.free(first)
    # Four blocks: the partial one goes first, then the tail of the prefix.
    kv.pool.allocate(2)
    assert len(kv.find_prefix(sequence("b", TEXT, [9, 10, 11, 12], [13]))) == 2


def test_output_tokens_are_cached_too() -> None:
    kv = KVManager(64, BLOCK)
    first = sequence("a", [1, 2, 3])
    first.token_ids += [4, 5, 6, 7, 8, 9]
    computed(kv, first)
    assert len(kv.find_prefix(sequence("b", TEXT, [9]))) == 2


@given(
    st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
    st.lists(st.integers(0, 2**32 - 1), max_size=16),
    st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(-300_000, 300_000)), max_size=3),
    st.text(max_size=3),
    st.text(max_size=3),
)
def test_a_block_key_is_the_digest_of_its_typed_fields(
    parent: bytes | None, tokens: list[int], items: list[tuple[bytes, int]], adapter: str, salt: str
) -> None:
    """`block_key` is written out for speed; `_digest` is the plain form of the same bytes."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    plain = _digest("kv", (parent, packed, [field for item in items for field in item], adapter, salt))
    named = [(EmbeddingIdentity(identity), offset) for identity, offset in items]
    key = block_key(None if parent is None else BlockKey(parent), tokens, named, adapter=adapter, cache_salt=salt)
    assert key == plain
