"""The target's own log-probabilities, before any processing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch


@dataclass(frozen=True)
class Logprobs:
    """One entry per logit row of a step."""

    chosen: Tensor  # [L] float32, of the token after the row
    top: Tensor  # [L, n] float32, the largest, in descending order; n is 0 where nobody asked
    top_tokens: Tensor  # [L, n] int64


def target_logprobs(count: int, logits: Tensor, batch: FlatBatch, history: Tensor) -> Logprobs | None:
    """Log-probabilities of the token after each logit row, and of the likeliest at its position.

    Args:
        count: the largest number of likeliest tokens that any request wants, cut to the vocabulary; -1: nobody wants any.
        logits: [L, V] of the target.
        history: [S, L] int64, which holds the emitted tokens already.
    """
    if count < 0 or not batch.logit_rows.shape[0]:
        return None
    slots, positions = batch.row_slot[batch.logit_rows], batch.positions[batch.logit_rows]
    log_probs = torch.log_softmax(logits.to(torch.float32), -1)
    chosen = log_probs.gather(-1, history[slots, positions + 1].unsqueeze(-1)).squeeze(-1)
    return Logprobs(chosen, *log_probs.topk(min(count, log_probs.shape[-1]), dim=-1))
