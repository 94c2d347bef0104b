"""8-bit products: the emulation against float32, and the fused kernels (interpreted) and tensor cores against it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deployments.fp8 import (
    ALIGNMENT,
    E4M3,
    LARGEST,
    LEAST_ABSMAX,
    EmulatedFp8,
    Fp8Linear,
    Fp8Ops,
    QuantizedRows,
    ScaledMmFp8,
    _least_rows,
    check_products,
    check_rows,
    choose_fp8,
    steps_apart,
)

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

CPU = torch.device("cpu")
FP8 = EmulatedFp8()
PRODUCT_ERROR = 0.045
"""Of a product of random numbers, relative: e4m3's rounding is 2.5% of a number at the mean, and two are multiplied."""

matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
    elements=st.floats(-1e4, 1e4, width=32),
)


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


# -- rows -------------------------------------------------------------------------------------------------------------
@given(matrices)
def test_no_number_is_off_by_more_than_half_a_step(matrix: np.ndarray) -> None:
    x = torch.from_numpy(matrix)
    rows = FP8.quantize(x)
    width = x.shape[1]
    error = (rows.dequantize()[:, :width] - x).abs()
    # Normal numbers have three bits behind the point; subnormal ones stand 2**-9 apart.
    allowed = torch.maximum(x.abs() * 2**-4, rows.scales * 2**-10) * (1 + 1e-5)
    assert bool((error <= allowed).all())
    assert rows.values.shape[1] % ALIGNMENT == 0
    assert not rows.values[:, width:].float().any()


@given(matrices)
def test_a_rows_largest_number_becomes_the_largest_of_the_format(matrix: np.ndarray) -> None:
    x = torch.from_numpy(matrix)
    rows = FP8.quantize(x)
    largest = rows.values.float().abs().amax(1)
    absmax = x.abs().amax(1)
    assert bool((largest[absmax > LEAST_ABSMAX] == LARGEST).all())
    assert bool((rows.scales > 0).all())


@given(matrices, st.data())
def test_a_row_does_not_depend_on_its_neighbours(matrix: np.ndarray, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(matrix) - 1))
    x = torch.from_numpy(matrix)
    whole, alone = FP8.quantize(x), FP8.quantize(x[index : index + 1])
    assert torch.equal(whole.values[index].view(torch.uint8), alone.values[0].view(torch.uint8))
    assert torch.equal(whole.scales[index], alone.scales[0])


def test_numbers_of_the_format_are_kept_exactly() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = values[values.isfinite()]
    rows = FP8.quantize(values[None] * 0.25)
    assert torch.equal(rows.dequantize()[0, : len(values)], values * 0.25)


def test_steps_between_numbers() -> None:
    line = torch.tensor([-448.0, -416.0, -(2**-9), -0.0, 0.0, 2**-9, 2**-8, 448.0]).to(E4M3)
    assert steps_apart(line[:-1], line[1:]).tolist() == [1, 124, 1, 0, 1, 1, 124]


def test_norm_and_gate_are_plain_torchs_then_quantised() -> None:
    x, delta, weight, bias = noise(5, 70), noise(5, 70, seed=1), noise(70, seed=2), noise(70, seed=3)
    total, rows = FP8.norm(x, delta, weight, None, 1e-6)
    assert torch.equal(total, x + delta)
    expected = torch.nn.functional.rms_norm(total, (70,), weight, 1e-6)
    assert int(steps_apart(rows.values, FP8.quantize(expected).values).max()) <= 1
    same, rows = FP8.norm(x, None, weight, bias, 1e-6)
    assert same is x
    expected = torch.nn.functional.layer_norm(x, (70,), weight, bias, 1e-6)
    assert torch.equal(rows.dequantize(), FP8.quantize(expected).dequantize())
    gated = FP8.gated_silu(torch.cat((x, delta), 1))
    assert torch.equal(gated.dequantize(), FP8.quantize(torch.nn.functional.silu(x) * delta).dequantize())


# -- products ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("out_width", "in_width"), [(64, 64), (48, 3584), (70, 64), (64, 70), (3, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_in_eight_bits_is_near_the_same_in_float32(out_width: int, in_width: int, with_bias: bool) -> None:
    weight, bias = noise(out_width, in_width), noise(out_width, seed=1) * 5 if with_bias else None
    layer = Fp8Linear(weight, bias, FP8)
    x = noise(2, 50, in_width, seed=2) * torch.logspace(-3, 3, 50)[:, None]
    out = layer(x)
    assert out.shape == (2, 50, out_width)
    assert out.is_contiguous()
    product, expected = out, torch.nn.functional.linear(x, weight)
    if bias is not None:
        product = out - bias
    for row in (0, 25, 49):  # each row has its scale: small ones are as exact as large ones
        floor = 1e-6 * float(out[:, row].norm())
        error = float((product[:, row] - expected[:, row]).norm())
        assert error <= (0.12 if in_width < 10 else 0.06) * float(expected[:, row].norm()) + floor


def test_the_error_of_a_product_is_the_formats_own() -> None:
    weight, x = noise(256, 3584), noise(64, 3584, seed=1)
    error = relative_error(Fp8Linear(weight, None, FP8)(x), x @ weight.t())
    assert 0.03 < error < PRODUCT_ERROR


def test_a_layer_takes_rows_that_are_quantised_already() -> None:
    layer, x = Fp8Linear(noise(40, 70), noise(40, seed=1), FP8), noise(9, 70, seed=2)
    assert torch.equal(layer(FP8.quantize(x)), layer(x))


