"""Matrix products in eight bits (W8A8, e4m3): weights scaled per output channel once, activations per row as they come.

    x [rows, in]      ──each time──▶ e4m3 values, a float32 scale a row ──┐
    weight [out, in]  ──once───────▶ e4m3 values, a float32 scale a row ──┴─▶ values · valuesᵀ * scales * scalesᵀ + bias

A scale maps its row's largest magnitude to the largest e4m3 number: nothing is clipped, and since every row has a scale
of its own, no request's numbers depend on what shares its batch. Tensor cores want widths in multiples of 16, so both
operands are padded with zeros. The format: arXiv:2209.05433.

Layers that this does not pay for, or costs most in, are their owners' to leave out. Knows no models.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3."""
LEAST_ABSMAX = 1e-12
"""A row of zeros has a scale, too."""
ALIGNMENT = 16
MIN_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    values: torch.Tensor
    """e4m3 [rows, width]; width a multiple of `ALIGNMENT`, zeros behind what was quantised."""
    scales: torch.Tensor
    """float32 [rows, 1]: what a value of 1 stands for."""

    def dequantize(self) -> torch.Tensor:
        """float32 [rows, width]."""
        return self.values.float() * self.scales


class Fp8Ops(Protocol):
    """What runs in and before a product. What is fused is what precedes one in a transformer; rows never mix."""

    name: str

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        """Rows of x [rows, width]."""

    def norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, QuantizedRows]:
        """(x + delta in memory of its own, or x; its layer norm, or RMS norm without a bias)."""

    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        """silu(left half) * right half of [rows, 2 * width]."""

    def multiply(
        self, rows: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """[rows, in], [out, in], [out] -> [rows, out] in `dtype`."""


class EmulatedFp8:
    """`Fp8Ops` in plain torch on any device: the same roundings, sums in float32. An oracle, too slow to serve with."""

    name = "emulated"

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        wide = x.float()
        # One multiplication each, so that every device and the fused kernels round alike.
        scales = wide.abs().amax(-1, keepdim=True).clamp_min(LEAST_ABSMAX) * (1 / LARGEST)
        values = wide * scales.reciprocal()
        return QuantizedRows(F.pad(values, (0, -values.shape[-1] % ALIGNMENT)).to(E4M3), scales)

    def norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, QuantizedRows]:
        total = x if delta is None else x + delta
        if bias is not None:
            return total, self.quantize(F.layer_norm(total, total.shape[-1:], weight, bias, eps))
        wide = total.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(total.dtype)
        return total, self.quantize(normed * weight)

    def gated_silu(self, gate_up: torch.Tensor) -> QuantizedRows:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.quantize(F.silu(gate) * up)

    def multiply(
        self, rows: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        product = rows.values.float() @ weight.values.float().t() * rows.scales * weight.scales.t()
        return (product if bias is None else product + bias.float()).to(dtype)


class ScaledMmFp8(EmulatedFp8):
    """Products on tensor cores, the rest in plain torch.

    Args:
        min_rows: Fewer rows are padded to this many.
    """

    name = "scaled_mm"

    def __init__(self, min_rows: int = 1) -> None:
        self._min_rows = min_rows

    def multiply(
        self, rows: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        values, scales, num_rows = rows.values, rows.scales, rows.values.shape[0]
        if num_rows < self._min_rows:
            missing = (0, 0, 0, self._min_rows - num_rows)
            values = F.pad(values.view(torch.uint8), missing).view(E4M3)
            scales = F.pad(scales, missing)
        out = torch._scaled_mm(
            values,
            weight.values.t(),
            scale_a=scales,
            scale_b=weight.scales.t(),
            out_dtype=dtype,
            use_fast_accum=True,
        )[:num_rows]
        # Not by the product: for which shapes cuBLAS has one that adds a bias cannot be asked beforehand.
        return out if bias is None else out.add_(bias)


class Fp8Linear(nn.Module):
    """In the place of a linear layer: [..., in], or rows quantised already, -> [..., out] in the weight's precision.

    Holds the weight in eight bits only; the one given is not kept.

    Args:
        weight: [out, in].
        bias: [out].
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ops: Fp8Ops) -> None:
        super().__init__()
        self._ops, self._dtype = ops, weight.dtype
        self.out_features, self.in_features = weight.shape
        padding = -self.out_features % ALIGNMENT
        with torch.no_grad():
            quantized = ops.quantize(F.pad(weight, (0, 0, 0, padding)) if padding else weight)
            padded_bias = F.pad(bias, (0, padding)) if bias is not None and padding else bias
        self.register_buffer("values", quantized.values)
        self.register_buffer("scales", quantized.scales)
        self.register_buffer("bias", padded_bias)

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        rows = x if isinstance(x, QuantizedRows) else self._ops.quantize(x.reshape(-1, self.in_features))
        out = self._ops.multiply(rows, QuantizedRows(self.values, self.scales), self.bias, self._dtype)
        if self.out_features % ALIGNMENT:
            out = out[:, : self.out_features].contiguous()
        return out if isinstance(x, QuantizedRows) else out.view(*x.shape[:-1], self.out_features)


def choose_fp8(dtype: torch.dtype, device: torch.device, *, fused: bool = True) -> Fp8Ops:
    """What this device multiplies eight bits with, after it has agreed with the emulation.

    Args:
        dtype: Of the layers around the products.
        fused: Quantise in fused Triton kernels; where those fail their check, plain torch serves.

    Raises:
        ValueError: The device or the precision has no such products.
    """
    if device.type != "cuda":
        raise ValueError(f"quantization is 'fp8', which needs a CUDA device; the device is {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        raise ValueError(f"quantization is 'fp8', which needs CUDA capability {least} or higher; {device} has {found}")
    if dtype is not torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
        raise ValueError(f"quantization is 'fp8', which needs dtype bfloat16; dtype is {found}")
    min_rows = _least_rows(dtype, device)
    ops: Fp8Ops = ScaledMmFp8(min_rows)
    if fused:
        try:
            from deployments.fp8_triton import TritonFp8

            triton_ops = TritonFp8(min_rows)
            check_rows(triton_ops, dtype, device)
            ops = triton_ops
        except Exception as exc:  # a missing compiler, an unknown GPU, a disagreement: plain torch always works
            logger.warning("fp8 rows: plain torch, since triton failed: %s: %s", type(exc).__name__, exc)
    logger.info("fp8: %s, products of %d rows or more", ops.name, min_rows)
    return ops


def _least_rows(dtype: torch.dtype, device: torch.device) -> int:
    """How many rows this device's products must have, which changes with the library's version."""
    for min_rows in (1, ALIGNMENT):
        try:
            check_products(ScaledMmFp8(min_rows), dtype, device)
            return min_rows
        except Exception as exc:  # an error of the library's, or a disagreement
            failure = exc
            logger.warning("fp8 products of %d rows failed: %s: %s", min_rows, type(exc).__name__, exc)
    raise ValueError(f"quantization 'fp8' does not work here: {failure}") from failure


@torch.inference_mode()
def check_products(ops: Fp8Ops, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless products agree with emulated ones, for one row to many."""
    emulated = EmulatedFp8()
    weight = emulated.quantize(_noise((80, 208), torch.float32, device, 0))
    for num_rows in (1, 5, 16, 37, 300):
        rows = emulated.quantize(_noise((num_rows, 208), torch.float32, device, num_rows))
        for bias in (None, _noise((80,), dtype, device, 1)):
            ours, expected = (each.multiply(rows, weight, bias, dtype).float() for each in (ops, emulated))
            error = float((ours - expected).abs().max() / expected.abs().max())
            if not error <= 0.02:
                raise RuntimeError(f"product of {num_rows} rows differs from the emulated one by {error:.3g}")


@torch.inference_mode()
def check_rows(ops: Fp8Ops, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless rows are quantised as the emulation does, to one step of e4m3."""
    emulated = EmulatedFp8()
    x, delta, gate_up = (_noise((37, width), dtype, device, seed) for seed, width in enumerate((1001, 1001, 2002)))
    weight, bias = (1 + 0.1 * _noise((1001,), dtype, device, 3)), _noise((1001,), dtype, device, 4)
    for name, ours, expected in (
        ("quantize", ops.quantize(x), emulated.quantize(x)),
        ("rms_norm", ops.norm(x, None, weight, None, 1e-6)[1], emulated.norm(x, None, weight, None, 1e-6)[1]),
        ("layer_norm", ops.norm(x, delta, weight, bias, 1e-6)[1], emulated.norm(x, delta, weight, bias, 1e-6)[1]),
        ("gated_silu", ops.gated_silu(gate_up), emulated.gated_silu(gate_up)),
    ):
        steps = int(steps_apart(ours.values, expected.values).max())
        error = float((ours.scales / expected.scales - 1).abs().max())
        if steps > 1 or not error <= 0.02:
            raise RuntimeError(f"{name} differs by {steps} steps of e4m3, its scales by {error:.3g}")


def steps_apart(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How many e4m3 numbers lie from one value to the other, elementwise; int16. Both zeros are one number."""
    return (_place(left) - _place(right)).abs()


def _place(values: torch.Tensor) -> torch.Tensor:
    """Place on the line of e4m3 numbers, from the sign and magnitude that their bits are."""
    bits = values.view(torch.uint8).to(torch.int16)
    return torch.where(bits < 128, bits, 128 - bits)


def _noise(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
