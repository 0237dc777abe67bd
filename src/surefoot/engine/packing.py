"""Laying the rows of a step on the flat token axis: prompt chunks, anchors and drafts, then padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.engine.messages import StepInputs, StepRequests
from surefoot.kernels import native


def pack(
    inputs: StepInputs,
    requests: StepRequests,
    widths: Tensor,
    history: Tensor,
    cache: PagedCache,
    bucket: Callable[[int], int],
    *,
    reads_are_free: bool,
) -> tuple[FlatBatch, Tensor]:
    """The flat batch, and which of its logit rows is the anchor of every emitting request.

    Logit rows of anchors and drafts come first, those of prompts whose log-probabilities are wanted after them.

    Args:
        widths: [E] int64, drafts that each emitting request verifies.
        history: [S, L] int64.
        bucket: rows a pass is padded to.
        reads_are_free: whether widths may be read; else there are as many rows as the plan allows, and padding.

    Returns:
        The batch, and [E] int64.
    """
    if cache.states is not None:
        for entering in inputs.updates.slots:
            cache.states.enter(entering.slot)
        first = requests.lengths + requests.context
        first[inputs.num_emitting :] -= 1  # the last row of a chunk that does not emit
        cache.states.begin(requests.slots, first)
    if not reads_are_free or not native.usable(widths):
        drafts = sum(widths.tolist()) if reads_are_free else None
        batch, anchor_row = pack_with_torch(inputs, requests, widths, history, cache, bucket, drafts)
    else:
        rows = bucket(sum(inputs.context_rows) + inputs.num_emitting + sum(widths.tolist()))
        table, logit_rows, anchor_row = torch.ops.surefoot.pack_rows(
            requests.slots,
            requests.lengths,
            requests.context,
            widths,
            history,
            cache.block_tables,
            cache.strides,
            cache.block_size,
            rows,
        )
        batch = FlatBatch.of_table(cache, table, logit_rows)
    if inputs.prompt_logprobs:
        counts = _rows_of_requests(requests, widths)
        starts = counts.cumsum(0) - counts
        wanted = [
            starts[part.request] + torch.arange(part.rows, device=starts.device) for part in inputs.prompt_logprobs
        ]
        batch = replace(batch, logit_rows=torch.cat([batch.logit_rows, *wanted]))
    return batch, anchor_row


def _rows_of_requests(requests: StepRequests, widths: Tensor) -> Tensor:
    """[R] int64: prompt rows, and the anchor and the drafts of those that emit."""
    counts = requests.context.clone()
    counts[: widths.shape[0]] += widths + 1
    return counts


def pack_with_torch(
    inputs: StepInputs,
    requests: StepRequests,
    widths: Tensor,
    history: Tensor,
    cache: PagedCache,
    bucket: Callable[[int], int],
    drafts: int | None = None,
) -> tuple[FlatBatch, Tensor]:
    """`pack` in tensor operations, on any device.

    Args:
        drafts: the sum of `widths`, if the host knows it; else the plan's bound takes its place, and what is too many
            becomes padding.
    """
    count, emitting = len(inputs.slots), inputs.num_emitting
    exact = drafts is not None
    num_logits = emitting + (min(inputs.plan.budget, sum(inputs.plan.limits)) if drafts is None else drafts)
    total = sum(inputs.context_rows) + num_logits
    rows = bucket(total)

    slots, lengths, context = requests.slots, requests.lengths, requests.context
    windows = widths + 1
    counts = _rows_of_requests(requests, widths)
    ends = counts.cumsum(0)
    starts = ends - counts
    row = torch.arange(rows, device=widths.device)
    owner = torch.searchsorted(ends, row, right=True)
    real = owner < count if rows > total or not exact else None
    owner = owner.clamp(max=count - 1)
    row_slot, positions = slots[owner], (lengths - starts)[owner] + row
    if real is not None:  # padding stands at slot 0, position 0
        row_slot, positions = row_slot * real, positions * real

    window_ends = windows.cumsum(0)
    anchor_row, logit_rows = window_ends - windows, row[:num_logits]
    if any(inputs.context_rows):
        window = torch.searchsorted(window_ends, logit_rows, right=True)
        first = ((starts + context)[:emitting] - anchor_row)[window.clamp(max=max(emitting - 1, 0))]
        logit_rows = torch.where(window < emitting, first + logit_rows, 0)
    return FlatBatch.of_rows(cache, history[row_slot, positions], positions, row_slot, logit_rows, real), anchor_row