def test_a_layer_holds_one_byte_a_weight_and_answers_in_its_precision() -> None:
    layer = Fp8Linear(noise(64, 128).bfloat16(), noise(64).bfloat16(), FP8)
    assert sum(buffer.nbytes for buffer in layer.buffers()) == 64 * 128 + 64 * 4 + 64 * 2
    assert not list(layer.parameters())
    assert layer(noise(3, 128).bfloat16()).dtype is torch.bfloat16


# -- what a device offers ---------------------------------------------------------------------------------------------
def test_a_cpu_is_refused_by_the_options_name() -> None:
    with pytest.raises(ValueError, match=r"quantization is 'fp8'.*CUDA.*cpu"):
        choose_fp8(torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [((8, 0), torch.bfloat16, r"capability 8\.9 or higher.*8\.0"), ((9, 0), torch.float32, r"dtype bfloat16.*float32")],
)
def test_a_gpu_or_precision_without_such_products_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=message):
        choose_fp8(dtype, torch.device("cuda", 0))


def test_the_check_at_start_accepts_the_emulation() -> None:
    check_products(FP8, torch.bfloat16, CPU)
    check_rows(FP8, torch.bfloat16, CPU)


class NoBias(EmulatedFp8):
    def multiply(
        self, rows: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        return super().multiply(rows, weight, None, dtype)


class Coarse(EmulatedFp8):
    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        rows = super().gated_silu(gate_up)
        return QuantizedRows((rows.values.float() * 1.3).to(E4M3), rows.scales)


class Unscaled(EmulatedFp8):
    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        rows = super().quantize(x)
        return QuantizedRows(rows.values, rows.scales * 1.1)


@pytest.mark.parametrize(
    ("check", "ops", "message"),
    [
        (check_products, NoBias(), "product of 1 rows"),
        (check_rows, Coarse(), "gated_silu"),
        (check_rows, Unscaled(), "quantize"),
    ],
)
def test_the_check_at_start_refuses_what_is_wrong(check: object, ops: Fp8Ops, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        check(ops, torch.bfloat16, CPU)  # type: ignore[operator]


@pytest.mark.parametrize("min_rows", [1, 16])
def test_torchs_scaled_product_agrees(min_rows: int) -> None:
    """Where this build of torch has it for the CPU, too."""
    ops = ScaledMmFp8(min_rows)
    try:
        ops.multiply(FP8.quantize(noise(16, 16)), FP8.quantize(noise(16, 16)), None, torch.bfloat16)
    except (RuntimeError, NotImplementedError) as exc:
        pytest.skip(f"no row-wise product on the CPU: {exc}")
    check_products(ops, torch.bfloat16, CPU)


class FakeLibrary:
    """`torch._scaled_mm` of a library that refuses few rows."""

    def __init__(self, min_rows: int) -> None:
        self._min_rows = min_rows

    def scaled_mm(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        if len(values) < self._min_rows:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        assert scale_a.shape == (len(values), 1)
        assert scale_b.shape == (1, weight.shape[1])
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert weight.t().is_contiguous()
        assert not any(size % 16 for size in weight.shape)
        return FP8.multiply(QuantizedRows(values, scale_a), QuantizedRows(weight.t(), scale_b.t()), None, out_dtype)


@pytest.mark.parametrize("min_rows", [1, 16])
def test_a_library_gets_as_many_rows_as_it_takes(monkeypatch: pytest.MonkeyPatch, min_rows: int) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", FakeLibrary(min_rows).scaled_mm)
    assert _least_rows(torch.bfloat16, CPU) == min_rows
    weight, bias, x = noise(70, 40), noise(70, seed=1), noise(3, 40, seed=2)
    ours, expected = (Fp8Linear(weight, bias, ops)(x) for ops in (ScaledMmFp8(min_rows), FP8))
    torch.testing.assert_close(ours, expected)


def test_a_library_without_such_products_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", FakeLibrary(1_000).scaled_mm)
    with pytest.raises(ValueError, match=r"quantization 'fp8' does not work here: CUBLAS_STATUS_NOT_SUPPORTED"):
        _least_rows(torch.bfloat16, CPU)


# -- kernels ----------------------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("width", [16, 70, 3584, 5000])
def test_kernels_quantise_as_the_emulation_does(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from deployments import fp8_triton

    # The interpreter loses the carry when it rounds to e4m3: values are stored wide, and rounded here.
    monkeypatch.setattr(fp8_triton, "E4M3", torch.float32)
    ops = fp8_triton.TritonFp8()
    x, delta = noise(5, width) * 3, noise(5, width, seed=1)
    x[3] = 0
    weight, bias = noise(width, seed=2), noise(width, seed=3)
    pairs = [(ops.quantize(x), FP8.quantize(x))]
    pairs.append((ops.gated_silu(torch.cat((x, delta), 1)), FP8.gated_silu(torch.cat((x, delta), 1))))
    for shift in (None, bias):
        for added in (None, delta):
            (total, rows), (sums, expected) = (each.norm(x, added, weight, shift, 1e-6) for each in (ops, FP8))
            assert torch.equal(total, sums)
            pairs.append((rows, expected))
    for rows, expected in pairs:
        assert rows.values.shape == expected.values.shape
        assert int(steps_apart(rows.values.to(E4M3), expected.values).max()) <= 1
        torch.testing.assert_close(rows.scales, expected.scales, rtol=1e-5, atol=0)
