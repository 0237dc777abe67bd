"""What the text itself would go on with: the token after the last place that looked like its end.

A drafter of a few layers writes what it has learnt; what stands in the text already it sees through attention alone, and
mostly does not repeat. So at every position of a block the draft distribution is mixed with a point mass: q becomes
(1 - r) q + r [copy], where the copy is the token after the longest earlier occurrence of the text's suffix, drafts included
(the latest of equals), and the share r depends on the length of that occurrence alone. Shares are fitted on texts of the
target's (`fit_shares`) and lie in the drafter's calibration. A mixture with a point mass is a logit raised: temperature,
sharpness, filters and acceptance treat the result like any other draft logits, so it is exact. x_k is proposed from the
context and x_<k. The idea is that of the pointer and cache models (Grave et al., arXiv 1612.04426; See et al., 1704.04368),
the fit that of deleted interpolation (Jelinek and Mercer, 1980).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.drafters.base import DraftContext
from surefoot.drafters.prompt_lookup import suffix_matches

LONGEST = 16
"""Tokens up to which matches are told apart."""
_MOST, _PRIOR = 0.99, 20.0


class Copier:
    """The copies of R requests, position by position of a block, on any device and without a host read."""

    def __init__(self, context: DraftContext, gamma: int, longest: int = LONGEST) -> None:
        """
        Args:
            gamma: positions of the block.
            longest: tokens up to which matches are told apart.
        """
        text, matched = (F.pad(t.to(torch.int64), (0, gamma)) for t in suffix_matches(context, longest))
        self._longest, self._text, self._matched = longest, text, matched  # [R, width + gamma] each
        self._end = context.lengths.unsqueeze(1)  # [R, 1], index of the last token
        self._position = torch.arange(text.shape[1], device=text.device)

    def copies(self) -> tuple[Tensor, Tensor]:
        """The token that would come next, and the length of the match that says so (0: none): [R] int64 each."""
        width = self._text.shape[1]
        best = (self._matched * width + self._position).argmax(1, keepdim=True)  # longest, then latest
        match = self._matched.gather(1, best).squeeze(1)
        token = self._text.gather(1, (best + 1).clamp(max=width - 1)).squeeze(1)
        return torch.where(match > 0, token, -1), match

    def append(self, tokens: Tensor) -> None:
        """The text goes on with these, [R] int64."""
        before = F.pad(self._matched[:, :-1], (1, 0)).clamp(max=self._longest - 1)
        self._matched = (before + 1) * ((self._text == tokens.unsqueeze(1)) & (self._position <= self._end))
        self._end = self._end + 1
        self._text = self._text.scatter(1, self._end, tokens.unsqueeze(1))


def raise_copies(logits: Tensor, probs: Tensor, columns: Tensor, shares: Tensor) -> Tensor:
    """Draft logits of the mixture.

    Args:
        logits: [R, V] float32.
        probs: [R, V] their softmax.
        columns: [R] int64, the copy's column; -1 where it is not in the draft vocabulary.
        shares: [R] float32 in [0, 1).

    Returns:
        [R, V] float32, whose softmax is (1 - share) probs + share [copy].
    """
    share, column = shares.double().unsqueeze(1), columns.clamp(min=0).unsqueeze(1)
    own, old = probs.gather(1, column), logits.gather(1, column)
    normaliser = logits.amax(1, keepdim=True) - probs.amax(1, keepdim=True).double().log()
    raised = (normaliser + (own + share / (1 - share)).log()).float()  # against the others at 1 - r of what they were
    return logits.scatter(1, column, torch.where((columns.unsqueeze(1) >= 0) & (share > 0), raised, old))


def fit_shares(
    match: npt.NDArray[np.int64], copied: npt.NDArray[np.bool_], own: npt.NDArray[np.float64]
) -> list[float]:
    """The likeliest shares by match length, 0 ... `LONGEST`, by expectation maximisation.

    Args:
        match: [N] length of the match at a position of a text, 0 where there is none.
        copied: [N] whether the text's token there is the copy.
        own: [N] probability that the drafter alone gave to the text's token.

    Returns:
        `LONGEST` + 1 numbers in [0, 1), 0 first.
    """
    shares = [0.0]
    for length in range(1, LONGEST + 1):
        here = match == length
        hit, alone, share = copied[here], own[here], 0.5
        for _ in range(100):
            from_copy = np.where(hit, share / np.maximum(share + (1 - share) * alone, 1e-30), 0.0)
            # What was seen of shorter matches counts as a few positions: a longer one is rare.
            share = float((from_copy.sum() + _PRIOR * shares[-1]) / (len(hit) + _PRIOR))
        shares.append(min(share, _MOST))
    return shares
