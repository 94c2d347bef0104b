"""Ragged steps over a paged pool, checked against attention written out over whole sequences in float64."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from deployments.lm_engine.attention import AttentionBackend, HeadNorms, Rotary, rms_norm, rotate
from deployments.lm_engine.kv_tensors import KVLayout, KVTensors
from deployments.lm_engine.plan import SequenceChunk

LAYERS = 2
SCALE = 0.3


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Case:
    heads: Heads
    block_size: int = 16
    window: int | None = None
    lengths: tuple[int, ...] = (40, 1, 23, 7, 33)
    chunks: tuple[int, ...] = (0, 1, 1, 2, 5, 20)
    """Sizes that chunks are drawn from."""
    seed: int = 0
    fused: bool = False
    """Through `attend_qkv`, rotation included."""
    norms: bool = False


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors start as NaN, so that an element nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that some operation has no deterministic form is of no interest here
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of a whole sequence, [tokens, heads, head_dim] each, in float64."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    tokens = torch.arange(len(q), device=q.device)
    distance = tokens[:, None] - tokens
    hidden = (distance < 0) | (distance >= (window or len(k) + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def largest_error(
    case: Case, make_backend: Callable[[KVTensors], AttentionBackend], dtype: torch.dtype, device: str
) -> float:
    """Relative error |out - reference| / |reference| of the worst step; NaN if anything unwritten was used."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    heads = case.heads
    sizes = [-(-length // case.block_size) for length in case.lengths]
    free = rng.sample(range(sum(sizes) + 5), sum(sizes))
    tables = [[free.pop() for _ in range(size)] for size in sizes]
    layout = KVLayout(
        num_layers=LAYERS, num_kv_heads=heads.kv, head_dim=heads.dim, block_size=case.block_size, dtype=dtype
    )
    kv = KVTensors(layout, sum(sizes) + 5, device)
    kv._pools.fill_(float("nan"))  # what a former owner may have left
    backend = make_backend(kv)
    width = (heads.query + 2 * heads.kv) * heads.dim
    whole = [(torch.randn(length, width, generator=generator) * 0.5).to(device, dtype) for length in case.lengths]
    angles = [torch.rand(length, heads.dim // 2, generator=generator) * 6.28 for length in case.lengths]
    rotaries = [
        Rotary(*(torch.cat((half, half), 1).to(device, dtype) for half in (angle.cos(), angle.sin())))
        for angle in angles
    ]
    norms = None
    if case.norms:
        weights = [(1 + 0.1 * torch.randn(heads.dim, generator=generator)).to(device, dtype) for _ in range(2)]
        norms = HeadNorms(weights[0], weights[1], 1e-6)
    expected = [_expected(case, qkv, rotary, norms) for qkv, rotary in zip(whole, rotaries, strict=True)]
    done, worst = [0] * len(whole), 0.0
    while any(at < length for at, length in zip(done, case.lengths, strict=True)):
        picked = [(i, min(case.lengths[i] - done[i], rng.choice(case.chunks))) for i in range(len(whole))]
        picked = [(i, size) for i, size in picked if size]
        if not picked:
            continue
        batch = backend.prepare([_chunk(i, done[i], size, tables[i]) for i, size in picked])
        qkv = torch.cat([whole[i][done[i] : done[i] + size] for i, size in picked])
        rotary = Rotary(
            torch.cat([rotaries[i].cos[done[i] : done[i] + size] for i, size in picked]),
            torch.cat([rotaries[i].sin[done[i] : done[i] + size] for i, size in picked]),
        )
        wanted = torch.cat([expected[i][done[i] : done[i] + size] for i, size in picked])
        for layer in range(LAYERS):
            with poisoned_memory():
                if case.fused:
                    out = batch.attend_qkv(
                        layer,
                        qkv.clone(),
                        rotary,
                        num_heads=heads.query,
                        norms=norms,
                        scale=SCALE,
                        sliding_window=case.window,
                    )
                else:
                    q, k, v = _split(heads, qkv)
                    out = batch.attend(layer, q, k, v, scale=SCALE, sliding_window=case.window)
            error = float((out.double() - wanted).norm() / wanted.norm())
            if not error <= worst:
                worst = error
            if np.isnan(worst):
                return worst
        for i, size in picked:
            done[i] += size
    return worst


def _expected(case: Case, qkv: torch.Tensor, rotary: Rotary, norms: HeadNorms | None) -> torch.Tensor:
    q, k, v = _split(case.heads, qkv.double())
    if case.fused:
        if norms is not None:
            wide = HeadNorms(norms.query.double(), norms.key.double(), norms.eps)
            q, k = rms_norm(q, wide.query, wide.eps), rms_norm(k, wide.key, wide.eps)
        turn = Rotary(rotary.cos.double(), rotary.sin.double())
        q, k = rotate(q, turn), rotate(k, turn)
    return reference(q, k, v, case.window)


def _split(heads: Heads, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return qkv.view(len(qkv), -1, heads.dim).split((heads.query, heads.kv, heads.kv), dim=1)


def _chunk(index: int, start: int, num_tokens: int, block_ids: list[int]) -> SequenceChunk:
    positions = np.arange(start, start + num_tokens, dtype=np.int32)[None]
    return SequenceChunk(str(index), start, [0] * num_tokens, positions, block_ids, True)
