# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def"
"""`paged_attention` on CUDA: one Triton program per row and key head, so that no row knows of another.

A program holds the query heads that share its key head, padded to the matrix unit's 16, and walks the row's visible positions
in tiles on a fixed grid of absolute positions. The result is therefore the same bits whatever else is in the batch, and
nothing about the launch depends on lengths: it can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["window"])
def _rows(
    query,
    key_cache,
    value_cache,
    table,
    row_slot,
    kv_lens,
    sinks,
    out,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    out_row,
    out_head,
    table_row,
    scaling,
    softcap,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP, padded for the matrix unit
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,  # products in float32
):
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, slot = tl.load(kv_lens + row).to(tl.int32), tl.load(row_slot + row)
    member, dim, value_dim = tl.arange(0, HEADS), tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_PADDED)
    head = kv_head * GROUP + member
    real = member < GROUP
    q = tl.load(
        query + row * query_row + head[:, None] * query_head + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    if SINKS:  # one more logit, without a value
        peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total = tl.full([HEADS], 1.0, tl.float32)
    else:
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    for start in range(first // TILE * TILE, length, TILE):
        position = start + tl.arange(0, TILE)
        seen = (position >= first) & (position < length)  # at least one of every tile
        block = tl.load(table + slot * table_row + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        at = block * BLOCK_SIZE + position % BLOCK_SIZE
        k = tl.load(
            key_cache + at[:, None] * key_row + kv_head * key_head + dim[None, :],
            mask=seen[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        v = tl.load(
            value_cache + at[:, None] * value_row + kv_head * value_head + value_dim[None, :],
            mask=seen[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        kept = tl.exp(peak - higher)
        total = total * kept + tl.sum(weight, 1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = higher
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + row * out_row + head[:, None] * out_head + value_dim[None, :],
        mixed.to(out.dtype.element_ty),
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    kv_lens: Tensor,
    *,
    block_size: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.attention.paged_attention`.

    Products of bfloat16 and float16 are accumulated in float32; the softmax's weights are rounded to the cache's dtype before
    they meet the values. In float32, and where query and cache differ, everything is float32.
    """
    rows, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[1:]
    out = torch.empty(rows, heads, value_dim, dtype=query.dtype, device=query.device)
    if not rows:
        return out
    # A view of packed step data may be strided; the kernel counts in elements.
    row_slot, kv_lens = row_slot.contiguous(), kv_lens.contiguous()
    if query.stride(2) != 1:
        query = query.contiguous()
    group = heads // kv_heads
    widen = not query.dtype == key_cache.dtype == value_cache.dtype or query.dtype == torch.float32
    padded = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    kernel: Any = _rows
    kernel[(rows, kv_heads)](
        query,
        key_cache,
        value_cache,
        block_table,
        row_slot,
        kv_lens,
        query if sinks is None else sinks,
        out,
        # The stride of a single row says nothing and may be anything; the kernel must not be compiled anew for it.
        query.stride(0) if rows > 1 else heads * dim,
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        float(scaling),
        1.0 if softcap is None else float(softcap),
        0 if window is None else window,
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEADS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_PADDED=padded[0],
        VALUE_DIM=value_dim,
        VALUE_PADDED=padded[1],
        TILE=32 if widen or max(padded) > 128 else 64,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        WIDEN=widen,
        num_warps=4,
        num_stages=2 if widen else 3,
    )
    return out
