"""Triton kernels that store keys and values in the paged pools, with the q/k norms and rotation before it fused in."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotated(
    source_ptr,
    weight_ptr,
    cos,
    sin,
    place,
    inside,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both halves of rotated heads, float32."""
    left = tl.load(source_ptr, mask=inside, other=0.0)
    right = tl.load(source_ptr + HALF, mask=inside, other=0.0)
    stored = left.dtype
    left = left.to(tl.float32)
    right = right.to(tl.float32)
    if NORM:
        in_half = place < HALF
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        # As the plain norm rounds: to the stored precision before the weight.
        left = (left * factor).to(stored).to(tl.float32)
        right = (right * factor).to(stored).to(tl.float32)
        left *= tl.load(weight_ptr + place, mask=in_half, other=0.0).to(tl.float32)
        right *= tl.load(weight_ptr + HALF + place, mask=in_half, other=0.0).to(tl.float32)
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _rotate_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    qkv_row,
    cos_row,
    kv_row,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = place < HALF
    cos = tl.load(cos_ptr + token * cos_row + place, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * cos_row + place, mask=in_half, other=0.0).to(tl.float32)

    head = tl.arange(0, HEADS_BLOCK)[:, None]
    inside = (head < HEADS) & in_half
    q_ptr = qkv_ptr + token * qkv_row + head * (HALF * 2) + place
    left, right = _rotated(q_ptr, q_weight_ptr, cos, sin, place, inside, eps, HALF, NORM)
    tl.store(q_ptr, left.to(qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(q_ptr + HALF, right.to(qkv_ptr.dtype.element_ty), mask=inside)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        kv_head = tl.arange(0, KV_BLOCK)[:, None]
        inside_kv = (kv_head < KV_HEADS) & in_half
        offset = kv_head * (HALF * 2) + place
        k_ptr = qkv_ptr + token * qkv_row + HEADS * HALF * 2 + offset
        k_left, k_right = _rotated(k_ptr, k_weight_ptr, cos, sin, place, inside_kv, eps, HALF, NORM)
        target = slot * kv_row + offset
        tl.store(k_pool_ptr + target, k_left.to(k_pool_ptr.dtype.element_ty), mask=inside_kv)
        tl.store(k_pool_ptr + target + HALF, k_right.to(k_pool_ptr.dtype.element_ty), mask=inside_kv)
        v_ptr = k_ptr + KV_HEADS * HALF * 2
        tl.store(v_pool_ptr + target, tl.load(v_ptr, mask=inside_kv, other=0.0), mask=inside_kv)
        tl.store(v_pool_ptr + target + HALF, tl.load(v_ptr + HALF, mask=inside_kv, other=0.0), mask=inside_kv)


@triton.jit
def _store_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    key_row,
    key_head,
    value_row,
    value_head,
    kv_row,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, KV_BLOCK)[:, None]
        dim = tl.arange(0, DIM_BLOCK)[None, :]
        inside = (head < KV_HEADS) & (dim < HEAD_DIM)
        target = slot * kv_row + head * HEAD_DIM + dim
        key = tl.load(key_ptr + token * key_row + head * key_head + dim, mask=inside, other=0.0)
        tl.store(k_pool_ptr + target, key, mask=inside)
        value = tl.load(value_ptr + token * value_row + head * value_head + dim, mask=inside, other=0.0)
        tl.store(v_pool_ptr + target, value, mask=inside)


def rotate_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Rotate the queries in place; rotate the keys and store them and the values in the pools.

    Args:
        qkv: [T, (num_heads + 2 * kv_heads) * head_dim], queries first. Its key columns stay as they are.
        cos, sin: [T, head_dim], both halves alike; equal strides.
        keys, values: Pools [slots, kv_heads, head_dim].
        slots: int32 [T]; a negative one stores nothing.
        q_norm, k_norm: RMS norm weights [head_dim] applied before the rotation; None for none.
    """
    _, kv_heads, head_dim = keys.shape
    half = head_dim // 2
    _rotate_store_kernel[(qkv.shape[0],)](
        qkv,
        cos,
        sin,
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        slots,
        keys,
        values,
        qkv.stride(0),
        cos.stride(0),
        keys.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=half,
        HEADS_BLOCK=triton.next_power_of_2(num_heads),
        KV_BLOCK=triton.next_power_of_2(kv_heads),
        HALF_BLOCK=triton.next_power_of_2(half),
        NORM=q_norm is not None,
        num_warps=4,
    )


def store(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store rows [T, kv_heads, head_dim] (dims contiguous) in the pools; a negative slot stores nothing."""
    _, kv_heads, head_dim = keys.shape
    _store_kernel[(key.shape[0],)](
        key,
        value,
        slots,
        keys,
        values,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        KV_BLOCK=triton.next_power_of_2(kv_heads),
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
