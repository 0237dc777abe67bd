"""The target's own log-probabilities, before any processing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch

ROWS_AT_ONCE = 64
"""A prompt has many rows, and the log-probabilities of a whole vocabulary take half a megabyte each."""


@dataclass(frozen=True)
class LogitRows:
    """Rows of a pass with their logits."""

    logits: Tensor  # [L, V] of the target
    batch: FlatBatch
    rows: Tensor  # [L] int64, which rows of the batch these are

    @classmethod
    def split(cls, batch: FlatBatch, logits: Tensor, prompt_rows: int) -> tuple[LogitRows, LogitRows]:
        """The rows that the next tokens come from, and the last `prompt_rows`, whose next tokens the prompt holds."""
        own = batch.logit_rows.shape[0] - prompt_rows
        return cls(logits[:own], batch, batch.logit_rows[:own]), cls(logits[own:], batch, batch.logit_rows[own:])

    @property
    def slots(self) -> Tensor:
        """[L] int64, state slot of the request of each row."""
        return self.batch.row_slot[self.rows]

    @property
    def positions(self) -> Tensor:
        """[L] int64, position of each row; its logits are of the token at the next one."""
        return self.batch.positions[self.rows]


@dataclass(frozen=True)
class Logprobs:
    """One entry per logit row."""

    chosen: Tensor  # [L] float32, of the token after the row
    top: Tensor  # [L, n] float32, the largest, in descending order; n is 0 where nobody asked
    top_tokens: Tensor  # [L, n] int64


def target_logprobs(count: int, rows: LogitRows, history: Tensor) -> Logprobs | None:
    """Log-probabilities of the token after each row, and of the likeliest at its position.

    Args:
        count: the largest number of likeliest tokens that any request wants, cut to the vocabulary; -1: nobody wants any.
        history: [S, L] int64, which holds the tokens after the rows already.
    """
    if count < 0 or not rows.rows.shape[0]:
        return None
    count = min(count, rows.logits.shape[-1])
    chosen, top, top_tokens = [], [], []
    tokens = history[rows.slots, rows.positions + 1].unsqueeze(-1)
    for first in range(0, rows.logits.shape[0], ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        log_probs = torch.log_softmax(rows.logits[part].to(torch.float32), -1)
        chosen.append(log_probs.gather(-1, tokens[part]).squeeze(-1))
        largest = log_probs.topk(count, dim=-1)
        top.append(largest.values)
        top_tokens.append(largest.indices)
    return Logprobs(torch.cat(chosen), torch.cat(top), torch.cat(top_tokens))
