"""Attention of flat rows over a paged cache: the torch reference, and the dispatcher to the native kernel.

Row t belongs to state slot `row_slot[t]` and sees the cached positions max(0, kv_lens[t] - window) … kv_lens[t] - 1 of
that slot (its own key is the last of them). One call serves prefill chunks, anchors and drafts alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.kernels import native, triton_support

REFERENCE_ROWS = 256
"""Rows the reference takes at a time in the Triton kernel's place: it gathers every row's own keys and values."""


def paged_attention(
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
    """Softmax attention per row, accumulated in float32.

    On the CPU in bfloat16 and float32 the native kernel runs: positions are added in ascending order on a fixed grid of
    absolute positions, so a row's result depends on its own query, length and cache contents only (not on its
    neighbours, on where its blocks lie, or on `block_size`), and nothing outside its visible range enters it. On CUDA the
    Triton kernel promises the same; the reference below takes its place where there is no Triton.

    Args:
        query: [T, Hq, D].
        key_cache: [N, Hkv, D], by cache slot; Hkv divides Hq.
        value_cache: [N, Hkv, Dv].
        block_table: [S, max_blocks] int32; position p of state slot s is at cache slot
            `block_table[s, p // block_size] * block_size + p % block_size`.
        row_slot: [T] int64, state slot of each row.
        kv_lens: [T] int64, positions the row may see; 0 (padding) gives zeros.
        block_size: positions per block.
        scaling: factor on the scores.
        window: positions a row sees, itself included; None = all.
        softcap: scores become softcap * tanh(score / softcap), after scaling.
        sinks: [Hq], one more softmax logit per head that carries no value.

    Returns:
        [T, Hq, Dv] in query's dtype.
    """
    if native.usable(query, key_cache, value_cache) and query.dtype == key_cache.dtype == value_cache.dtype:
        return torch.ops.surefoot.paged_attention(
            query, key_cache, value_cache, block_table, row_slot, kv_lens, block_size, scaling, window, softcap, sinks
        )
    options: dict[str, Any] = {
        "block_size": block_size,
        "scaling": scaling,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
    }
    if query.device.type != "cuda":
        return paged_attention_reference(query, key_cache, value_cache, block_table, row_slot, kv_lens, **options)
    if triton_support.usable(query, key_cache, value_cache):
        try:
            from surefoot.kernels.triton_attention import paged_attention_triton

            return paged_attention_triton(query, key_cache, value_cache, block_table, row_slot, kv_lens, **options)
        except Exception as problem:  # it did not compile; nothing was written but the result
            triton_support.give_up(problem)
    parts = [
        paged_attention_reference(rows, key_cache, value_cache, block_table, slots, lens, **options)
        for rows, slots, lens in zip(
            query.split(REFERENCE_ROWS), row_slot.split(REFERENCE_ROWS), kv_lens.split(REFERENCE_ROWS), strict=True
        )
    ]
    return torch.cat(parts)


def capturable() -> bool:
    """Whether attention on CUDA can be captured in a graph: the Triton kernel can; the reference reads lengths back."""
    return triton_support.works()


def paged_attention_reference(
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
    """`paged_attention` in plain torch: gathers every row's own keys and values (memory T · longest length · heads)."""
    rows, heads = query.shape[:2]
    longest = int(kv_lens.max()) if rows else 0
    if longest == 0:
        return query.new_zeros(rows, heads, value_cache.shape[2])
    position = torch.arange(longest, device=query.device)
    blocks = block_table[row_slot][:, position // block_size].long()
    seen = position < kv_lens[:, None]  # [T, longest]
    if window is not None:
        seen &= position >= kv_lens[:, None] - window
    slots = torch.where(seen, blocks * block_size + position % block_size, 0)
    shared = heads // key_cache.shape[1]
    work = torch.promote_types(query.dtype, torch.float32)
    # What a row does not see may hold anything, NaN included: it is replaced, not multiplied by zero.
    key = key_cache[slots].to(work).masked_fill(~seen[:, :, None, None], 0).repeat_interleave(shared, dim=2)
    value = value_cache[slots].to(work).masked_fill(~seen[:, :, None, None], 0).repeat_interleave(shared, dim=2)
    scores = torch.einsum("thd,tphd->thp", query.to(work), key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(work)[None, :, None].expand(rows, -1, 1)], dim=-1)
    probs = scores.softmax(-1)[:, :, :longest]
    out = torch.einsum("thp,tphd->thd", probs, value)
    return torch.where(seen.any(1)[:, None, None], out, 0).to(query.dtype)
