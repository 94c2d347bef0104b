"""Triton attention over paged keys and values: variable-length causal prefill, and split-K decode.

    key of position p    pool row table[p // block_size] * block_size + p % block_size
    softmax              online, in float32 and base 2; products in the tensors' own precision

Only keys at positions a query may see are read, and all of these have been written: what a former owner left in the
rest of a block never enters a product. Outputs are written whole, so they need no initial value.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

MAX_SPLITS = 64
_EXACT_BLOCK = 16
"""Queries and keys of a block in float32, whose products are unrolled multiply-adds: larger ones compile for long."""
_LOG2_E = math.log2(math.e)


@triton.jit
def _key_rows(table_ptr, keys, inside, kv_row, BLOCK_SIZE: tl.constexpr):
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + keys % BLOCK_SIZE) * kv_row


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    spans_ptr,
    tiles_ptr,
    q_row,
    kv_row,
    out_row,
    table_row,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile * 2)
    first = tl.load(tiles_ptr + tile * 2 + 1)
    row0 = tl.load(spans_ptr + sequence * 3)
    start = tl.load(spans_ptr + sequence * 3 + 1)
    num_tokens = tl.load(spans_ptr + sequence * 3 + 2)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_row
    dim = tl.arange(0, DIM_BLOCK)
    in_head = dim < HEAD_DIM
    query = first + tl.arange(0, QUERIES)
    in_chunk = query < num_tokens
    position = start + query
    rows = (row0 + query).to(tl.int64)
    q = tl.load(
        q_ptr + rows[:, None] * q_row + head * HEAD_DIM + dim[None, :],
        mask=in_chunk[:, None] & in_head[None, :],
        other=0.0,
    )
    kv_offset = (head // GROUP) * HEAD_DIM
    stop = start + tl.minimum(first + QUERIES, num_tokens)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + first - WINDOW + 1, 0) // KEYS * KEYS
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, DIM_BLOCK), tl.float32)
    for key0 in range(begin, stop, KEYS):
        key = key0 + tl.arange(0, KEYS)
        inside = key < stop
        at = _key_rows(table_ptr, key, inside, kv_row, BLOCK_SIZE) + kv_offset
        k = tl.load(k_ptr + at[None, :] + dim[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has -inf as its largest score; exp2(-inf - 0) is a clean zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
        result = result * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + rows[:, None] * out_row + head * HEAD_DIM + dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=in_chunk[:, None] & in_head[None, :],
    )


@triton.jit
def _keys_per_split(num_keys, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    return tl.cdiv(tl.cdiv(num_keys, SPLITS), KEYS) * KEYS


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    lengths_ptr,
    rows_ptr,
    part_ptr,
    part_top_ptr,
    part_total_ptr,
    q_row,
    kv_row,
    out_row,
    table_row,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    share = _keys_per_split(length - oldest, SPLITS, KEYS)
    begin = oldest + split * share
    end = tl.minimum(begin + share, length)
    if (SPLITS == 1) | (begin < end):
        row = tl.load(rows_ptr + sequence).to(tl.int64)
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_row
        dim = tl.arange(0, DIM_BLOCK)
        in_head = dim < HEAD_DIM
        member = tl.arange(0, GROUP_BLOCK)
        in_group = member < GROUP
        inside_q = in_group[:, None] & in_head[None, :]
        head = kv_head * GROUP + member
        q = tl.load(q_ptr + row * q_row + head[:, None] * HEAD_DIM + dim[None, :], mask=inside_q, other=0.0)
        top = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK,), tl.float32)
        result = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
        for key0 in range(begin, end, KEYS):
            key = key0 + tl.arange(0, KEYS)
            inside = key < end
            at = _key_rows(table_ptr, key, inside, kv_row, BLOCK_SIZE) + kv_head * HEAD_DIM
            k = tl.load(k_ptr + at[None, :] + dim[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(weights, 1)
            v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
            result = result * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            top = new_top
        if SPLITS == 1:
            # A padding row has length 0: its output is zero.
            result = result / tl.where(total > 0.0, total, 1.0)[:, None]
            target = out_ptr + row * out_row + head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=inside_q)
        else:
            part = (sequence.to(tl.int64) * HEADS + head) * SPLITS + split
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], result, mask=inside_q)
            tl.store(part_top_ptr + part, top, mask=in_group)
            tl.store(part_total_ptr + part, total, mask=in_group)


@triton.jit
def _combine_kernel(
    out_ptr,
    lengths_ptr,
    rows_ptr,
    part_ptr,
    part_top_ptr,
    part_total_ptr,
    out_row,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_keys = tl.load(lengths_ptr + sequence)
    if WINDOW > 0:
        num_keys = tl.minimum(num_keys, WINDOW)
    share = _keys_per_split(num_keys, SPLITS, KEYS)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    in_head = dim < HEAD_DIM
    split = tl.arange(0, SPLITS)
    used = split * share < num_keys
    part = (sequence.to(tl.int64) * HEADS + head) * SPLITS + split
    # Finite, so that a padding row, which has no part at all, does not subtract infinities.
    top = tl.load(part_top_ptr + part, mask=used, other=-1.0e30)
    weight = tl.where(used, tl.exp2(top - tl.max(top, 0)), 0.0)
    total = tl.sum(weight * tl.load(part_total_ptr + part, mask=used, other=0.0), 0)
    parts = tl.load(
        part_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=used[:, None] & in_head[None, :], other=0.0
    )
    result = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * out_row + head * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=in_head)


def prefill_queries(head_dim: int, dtype: torch.dtype) -> int:
    """Queries of one prefill tile."""
    if dtype is torch.float32:
        return _EXACT_BLOCK
    return 128 if head_dim <= 128 else 64


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    tables: torch.Tensor,
    spans: torch.Tensor,
    tiles: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None,
) -> None:
    """Causal attention of chunks of several tokens, over all that is cached before each.

    Args:
        query: [T, heads, head_dim]; heads and dims contiguous, rows of any stride. `out` alike.
        keys, values: Pools [slots, kv_heads, head_dim], the chunks' own rows already stored.
        tables: int32 [chunks, blocks].
        spans: int32 [chunks, 3]: first row of the chunk in `query`, tokens cached before it, its tokens.
        tiles: int32 [tiles, 2]: chunk, and the tile's first query in it, a multiple of `prefill_queries`.
    """
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    is_exact = query.dtype is torch.float32
    queries = prefill_queries(head_dim, query.dtype)
    _prefill_kernel[(tiles.shape[0], heads)](
        query,
        keys,
        values,
        out,
        tables,
        spans,
        tiles,
        query.stride(0),
        keys.stride(0),
        out.stride(0),
        tables.stride(0),
        scale * _LOG2_E,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=_dim_block(head_dim),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        QUERIES=queries,
        KEYS=_EXACT_BLOCK if is_exact else 64,
        PRECISION="ieee" if is_exact else "tf32",
        num_warps=4 if is_exact or head_dim <= 64 else 8,
        num_stages=1 if is_exact else 2,
    )


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    splits: int,
) -> None:
    """Attention of one token per sequence over its whole context, itself included.

    Args:
        query, keys, values, out, tables: As for `prefill`.
        lengths: int32 [sequences], tokens in the cache; 0 marks a padding row, whose output is zero.
        rows: int32 [sequences], the sequence's row in `query` and `out`.
        splits: Parts a context is cut into, a power of two; see `num_splits`.
    """
    _, heads, head_dim = query.shape
    num_sequences, kv_heads = lengths.shape[0], keys.shape[1]
    is_exact = query.dtype is torch.float32
    num_keys = _EXACT_BLOCK if is_exact else 64
    num_parts = num_sequences * heads * splits if splits > 1 else 0
    parts = query.new_empty((num_parts, head_dim), dtype=torch.float32)
    tops, totals = (query.new_empty((num_parts,), dtype=torch.float32) for _ in range(2))
    dim_block = _dim_block(head_dim)
    _decode_kernel[(num_sequences, kv_heads, splits)](
        query,
        keys,
        values,
        out,
        tables,
        lengths,
        rows,
        parts if num_parts else out,
        tops if num_parts else out,
        totals if num_parts else out,
        query.stride(0),
        keys.stride(0),
        out.stride(0),
        tables.stride(0),
        scale * _LOG2_E,
        HEADS=heads,
        GROUP=heads // kv_heads,
        GROUP_BLOCK=max(16, triton.next_power_of_2(heads // kv_heads)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SPLITS=splits,
        KEYS=num_keys,
        PRECISION="ieee" if is_exact else "tf32",
        num_warps=4,
        num_stages=1 if is_exact else 2 if head_dim > 128 else 3,
    )
    if splits > 1:
        _combine_kernel[(num_sequences, heads)](
            out,
            lengths,
            rows,
            parts,
            tops,
            totals,
            out.stride(0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            WINDOW=window or 0,
            SPLITS=splits,
            KEYS=num_keys,
            num_warps=4,
        )


def num_splits(num_sequences: int, kv_heads: int, num_processors: int) -> int:
    """Parts to cut each context into, so that two programs per multiprocessor are there for any batch size."""
    wanted = -(-2 * num_processors // max(1, num_sequences * kv_heads))
    return min(MAX_SPLITS, 1 << max(0, wanted - 1).bit_length())


def _dim_block(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))
