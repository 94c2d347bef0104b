"""The ranks' parts make up the whole, nothing twice that should be once, and what cannot be split is refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deployments.lm_engine.tensor_parallel.shards import DecoderShape, Shards

SEVEN_B = DecoderShape(num_heads=28, num_kv_heads=4, head_dim=128, intermediate_size=18944, vocab_size=152064)


@st.composite
def splits(draw: st.DrawFn) -> tuple[DecoderShape, int]:
    size = draw(st.integers(1, 8))
    kv_heads = draw(st.integers(1, 8))
    assume(kv_heads % size == 0 or size % kv_heads == 0)
    per_kv_head = draw(st.integers(1, 4)) * max(1, size // kv_heads)
    shape = DecoderShape(
        num_heads=kv_heads * per_kv_head,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 16])),
        intermediate_size=size * draw(st.integers(1, 9)),
        vocab_size=draw(st.integers(size, 100)),
    )
    return shape, size


@given(splits())
def test_parts_side_by_side_are_the_whole(split: tuple[DecoderShape, int]) -> None:
    shape, size = split
    ranks = [Shards(shape, rank, size) for rank in range(size)]
    sizes = {
        "self_attn.q_proj.weight": shape.num_heads * shape.head_dim,
        "self_attn.o_proj.weight": shape.num_heads * shape.head_dim,
        "mlp.gate_proj.weight": shape.intermediate_size,
        "mlp.up_proj.bias": shape.intermediate_size,
        "mlp.down_proj.weight": shape.intermediate_size,
        "lm_head.weight": shape.vocab_size,
    }
    for name, whole in sizes.items():
        parts = [rank.of(f"model.layers.3.{name}" if name != "lm_head.weight" else name) for rank in ranks]
        assert all(part is not None and part.size == whole for part in parts)
        covered = [index for part in parts if part is not None for index in range(part.start, part.stop)]
        assert covered == list(range(whole))
        assert {part.dim for part in parts if part is not None} == {int(name.split(".")[-2] in ("o_proj", "down_proj"))}


@given(splits())
def test_a_rank_has_the_kv_heads_of_its_query_heads(split: tuple[DecoderShape, int]) -> None:
    shape, size = split
    per_kv_head = shape.num_heads // shape.num_kv_heads
    for rank in range(size):
        shards = Shards(shape, rank, size)
        queries, keys = shards.of("self_attn.q_proj.weight"), shards.of("self_attn.k_proj.weight")
        assert queries is not None
        assert keys is not None
        assert shards.of("self_attn.v_proj.bias") == keys
        own = range(queries.start // shape.head_dim, queries.stop // shape.head_dim)
        held = range(keys.start // shape.head_dim, keys.stop // shape.head_dim)
        assert (len(own), len(held)) == (shards.num_heads, shards.num_kv_heads)
        # Attention pairs its heads by position alone: head i of the rank reads its KV head i // (heads per KV head).
        for place, head in enumerate(own):
            assert head // per_kv_head == held[place // (shards.num_heads // shards.num_kv_heads)]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "x.o_proj.bias", "x.q_norm.weight"])
def test_what_is_not_split_is_whole(name: str) -> None:
    assert Shards(SEVEN_B, 1, 2).of(name) is None


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, r"tensor_parallel_size is 3, .* num_attention_heads 28"),
        (8, r"tensor_parallel_size is 8, .* num_attention_heads 28"),
        (7, r"tensor_parallel_size is 7, .* intermediate_size 18944"),
        (14, r"tensor_parallel_size is 14, .* intermediate_size 18944"),
    ],
)
def test_what_does_not_divide_is_named(size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shards(SEVEN_B, 0, size)


def test_kv_heads_that_do_not_fit_are_named() -> None:
    shape = DecoderShape(num_heads=12, num_kv_heads=6, head_dim=8, intermediate_size=64, vocab_size=64)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 4, .* num_key_value_heads 6 or be a multiple"):
        Shards(shape, 0, 4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_beyond_the_gang_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"\[0, 2\)"):
        Shards(SEVEN_B, rank, 2)
