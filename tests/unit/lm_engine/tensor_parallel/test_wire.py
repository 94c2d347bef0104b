"""What the other ranks read is what rank 0 said, whatever becomes of the block tables in between."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.identity import EmbeddingIdentity
from deployments.lm_engine.plan import EmbedSlice, SequenceChunk
from deployments.lm_engine.tensor_parallel import wire

INT32 = st.integers(0, 2**31 - 1)
TOKENS = INT32 | st.integers(-300, -1)
"""Negative ones stand for tokens that only the device knows yet."""
IDENTITIES = st.binary(min_size=1, max_size=32).map(EmbeddingIdentity)


@st.composite
def steps(draw: st.DrawFn) -> list[list[SequenceChunk]]:
    """Steps in which tables grow, shrink, are replaced, and names come back."""
    tables: dict[str, list[int]] = {}
    made = []
    for _ in range(draw(st.integers(1, 6))):
        names = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True))
        chunks = []
        for name in names:
            table = tables.setdefault(name, draw(st.lists(INT32, min_size=1, max_size=5)))
            change = draw(st.sampled_from(["none", "grow", "replace", "shrink", "edit"]))
            if change == "grow":
                table.extend(draw(st.lists(INT32, min_size=1, max_size=3)))
            elif change == "replace":
                table[:] = draw(st.lists(INT32, min_size=1, max_size=5))
            elif change == "shrink":
                del table[1:]
            elif change == "edit":
                table[0] = draw(INT32)
            count = draw(st.integers(1, 4))
            embeds = draw(st.lists(st.builds(EmbedSlice, IDENTITIES, INT32, INT32, INT32), max_size=2))
            chunks.append(
                SequenceChunk(
                    name, draw(INT32), draw(st.lists(TOKENS, min_size=count, max_size=count)),
                    np.arange(3 * count, dtype=np.int32).reshape(3, count) + draw(st.integers(0, 100)),
                    list(table), draw(st.booleans()), tuple(embeds),
                )
            )  # fmt: skip
        made.append(chunks)
    return made


@given(steps(), st.integers(1, 8), st.integers(0, 1000))
def test_chunks_arrive_as_they_were(made: list[list[SequenceChunk]], max_tables: int, num_previous: int) -> None:
    encoder, decoder = wire.PlanEncoder(max_tables), wire.PlanDecoder()
    for chunks in made:
        message = encoder.encode(chunks, num_previous)
        assert wire.kind_of(message) is wire.Kind.RUN
        run = decoder.decode(bytearray(message))
        assert run.num_previous == num_previous
        read = run.chunks
        assert len(read) == len(chunks)
        for ours, theirs in zip(chunks, read, strict=True):
            assert list(theirs.block_ids) == list(ours.block_ids)
            assert list(theirs.token_ids) == list(ours.token_ids)
            assert np.array_equal(theirs.positions, ours.positions)
            assert (theirs.start, theirs.samples, theirs.embeds) == (ours.start, ours.samples, ours.embeds)
            assert theirs.num_tokens == ours.num_tokens


def test_nothing_that_a_runner_reads_is_left_behind() -> None:
    """A new field must be sent, or be known to be of no use to the device."""
    assert {field.name for field in dataclasses.fields(SequenceChunk)} == {
        "sequence_id", "start", "token_ids", "positions", "block_ids", "samples", "embeds",
    }  # fmt: skip


def test_only_what_is_new_of_a_table_is_sent() -> None:
    encoder = wire.PlanEncoder(4)

    def size(blocks: int) -> int:
        chunk = SequenceChunk("a", blocks - 1, [1], np.zeros((3, 1), np.int32), list(range(blocks)), True)
        return len(encoder.encode([chunk]))

    first, same, grown = size(1000), size(1000), size(1001)
    assert first - same == 4 * 1000
    assert grown - same == 4


@given(IDENTITIES, INT32)
def test_an_embedding_is_announced(identity: EmbeddingIdentity, num_slots: int) -> None:
    message = wire.encode_put(identity, num_slots)
    assert wire.kind_of(message) is wire.Kind.PUT_EMBEDDING
    assert wire.decode_put(message) == (identity, num_slots)


@given(st.lists(IDENTITIES, max_size=4))
def test_embeddings_are_dropped(identities: list[EmbeddingIdentity]) -> None:
    message = wire.encode_drop(identities)
    assert wire.kind_of(message) is wire.Kind.DROP_EMBEDDINGS
    assert wire.decode_drop(message) == tuple(identities)


@given(st.integers(-(2**63), 2**63 - 1), st.text())
def test_values_and_faults(value: int, text: str) -> None:
    assert wire.decode_minimum(wire.encode_minimum(value)) == value
    assert wire.decode_fault(wire.encode_fault(text)) == text
    assert wire.kind_of(wire.encode_clear()) is wire.Kind.CLEAR_EMBEDDINGS


def test_no_tables_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tables must be at least 1; it is 0"):
        wire.PlanEncoder(0)
