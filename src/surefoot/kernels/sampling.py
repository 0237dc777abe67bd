"""Softmax and draws over a whole vocabulary in as few passes as the memory allows."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.kernels import native


def softmax_rows(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """softmax(logits / temperature), row by row.

    Args:
        logits: [L, V] floating; -inf marks forbidden words (at least one word of a row must be finite).
        temperature: [L], ≥ 0, or None for 1. Temperature 0 gives the point mass on the largest logit (ties: the first).

    Returns:
        [L, V] float32.
    """
    if temperature is None:
        temperature = torch.ones(logits.shape[0], device=logits.device)
    if native.usable(logits):
        return torch.ops.surefoot.softmax_rows(logits, temperature)
    return softmax_rows_reference(logits, temperature)


def softmax_rows_reference(logits: Tensor, temperature: Tensor) -> Tensor:
    """`softmax_rows` in plain torch."""
    exact, heat = logits.float(), temperature.float()[:, None]
    greedy = torch.zeros_like(exact).scatter_(1, exact.argmax(1, keepdim=True), 1.0)
    warm = ((exact - exact.amax(1, keepdim=True)) / torch.where(heat > 0, heat, 1)).softmax(1)
    return torch.where(heat > 0, warm, greedy)


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of the largest logit of every row, the first one of several: [L, V] floating -> [L] int64."""
    if native.usable(logits):
        return torch.ops.surefoot.argmax_rows(logits)
    return logits.argmax(-1)


def sample_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One draw per row by inverting the cumulative distribution.

    The first index whose cumulative probability exceeds u times the row's total; cumulative sums are float64, in index
    order inside fixed blocks whose sums are added in order. An index of probability zero is never returned. The
    reference adds without blocks: where the goal lies within float64 rounding (about 1e-16 of the total) of a border
    between two words, the two may return neighbouring words of positive probability; the law is the same.

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
