"""The Triton kernels under Triton's interpreter (TRITON_INTERPRET=1), on the CPU. Skipped without Triton."""

from __future__ import annotations

import os

import pytest
import torch

from deployments.lm_engine.attention import SdpaBackend
from tests.unit.lm_engine.paged_cases import Case, Heads, largest_error

HEADS = Heads(query=4, kv=2, dim=16)
CASES = [
    Case(HEADS),
    Case(HEADS, fused=True),
    Case(HEADS, fused=True, norms=True),
    Case(HEADS, window=7),
    Case(HEADS, window=1, block_size=3),
    Case(Heads(query=7, kv=1, dim=24), fused=True, window=5, block_size=4),
    Case(HEADS, lengths=(70, 33, 1), chunks=(1, 32, 40), seed=1),
    Case(HEADS, lengths=(100,), chunks=(1, 95), window=40, seed=2),
    Case(Heads(query=3, kv=3, dim=64), lengths=(66, 2), chunks=(1, 65), seed=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_agrees_with_float64(case: Case) -> None:
    assert largest_error(case, SdpaBackend, torch.float32, "cpu") < 1e-5


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_agrees_with_float64(case: Case) -> None:
    pytest.importorskip("triton")
    from deployments.lm_engine.triton_attention import TritonBackend

    assert largest_error(case, TritonBackend, torch.float32, "cpu") < 1e-5
