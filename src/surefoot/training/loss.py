"""The three-term loss of the DSpark paper (section 3; docs/concepts.md), fused over the vocabulary.

Per position, with q the draft distribution and p the target's, both over the draft vocabulary:

    0.1 CE(p, q) + 0.9 TV(p, q) + BCE(confidence, 1 - TV)

p lacks the mass o that the target puts on tokens outside the draft vocabulary. q is exactly zero there, so that mass
counts fully: TV = (sum |q - p| + o) / 2, and 1 - TV = sum min(p, q) is the true probability of acceptance. CE is taken over
all of p instead of one token drawn from it: the same expectation with less noise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CE, TV, CONFIDENCE = 0.1, 0.9, 1.0
_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits per chunk. CPU: 16 MiB in float32, which fits a last-level cache and keeps the products efficient;
CUDA: 1 GiB, for few launches."""


@dataclass(frozen=True)
class BlockScores:
    """Loss and acceptance of R positions."""

    loss: Tensor  # scalar, CE and TV terms, weighted sum
    acceptance: Tensor  # [R] float32, 1 - TV, detached
    agrees: Tensor | None
    """[R] bool: q and p have the same argmax over the draft vocabulary, so the token is accepted at temperature 0."""


def vocabulary_loss(
    hidden: Tensor,
    head: Tensor,
    latent: Tensor | None,
    markov: Tensor | None,
    labels: Tensor,
    label_rows: Tensor,
    weight: Tensor,
    *,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    compare: bool = True,
) -> BlockScores:
    """CE and TV of R positions whose logits are `hidden @ head.T (+ latent @ markov.T)`.

    Logits are held for one chunk of positions at a time and gradients are computed in the forward pass, so nothing of size
    R x V is stored or computed twice.

    Args:
        hidden: [R, d]; head: [V, d], frozen or not.
        latent: [R, r] and markov: [V, r], or None without a sequential head.
        labels: [M, V] target probabilities; label_rows: [R] int64 row of `labels` for each position.
        weight: [R] float32.
        softcap: c of c tanh(u / c) on the first product.
        dtype: of the products; everything else is float32 (float64 for float64 inputs).
        compare: whether to compute `agrees`; training does not need it.
    """
    loss, acceptance, agrees = _VocabularyLoss.apply(
        hidden, head, latent, markov, labels, label_rows, weight, softcap, dtype, compare
    )
    return BlockScores(loss, acceptance, agrees if compare else None)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        latent: Tensor | None,
        markov: Tensor | None,
        labels: Tensor,
        label_rows: Tensor,
        weight: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
        compare: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = torch.promote_types(hidden.dtype, torch.float32)
        products = torch.float64 if work == torch.float64 else dtype
        needs = ctx.needs_input_grad
        head_, markov_ = head.to(products), None if markov is None else markov.to(products)
        grads = [
            torch.zeros_like(tensor, dtype=work) if tensor is not None and wanted else None
            for tensor, wanted in zip((hidden, head, latent, markov), needs, strict=False)
        ]
        count = hidden.shape[0]
        losses = torch.zeros((), dtype=work, device=hidden.device)
        acceptance = torch.empty(count, dtype=work, device=hidden.device)
        agrees = torch.empty(count, dtype=torch.bool, device=hidden.device)
        size = max(16, _CHUNK.get(hidden.device.type, _CHUNK["cuda"]) // head.shape[0])
        chunk = _compiled_chunk() if hidden.device.type == "cuda" else _chunk
        for first in range(0, count, size):
            part = slice(first, first + size)
            h, e = hidden[part].to(products), None if latent is None else latent[part].to(products)
            logits = (h @ head_.T).to(work)
            derivative = None
            if softcap is not None:
                squashed = torch.tanh(logits / softcap)
                derivative = 1 - squashed.square()
                logits = squashed * softcap
            if e is not None and markov_ is not None:
                logits += e @ markov_.T
            p, w = labels[label_rows[part]].to(work), weight[part].to(work).unsqueeze(1)
            if compare:
                agrees[part] = logits.argmax(1) == p.argmax(1)
            loss, acceptance[part], slope = chunk(logits, p, w)
            losses += loss
            if markov_ is not None and e is not None:
                _add(grads, 2, part, slope.to(products), markov_)
                _add_weights(grads, 3, slope.to(products), e)
            if derivative is not None:
                slope = slope * derivative
            _add(grads, 0, part, slope.to(products), head_)
            _add_weights(grads, 1, slope.to(products), h)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, head, latent, markov)]
        ctx.mark_non_differentiable(acceptance, agrees)
        return losses, acceptance, agrees

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = outputs[0]
        grads = [
            None if g is None else (g * scale).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None, None)


@functools.cache
def _compiled_chunk() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """`_chunk` compiled: its fifteen passes over the logits, fused. On a GPU they would take longer than the products."""
    compiled = torch.compile(_chunk, dynamic=True)  # the last chunk of a batch is shorter
    try:
        ones = torch.ones(2, 8, device="cuda")
        compiled(ones.clone(), ones / 8, ones[:, :1])
    except Exception as error:  # no compiler, or an incompatible Triton: many kinds of error
        warnings.warn(f"the loss runs uncompiled, slower: {type(error).__name__}: {error}", stacklevel=2)
        return _chunk
    return compiled


def _chunk(logits: Tensor, p: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, acceptance [c] and d loss / d logits [c, V] of one chunk; `logits` and `p` are overwritten.

    With P = sum p and g = sign(q - p) / 2:  d CE = P q - p,  d TV = q (g - sum g q).
    """
    mass = p.sum(1, keepdim=True)
    top = logits.amax(1, keepdim=True)
    logits -= top
    entropy = -(p * logits).sum(1, keepdim=True)
    q = logits.exp_()
    total = q.sum(1, keepdim=True)
    entropy += mass * total.log()
    q /= total
    gap = q - p
    tv = 0.5 * (gap.abs().sum(1, keepdim=True) + (1 - mass).clamp(min=0))
    sign = gap.sign_()
    pull = (sign * q).sum(1, keepdim=True)  # 2 sum g q
    slope = sign.mul_(0.5 * TV).add_(CE * mass - 0.5 * TV * pull).mul_(q).sub_(p.mul_(CE)).mul_(w)
    loss = (w * (CE * entropy + TV * tv)).sum()
    return loss, (1 - tv).squeeze(1), slope


def _add(grads: list[Tensor | None], which: int, part: slice, slope: Tensor, matrix: Tensor) -> None:
    found = grads[which]
    if found is not None:
        found[part] = (slope @ matrix).to(found.dtype)


def _add_weights(grads: list[Tensor | None], which: int, slope: Tensor, inputs: Tensor) -> None:
    found = grads[which]
    if found is not None:
        if found.dtype == slope.dtype:
            found.addmm_(slope.T, inputs)
        else:
            found += slope.T @ inputs


def confidence_loss(logits: Tensor, acceptance: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of BCE(confidence, acceptance): [R] logits, [R] labels in [0, 1], [R] weights."""
    bce = F.binary_cross_entropy_with_logits(logits, acceptance.clamp(0, 1), reduction="none")
    return (weight * bce).sum()
