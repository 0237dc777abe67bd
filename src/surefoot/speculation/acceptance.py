"""The exact acceptance rule (Leviathan et al. 2023, Chen et al. 2023), on tensors and without a host read.

For each request the drafted tokens x_1 ... x_w are compared left to right with the target: x_k is accepted when
u_k < p_k(x_k) / q_k(x_k). At the first rejection the recovered token is drawn from normalised max(p - q, 0); when the whole
window is accepted, the bonus token is drawn from the target's next distribution. Whatever q is, the emitted tokens then follow
the target's law, provided that x_k really was drawn from q_k and that w did not depend on x_k or anything after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """The distributions a block was drawn from.

    `probs` is the very tensor the drafts were drawn from ([R, gamma, V_draft] float32), or None for a point mass on the draft.
    `vocabulary` maps draft ids to target ids ([V_draft] int64); outside it q is exactly 0. Where only some of the requests
    drew their drafts, `rows` says which row of `probs` and `draft_ids` is theirs; the others' q is a point mass. Drafts
    after the last position of `probs` are never verified.
    """

    probs: Tensor | None
    vocabulary: Tensor | None = None
    draft_ids: Tensor | None = None  # [R, gamma] int64, the drafted tokens as indices into `probs`
    rows: Tensor | None = None  # [D] int64, -1 for a point mass (None: every request's own row)


@dataclass(frozen=True)
class Verdict:
    """Two integers per request."""

    accepted: Tensor  # [R] int64, accepted draft tokens
    next_token: Tensor  # [R] int64, the recovered or the bonus token; 0 where `invalid`
    invalid: Tensor  # [R] bool, the target's row has no distribution: NaN or infinity, or no token is allowed

    @classmethod
    def of(cls, accepted: Tensor, next_token: Tensor) -> Verdict:
        """From a next token that is -1 where there is none."""
        return cls(accepted, next_token.clamp(min=0), next_token < 0)


def leading_ones(flags: Tensor) -> Tensor:
    """Length of the leading run of True along the last axis: [..., n] bool -> [...] int64."""
    return flags.to(torch.int64).cumprod(-1).sum(-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Sample an index from unnormalised weights by inverse CDF in float64.

    Args:
        weights: [N, V] float32, non-negative.
        u: [N] float64 in [0, 1).

    Returns:
        [N] int64; never an index of weight 0, and -1 for a row without mass.
    """
    cumulative = weights.to(torch.float64).cumsum(-1)
    index = torch.searchsorted(cumulative, u.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    # Rounding may leave the goal at the total itself: then the last positive weight is meant.
    place = torch.arange(weights.shape[-1], device=weights.device)
    return torch.minimum(index, torch.where(weights > 0, place, -1).amax(-1))


def _of_all(accepted: Tensor, requests: int) -> Tensor:
    """Accepted lengths of all requests, [E]: those without a draft come after the drafted ones and accept nothing."""
    return torch.nn.functional.pad(accepted, (0, requests - accepted.shape[0]))


def accept_greedy(argmax: Tensor, anchor_row: Tensor, drafts: Tensor, widths: Tensor) -> Verdict:
    """Acceptance at temperature 0: a draft stands while it equals the target's argmax.

    Args:
        argmax: [L] int64, the target's greedy token after every logit row; -1 for a row without one.
        anchor_row: [R] int64, logit row of each request's anchor; its drafts follow it.
        drafts: [D, gamma] int64 of the first D <= R requests; the others have no draft.
        widths: [D] int64, drafts that were sent to the target.
    """
    drafted, gamma = drafts.shape
    k = torch.arange(gamma, device=drafts.device)
    rows = (anchor_row[:drafted].unsqueeze(1) + k).clamp(max=argmax.shape[0] - 1)
    accepted = leading_ones((argmax[rows] == drafts) & (k < widths.unsqueeze(1)))
    accepted = _of_all(accepted, anchor_row.shape[0])
    return Verdict.of(accepted, argmax[anchor_row + accepted])


def accept_sampled(
    target_probs: Tensor,
    anchor_row: Tensor,
    drafts: Tensor,
    widths: Tensor,
    proposal: Proposal,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
    sample: Callable[[Tensor, Tensor], Tensor] = draw,
) -> Verdict:
    """Acceptance at any temperature.

    Args:
        target_probs: [L, V] float32, the target's processed distribution after every logit row; all zeros for a row without.
        anchor_row: [R] int64, logit row of each request's anchor; its drafts follow it.
        drafts: [D, gamma] int64 target ids of the first D <= R requests; the others have no draft.
        widths: [D] int64, drafts that were sent to the target.
        proposal: what the drafts were drawn from.
        accept_uniforms: [D, gamma] float64 in [0, 1).
        draw_uniforms: [R] float64 in [0, 1), for the recovered or bonus token.
        sample: `draw`, or something that gives the same index faster.
    """
    drafted, gamma = drafts.shape
    k = torch.arange(gamma, device=drafts.device)
    rows = (anchor_row[:drafted].unsqueeze(1) + k).clamp(max=target_probs.shape[0] - 1)
    p = target_probs[rows, drafts].to(torch.float64)  # [D, gamma]
    if proposal.probs is None:
        q = torch.ones_like(p)
    else:
        assert proposal.draft_ids is not None
        q = proposal.probs.gather(-1, proposal.draft_ids.unsqueeze(-1)).squeeze(-1).to(torch.float64)
        q = torch.nn.functional.pad(q, (0, gamma - q.shape[1]), value=1.0) if q.shape[1] < gamma else q
        if proposal.rows is not None:
            q = torch.where((proposal.rows >= 0).unsqueeze(1), q[proposal.rows.clamp(min=0)], 1.0)
    accepted = leading_ones((accept_uniforms * q < p) & (k < widths.unsqueeze(1)))

    # The row after the last accepted token: the bonus distribution, or p of the rejected draft (minus q, below).
    weights = target_probs[anchor_row + _of_all(accepted, anchor_row.shape[0])]  # [R, V], a copy
    if not (drafted and gamma):
        return Verdict.of(_of_all(accepted, anchor_row.shape[0]), sample(weights, draw_uniforms))
    index = torch.arange(drafted, device=drafts.device)
    first = accepted.clamp(max=gamma - 1)
    rejected = accepted < widths
    row = index if proposal.rows is None else proposal.rows.clamp(min=0)
    drawn = rejected if proposal.rows is None else rejected & (proposal.rows >= 0)
    if proposal.probs is not None:
        position = first.clamp(max=proposal.probs.shape[1] - 1)
        q_row = proposal.probs[row, position] * drawn.unsqueeze(1)  # [D, V_draft]
        if proposal.vocabulary is None:
            residual = (weights[:drafted] - q_row).clamp_(min=0)
        else:
            residual = weights[:drafted].clone()
            residual[:, proposal.vocabulary] = (residual[:, proposal.vocabulary] - q_row).clamp_(min=0)
        # p and q can agree to the last bit but for the rejected token's rounding: then p itself is the residual's limit.
        empty = residual.sum(-1, keepdim=True) <= 0
        weights[:drafted] = torch.where(empty, weights[:drafted], residual)
    point_masses = proposal.probs is None or proposal.rows is not None
    if point_masses:
        token, point = drafts[index, first], rejected if proposal.probs is None else rejected & ~drawn
        mass = weights[index, token]
        weights[index, token] = torch.where(point, 0.0, mass)
    next_token = sample(weights, draw_uniforms)
    if point_masses:
        # As above: a draft that holds the whole mass of p was rejected by rounding alone.
        lone = point & (next_token[:drafted] < 0) & (mass > 0)
        next_token[:drafted] = torch.where(lone, token, next_token[:drafted])
    return Verdict.of(_of_all(accepted, anchor_row.shape[0]), next_token)
