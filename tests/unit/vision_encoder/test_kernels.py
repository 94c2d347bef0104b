"""The encoder's kernels: which is chosen, and the Triton ones under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.vision_encoder.adapters.factory import shape_of
from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import BySize, SdpaMasked, SdpaSegments, Segments
from deployments.vision_encoder.kernel_choice import (
    check_frames,
    check_ops,
    check_windows,
    choose_attention,
    fastest_by_size,
    frame_candidates,
)
from deployments.vision_encoder.ops import PIXEL_CENTRE, PlainOps

CPU = torch.device("cpu")
SIZES = {10: 20, 100: 200}
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def shape(model_type: str, heads: int, head_dim: int) -> TowerShape:
    vision = {"hidden_size": heads * head_dim, "embed_dim": heads * head_dim, "num_heads": heads, "depth": 4}
    return shape_of({"model_type": model_type, "vision_config": vision})


class Named(SdpaSegments):
    def __init__(self, name: str, capturable: bool = True) -> None:
        self.name, self.capturable = name, capturable
        self.seen: list[int] = []

    def plan(self, segments: Segments, rows: int) -> list:  # type: ignore[type-arg]
        self.seen.append(rows)
        return super().plan(segments, rows)


def test_each_size_gets_its_fastest() -> None:
    a, b = Named("a"), Named("b", capturable=False)
    chosen = fastest_by_size([a, b], {10: [1.0, 2.0], 100: [4.0, 3.0]}, SIZES)
    assert (chosen.name, chosen.capturable) == ("a+b", False)
    for rows in (1, 20, 21, 200, 500):
        borders = torch.tensor([0, rows], dtype=torch.int32)
        q = torch.randn(rows, 2, 4)
        plan = chosen.plan(Segments(borders, rows), rows)
        expected = SdpaMasked()
        masked = expected.attend(q, q, q, expected.plan(Segments(borders, rows), rows), 0.5)
        torch.testing.assert_close(chosen.attend(q, q, q, plan, 0.5), masked, atol=1e-4, rtol=1e-4)
    assert (a.seen, b.seen) == ([1, 20], [21, 200, 500])


def test_one_that_is_always_fastest_stands_alone() -> None:
    a, b = Named("a"), Named("b")
    assert fastest_by_size([a, b], {10: [1.0, 2.0], 100: [3.0, 4.0]}, SIZES) is a


def test_equal_names_of_a_choice_are_said_once() -> None:
    a, b = Named("a"), Named("b")
    assert BySize([(1, a), (2, b), (3, a)]).name == "a+b"


@pytest.mark.parametrize("wanted", ["varlen", "cudnn", "triton_frames", "triton_windows"])
def test_a_backend_of_the_gpu_is_refused_on_cpu(wanted: str) -> None:
    with pytest.raises(ValueError, match="mm_encoder_attn_backend"):
        choose_attention(wanted, shape("qwen2_5_vl", 2, 16), torch.bfloat16, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", [SdpaSegments(), SdpaMasked()])
def test_the_check_of_frames_accepts_what_is_right(attention: SdpaSegments) -> None:
    check_frames(attention, shape("qwen2_5_vl", 2, 16), torch.float32, CPU)


class Shifted(SdpaSegments):
    """Wrong by one row."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: list, scale: float) -> torch.Tensor:  # type: ignore[type-arg,override]
        return super().attend(q, k, v.roll(1, 0), plan, scale)


def test_the_check_of_frames_refuses_what_is_wrong() -> None:
    with pytest.raises(RuntimeError, match="frame attention"):
        check_frames(Shifted(), shape("qwen2_5_vl", 2, 16), torch.float32, CPU)


def test_unpacked_pixels_stand_in_order_with_zeros_behind() -> None:
    pixels = torch.arange(24, dtype=torch.uint8).view(8, 3)
    order = torch.tensor([1, 0], dtype=torch.int32)
    out = PlainOps().unpack(pixels, order, 4, 5, torch.float32)
    torch.testing.assert_close(out[:4, :3], pixels[4:].float() - PIXEL_CENTRE)
    torch.testing.assert_close(out[4:, :3], pixels[:4].float() - PIXEL_CENTRE)
    assert not out[:, 3:].any()


@interpreted
@pytest.mark.parametrize("head_dim", [16, 72, 80, 128])
@pytest.mark.parametrize("name", [name for name in frame_candidates() if name.startswith("triton")])
def test_frames_equal_plain_torch(name: str, head_dim: int) -> None:
    check_frames(frame_candidates()[name](), shape("qwen2_vl", 2, head_dim), torch.float32, CPU)


@interpreted
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    spare=st.integers(0, 40),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 32)]),
)
def test_frames_of_any_lengths_equal_plain_torch(lengths: Sequence[int], spare: int, blocks: tuple[int, int]) -> None:
    from deployments.vision_encoder.triton_attention import TritonFrames

    used = sum(lengths)
    borders = torch.tensor([0, *lengths, 0, 0]).cumsum(0).int()
    generator = torch.Generator().manual_seed(used)
    q, k, v = (torch.randn(used + spare, 2, 24, generator=generator) for _ in range(3))
    segments = Segments(borders, max(1, *lengths, 1))
    ours, plain = TritonFrames(*blocks), SdpaSegments()
    if not used + spare:
        return
    found = ours.attend(q, k, v, ours.plan(segments, used + spare), 0.3)
    assert torch.isfinite(found).all()
    expected = plain.attend(q, k, v, plain.plan(segments, used + spare), 0.3)
    torch.testing.assert_close(found[:used], expected[:used], atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_windows_equal_plain_torch(head_dim: int) -> None:
    from deployments.vision_encoder.triton_attention import TritonWindows

    check_windows(TritonWindows(), shape("qwen2_5_vl", 2, head_dim), torch.float32, CPU)


@interpreted
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_fused_operations_equal_plain_torch(model_type: str) -> None:
    from deployments.vision_encoder.triton_ops import TritonOps

    check_ops(TritonOps(), PlainOps(), shape(model_type, 2, 16), torch.float32, CPU)


@pytest.mark.parametrize("lengths", [[3, 0, 2], [5], [0, 0, 1]])
def test_row_ranges_are_those_of_the_segments(lengths: list[int]) -> None:
    pytest.importorskip("triton")
    from deployments.vision_encoder.triton_attention import row_ranges

    borders = torch.tensor([0, *lengths, 0]).cumsum(0).int()
    ranges = row_ranges(borders, sum(lengths) + 2)
    expected = [(sum(lengths[:i]), sum(lengths[: i + 1])) for i, length in enumerate(lengths) for _ in range(length)]
    found = list(zip(ranges.low.tolist(), ranges.high.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert all(low == high for low, high in found[len(expected) :])
