"""The SDPA backend against attention written out over whole sequences."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.kv_tensors import KVLayout, KVTensors
from deployments.lm_engine.plan import SequenceChunk

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 2
SCALE = 0.3


def make_kv(block_size: int, num_blocks: int) -> KVTensors:
    layout = KVLayout(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype=torch.float32
    )
    return KVTensors(layout, num_blocks)


def chunk(name: str, start: int, num_tokens: int, block_ids: list[int]) -> SequenceChunk:
    positions = np.arange(start, start + num_tokens, dtype=np.int32)[None]
    return SequenceChunk(name, start, [0] * num_tokens, positions, block_ids, True)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of a whole sequence, [tokens, heads, head_dim] each, in float64."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (window or len(k) + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).float()


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("seed", range(8))
def test_ragged_batches_equal_whole_sequences(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    block_size = rng.choice([1, 3, 4, 16])
    lengths = [rng.randint(1, 40) for _ in range(5)]
    num_blocks = sum(-(-length // block_size) for length in lengths)
    free = rng.sample(range(num_blocks + 5), num_blocks)
    tables = {str(i): [free.pop() for _ in range(-(-length // block_size))] for i, length in enumerate(lengths)}
    whole = {
        name: [torch.randn(lengths[int(name)], heads, HEAD_DIM, generator=generator) for heads in (HEADS, 2, 2)]
        for name in tables
    }
    kv = make_kv(block_size, num_blocks + 5)
    kv._pools.fill_(float("nan"))  # what a former owner may have left
    backend = SdpaBackend(kv)
    done = dict.fromkeys(tables, 0)
    while any(done[name] < lengths[int(name)] for name in tables):
        chunks = []
        for name in tables:
            left = lengths[int(name)] - done[name]
            size = min(left, rng.choice([0, 1, 1, 2, 5, 20]))
            if size:
                chunks.append(chunk(name, done[name], size, tables[name]))
        if not chunks:
            continue
        batch = backend.prepare(chunks)
        parts = [slice(c.start, c.start + c.num_tokens) for c in chunks]
        q, k, v = (
            torch.cat([whole[c.sequence_id][which][part] for c, part in zip(chunks, parts, strict=True)])
            for which in range(3)
        )
        for layer in range(LAYERS):
            out = batch.attend(layer, q, k, v, scale=SCALE, sliding_window=window)
            row = 0
            for c, part in zip(chunks, parts, strict=True):
                q_all, k_all, v_all = (tensor[: part.stop] for tensor in whole[c.sequence_id])
                expected = reference(q_all, k_all, v_all, window)[part]
                torch.testing.assert_close(out[row : row + c.num_tokens], expected, atol=1e-5, rtol=1e-5)
                row += c.num_tokens
        for c in chunks:
            done[c.sequence_id] += c.num_tokens


def test_a_former_owners_garbage_in_a_blocks_tail_is_harmless() -> None:
    kv = make_kv(block_size=4, num_blocks=4)
    kv._pools.fill_(float("nan"))
    backend = SdpaBackend(kv)
    q, k, v = torch.ones(5, HEADS, HEAD_DIM), torch.ones(5, KV_HEADS, HEAD_DIM), torch.ones(5, KV_HEADS, HEAD_DIM)
    backend.prepare([chunk("a", 0, 5, [2, 1])]).attend(0, q, k, v, scale=SCALE, sliding_window=None)
    batch = backend.prepare([chunk("a", 5, 1, [2, 1])])
    out = batch.attend(0, q[:1], k[:1], v[:1], scale=SCALE, sliding_window=None)
    torch.testing.assert_close(out, torch.ones(1, HEADS, HEAD_DIM))


def test_layout_counts_bytes() -> None:
    kv = make_kv(block_size=4, num_blocks=3)
    assert kv.layout.bytes_per_block * 3 == kv.num_bytes == LAYERS * 2 * 12 * KV_HEADS * HEAD_DIM * 4
