"""Softmax, filters and draws over a whole vocabulary in as few passes as the memory allows.

A row of logits that holds NaN or infinity, or nothing above -infinity, has no distribution: its probabilities are all zero, its
argmax is -1, and a draw from it gives -1. Finding that out costs one comparison per entry that is read anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.kernels import native

NUCLEUS_CANDIDATES = 1024
"""Top-p looks at so many of the largest probabilities first; sorting a whole vocabulary costs milliseconds."""


def softmax_rows(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """softmax(logits / temperature), row by row.

    Args:
        logits: [L, V] floating; -inf marks forbidden tokens.
        temperature: [L], ≥ 0, or None for 1. Temperature 0 gives the point mass on the largest logit (ties: the first).

    Returns:
        [L, V] float32; all zeros for a row without a distribution.
    """
    if temperature is None:
        temperature = torch.ones(logits.shape[0], device=logits.device)
    if native.usable(logits):
        return torch.ops.surefoot.softmax_rows(logits, temperature)
    return softmax_rows_reference(logits, temperature)


def softmax_rows_reference(logits: Tensor, temperature: Tensor) -> Tensor:
    """`softmax_rows` in plain torch."""
    exact, divisor = logits.float(), temperature.float()[:, None]
    peak, first = exact.max(1, keepdim=True)  # NaN is larger than everything
    greedy = torch.zeros_like(exact).scatter_(1, first, 1.0)
    sampled = ((exact - peak) / torch.where(divisor > 0, divisor, 1)).softmax(1)
    return torch.where(peak.isfinite(), torch.where(divisor > 0, sampled, greedy), 0.0)


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of the largest logit of every row, the first one of several: [L, V] floating -> [L] int64, -1 without one."""
    if native.usable(logits):
        return torch.ops.surefoot.argmax_rows(logits)
    return argmax_rows_reference(logits)


def argmax_rows_reference(logits: Tensor) -> Tensor:
    """`argmax_rows` in plain torch."""
    peak, index = logits.max(-1)  # NaN is larger than everything
    return torch.where(peak.isfinite(), index, -1)


def filter_rows(
    probs: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    largest_k: int | None = None,
    reads_are_free: bool = True,
) -> Tensor:
    """Top-k, then top-p, then min-p, each followed by renormalisation; what ties with the last one kept is kept.

    A lone survivor has exactly 1. A row without mass stays one.

    Args:
        probs: [N, V] float32 rows of sum 1 (or 0). May be overwritten.
        top_k: [N] int64; 0 keeps everything.
        top_p: [N] in (0, 1]; the smallest set of the likeliest that holds this much; 1 keeps everything.
        min_p: [N] in [0, 1]; as a share of the largest probability; 0 keeps everything.
        largest_k: the largest entry of `top_k`, if the host knows it: saves a sort without the native kernels.
        reads_are_free: whether the host may look at values on the way; saves another one.

    Returns:
        [N, V] float32.
    """
    if native.usable(probs) and probs.dtype == torch.float32 and probs.is_contiguous():
        torch.ops.surefoot.filter_rows_(probs, top_k, top_p, min_p)
        return probs
    return filter_rows_reference(probs, top_k, top_p, min_p, largest_k=largest_k, reads_are_free=reads_are_free)


def filter_rows_reference(
    probs: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    largest_k: int | None = None,
    reads_are_free: bool = True,
) -> Tensor:
    """`filter_rows` in plain torch."""
    size = probs.shape[-1]

    def keep(probs: Tensor, kept: Tensor, on: Tensor) -> Tensor:
        """Rows for which the stage is off stay as they are, to the bit."""
        left = torch.where(kept, probs, 0.0)
        mass = left.sum(-1, keepdim=True)
        return torch.where(on.unsqueeze(-1), left / torch.where(mass > 0, mass, 1.0), probs)

    if top_k is not None:
        ordered = probs.topk(min(largest_k or size, size), dim=-1).values
        last = (top_k - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(-1)
        probs = keep(probs, probs >= ordered.gather(-1, last), top_k > 0)
    if top_p is not None:
        count = min(NUCLEUS_CANDIDATES, size)
        ordered = probs.topk(count, dim=-1).values
        # The candidates suffice where they hold the mass; checking that takes a host read.
        if count < size and (not reads_are_free or bool((ordered.sum(-1, dtype=torch.float64) < top_p).any())):
            ordered = probs.sort(dim=-1, descending=True).values
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        last = (before < top_p.unsqueeze(-1)).sum(-1, keepdim=True).clamp(min=1) - 1
        probs = keep(probs, probs >= ordered.gather(-1, last), top_p < 1)
    if min_p is not None:
        probs = keep(probs, probs >= probs.amax(-1, keepdim=True) * min_p.unsqueeze(-1), min_p > 0)
    return probs


def sample_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One draw per row by inverting the cumulative distribution.

    The first index whose cumulative probability exceeds u times the row's total; cumulative sums are float64, in index
    order inside fixed blocks whose sums are added in order. An index of probability zero is never returned. The
    reference adds without blocks: where the goal lies within float64 rounding (about 1e-16 of the total) of a border
    between two tokens, the two may return neighbouring tokens of positive probability; the law is the same.

    Args:
        probs: [N, V] float32, non-negative; rows need not sum to one.
        uniforms: [N] in [0, 1).

    Returns:
        [N] int64; -1 for a row whose probabilities are all zero.
    """
    if probs.dtype == torch.float32 and native.usable(probs):
        return torch.ops.surefoot.sample_rows(probs, uniforms)
    return sample_rows_reference(probs, uniforms)


def sample_rows_reference(probs: Tensor, uniforms: Tensor) -> Tensor:
    """`sample_rows` in plain torch."""
    cumulative = probs.double().cumsum(1)
    goal = uniforms.double()[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    place = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, place, -1).amax(1)
    return torch.minimum(index, last)
