"""The encoder's kernels: which is chosen, and the Triton ones under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.vision_encoder.adapters.factory import shape_of
from deployments.vision_encoder.adapters.tower import TowerShape
from deployments.vision_encoder.attention import (
    BySize,
    Rotated,
    SdpaMasked,
    SdpaSegments,
    Segments,
    StackedAttention,
    StackedBySize,
)
from deployments.vision_encoder.kernel_check import (
    check_frames,
    check_ops,
    check_windows,
    difference,
    exact_attention,
    make_segments,
)
from deployments.vision_encoder.kernel_choice import (
    choose_attention,
    fastest_by_size,
    fastest_windows_by_size,
    frame_candidates,
    window_candidates,
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


@pytest.mark.parametrize("wanted", ["varlen", "triton_frames", "triton_windows"])
def test_a_backend_of_the_gpu_is_refused_on_cpu(wanted: str) -> None:
    with pytest.raises(ValueError, match="mm_encoder_attn_backend"):
        choose_attention(wanted, shape("qwen2_5_vl", 2, 16), torch.bfloat16, CPU)  # type: ignore[arg-type]


def test_windows_too_get_their_fastest_of_each_size() -> None:
    a, b = (Rotated(PlainOps(), Named(name)) for name in "ab")
    chosen = fastest_windows_by_size([a, b], {10: [1.0, 2.0], 100: [4.0, 3.0]}, SIZES)
    assert isinstance(chosen, StackedBySize)
    assert (chosen.name, isinstance(chosen, StackedAttention)) == ("a+b", True)
    qkv, angles = torch.randn(30, 24), torch.randn(30, 2)
    plan = chosen.plan(Segments(torch.tensor([0, 30], dtype=torch.int32), 30), 30)
    found = chosen.attend_stacked(qkv, angles.cos(), angles.sin(), 2, plan, 0.5)
    torch.testing.assert_close(found, b.attend_stacked(qkv, angles.cos(), angles.sin(), 2, plan[1], 0.5))


def test_the_check_of_frames_accepts_what_is_right() -> None:
    check_frames(SdpaSegments(), shape("qwen2_5_vl", 2, 16), torch.float32, CPU)


def test_the_check_of_windows_accepts_what_is_right() -> None:
    check_windows(Rotated(PlainOps(), SdpaSegments()), shape("qwen2_5_vl", 2, 16), torch.float32, CPU)


def test_the_check_refuses_what_rows_of_nobody_reach() -> None:
    """One product over all rows: a weight of zero times a NaN is a NaN."""
    with pytest.raises(RuntimeError, match="not finite"):
        check_frames(SdpaMasked(), shape("qwen2_5_vl", 2, 16), torch.float32, CPU)


class Lucky(SdpaSegments):
    """Right within the tolerance, and another value each time."""

    calls = 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: list, scale: float) -> torch.Tensor:  # type: ignore[type-arg,override]
        self.calls += 1
        return super().attend(q, k, v, plan, scale) * (1 + 1e-4 * self.calls)


def test_the_check_refuses_what_differs_from_call_to_call() -> None:
    with pytest.raises(RuntimeError, match="from call to call"):
        check_frames(Lucky(), shape("qwen2_5_vl", 2, 16), torch.float32, CPU)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_a_difference_says_where_it_is(value: float) -> None:
    expected = torch.ones(4, 2, 3)
    ours = expected.clone()
    ours[2, 1, 0] = value
    found = difference(ours, expected)
    assert (found.row, found.column, found.wrong_rows, found.wrong_columns, found.small) == (2, 3, 1, 1, False)
    assert found.not_finite == (value != 0.5)
    assert difference(expected, expected).small


@pytest.mark.parametrize("lengths", [[3, 0, 5], [8]])
def test_exact_attention_is_sdpa_of_each_run(lengths: list[int]) -> None:
    q, k, v = torch.randn(3, sum(lengths) + 1, 2, 4).unbind(0)
    plain = SdpaSegments()
    expected = plain.attend(q, k, v, plan=plain.plan(make_segments(lengths, CPU), len(q)), scale=0.3)
    found = exact_attention(q, k, v, lengths, 0.3)
    torch.testing.assert_close(found[:-1].float(), expected[:-1], atol=1e-5, rtol=1e-5)
    assert found[-1].isnan().all()


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


def triton_frames() -> dict[str, object]:
    return {name: make for group in frame_candidates() for name, make in group.items() if name.startswith("triton")}


def triton_windows() -> dict[str, object]:
    return {name: make for group in window_candidates() for name, make in group.items()}


@pytest.fixture
def fused_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds the product of a fused multiply-add, a GPU does not: what a rounded maximum was rounded by
    is then left of `score * scale - maximum`."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def fma(_self: object, x: object, y: object, z: object) -> object:
        wide = [part.data.astype(np.float64) for part in (x, y, z)]  # type: ignore[attr-defined]
        return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype)  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


@interpreted
@pytest.mark.usefixtures("fused_products")
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 128])
@pytest.mark.parametrize("name", triton_frames())
def test_frames_equal_exact_attention(name: str, head_dim: int) -> None:
    check_frames(triton_frames()[name](), shape("qwen2_vl", 2, head_dim), torch.float32, CPU)  # type: ignore[operator]


@interpreted
@pytest.mark.usefixtures("fused_products")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    spare=st.integers(0, 40),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 32)]),
    head_dim=st.sampled_from([16, 24, 40]),
    is_view=st.booleans(),
)
def test_frames_of_any_lengths_equal_exact_attention(
    lengths: Sequence[int], spare: int, blocks: tuple[int, int], head_dim: int, is_view: bool
) -> None:
    """Rows of nobody are NaN; q, k and v are tensors of their own or views of one product."""
    from deployments.vision_encoder.triton_attention import TritonFrames

    used = sum(lengths)
    rows = used + spare
    if not rows:
        return
    qkv = torch.randn(rows, 3, 2, head_dim, generator=torch.Generator().manual_seed(used))
    q, k, v = qkv.unbind(1)
    expected = exact_attention(q, k, v, lengths, 0.3)[:used].float()
    qkv[used:] = torch.nan
    q, k, v = qkv.unbind(1) if is_view else (part.contiguous() for part in qkv.unbind(1))
    ours = TritonFrames(*blocks)
    found = ours.attend(q, k, v, ours.plan(make_segments([*lengths, 0, 0], CPU), rows), 0.3)
    torch.testing.assert_close(found[:used], expected, atol=1e-4, rtol=1e-4)


@interpreted
def test_frames_refuse_heads_that_lie_apart() -> None:
    from deployments.vision_encoder.triton_attention import TritonFrames

    q = torch.randn(4, 2, 32)[:, :, :16]
    ours = TritonFrames(16, 16)
    with pytest.raises(ValueError, match="side by side"):
        ours.attend(q, q, q, ours.plan(make_segments([4], CPU), 4), 0.3)


@interpreted
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 128])
@pytest.mark.parametrize("name", triton_windows())
def test_windows_equal_exact_attention(name: str, head_dim: int) -> None:
    check_windows(triton_windows()[name](), shape("qwen2_5_vl", 2, head_dim), torch.float32, CPU)  # type: ignore[operator]


@interpreted
@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 64), min_size=1, max_size=6),
    spare=st.integers(1, 20),
    name=st.sampled_from(sorted(triton_windows())),
    half=st.sampled_from([8, 12, 20, 40]),
)
def test_windows_of_any_lengths_equal_exact_attention(lengths: Sequence[int], spare: int, name: str, half: int) -> None:
    used = sum(lengths)
    rows = used + spare
    generator = torch.Generator().manual_seed(used)
    qkv = torch.randn(rows, 3 * 2 * 2 * half, generator=generator)
    angles = torch.randn(rows, half, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    expected = exact_attention(*PlainOps().rotary(qkv, cos, sin, 2), lengths, 0.3)[:used].float()
    for poisoned in (qkv, cos, sin):
        poisoned[used:] = torch.nan
    ours = triton_windows()[name]()  # type: ignore[operator]
    found = ours.attend_stacked(qkv, cos, sin, 2, ours.plan(make_segments([*lengths, 0], CPU), rows), 0.3)
    torch.testing.assert_close(found[:used], expected.flatten(1), atol=1e-4, rtol=1e-4)


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
