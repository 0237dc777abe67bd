"""A drafter without a model: what followed the last time the text looked like this?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.drafters.base import Draft, DraftContext, Drafter, DraftSampler, Prediction
from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.validation import integer

PREDICTION = "prediction"
"""The name of the source that is a text given by the client."""
LOOKED_UP, PREDICTED = 0, 1
"""Values of `Draft.source`."""


class PromptLookupDrafter(Drafter):
    """Proposes the continuation of the longest earlier occurrence of the text's own suffix.

    The suffix ends at the anchor and is looked for in prompt and output alike; a longer match wins, then the more
    recent one. Match and suffix may overlap. Only committed tokens are read. With a match that ends d tokens before
    the anchor the proposal is the text after the match, and where that runs out, at the anchor, it starts again:
    the text is taken to repeat with period d, which is what an overlapping match says. So a request proposes gamma
    tokens or none.

    A request that brings a prediction has its suffix looked for there, too; a match at least as long wins. As long as the whole
    output is the prediction's beginning, that counts as the longest match. Proposals end where the prediction ends.
    """

    name = "prompt-lookup"
    sources = (name, PREDICTION)

    def __init__(self, gamma: int, *, max_match: int = 16, min_match: int = 2) -> None:
        """
        Args:
            gamma: tokens proposed after the anchor.
            max_match: match lengths are told apart up to this many tokens, 255 at most; the work grows with it.
            min_match: a shorter match proposes nothing. A single common token matches almost anywhere.
        """
        remedy = "a match is told apart up to max_match tokens, and proposes from min_match on"
        self.gamma = integer(
            "gamma", gamma, ConfigurationError, low=1, high=1 << 12, remedy="use drafter 'none' to draft nothing"
        )
        self.max_match = integer("max_match", max_match, ConfigurationError, low=1, high=255, remedy=remedy)
        self.min_match = integer("min_match", min_match, ConfigurationError, low=1, high=self.max_match, remedy=remedy)

    def propose(self, context: DraftContext, sampler: DraftSampler | None = None) -> Draft:
        """One pass over the histories of all requests; q is a point mass on the proposal, so the sampler is not used.

        Returns:
            A draft whose `signal` is the match length (0: none) and whose `lengths` are gamma or 0.
        """
        find = self._find_native if native.usable(context.history) else self._find
        tokens, match = find(context)
        lengths, source = (match > 0) * self.gamma, None
        if context.predictions:
            source = torch.where(match > 0, LOOKED_UP, -1)
            for row, slot in enumerate(context.slots.tolist()):
                if (prediction := context.predictions.get(slot)) is not None:
                    committed = context.history[slot, : int(context.lengths[row]) + 1]
                    continued, length = self._continue(prediction, committed)
                    if len(continued) and length >= match[row]:
                        tokens[row, : len(continued)] = continued
                        match[row], lengths[row], source[row] = length, len(continued), PREDICTED
        return Draft(
            tokens=tokens,
            lengths=lengths,
            signal=match.to(torch.float32).unsqueeze(1).expand(-1, self.gamma),
            point_mass=True,
            source=source,
        )

    def _continue(self, prediction: Prediction, committed: Tensor) -> tuple[Tensor, int]:
        """Where a text goes on in its prediction: at most gamma tokens, and the length of the match (0: none).

        Args:
            committed: [length + 1] int64, prompt and output up to the anchor.
        """
        text, output = prediction.tokens, committed[prediction.prompt_len :]
        said = len(output)
        if said < len(text) and torch.equal(text[:said], output):
            return text[said : said + self.gamma], self.max_match
        suffix = committed[-self.max_match :].flip(0)  # the anchor first
        reach = len(suffix) - 1
        padded, count = F.pad(text, (reach, 0), value=-1), len(text) - 1  # the last token has nothing after it
        alive = torch.ones(count, dtype=torch.bool, device=text.device)
        matched = torch.zeros(count, dtype=torch.int64, device=text.device)
        for back in range(len(suffix)):
            alive &= padded[reach - back : reach - back + count] == suffix[back]
            matched += alive
        if not count or (length := int(matched.max())) < self.min_match:
            return text[:0], 0
        start = int(matched.argmax()) + 1
        return text[start : start + self.gamma], length

    def _find_native(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """`_find` in one call: from the anchor backwards, until no match can be longer."""
        tokens, match = torch.ops.surefoot.look_up(
            context.history, context.slots, context.lengths, self.gamma, self.max_match, self.min_match
        )
        return tokens, match

    def _find(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Proposals [R, gamma] int64 and match lengths [R] int64 (0: none), on any device; the host reads nothing."""
        text, matched = suffix_matches(context, self.max_match)
        lengths, width = context.lengths.unsqueeze(1), text.shape[1]
        position = torch.arange(width, device=text.device)

        # One key orders by match length, then by recency.
        best = (matched.to(torch.int64) * width + position).argmax(1, keepdim=True)  # [R, 1]
        length = matched.gather(1, best).to(torch.int64)
        found = length >= self.min_match
        period = (lengths - best).clamp(min=1)
        ahead = torch.arange(self.gamma, device=text.device) % period
        tokens = text.gather(1, (best + 1 + ahead).clamp(max=width - 1)).to(torch.int64)
        return torch.where(found, tokens, text.gather(1, lengths).to(torch.int64)), torch.where(
            found, length, 0
        ).squeeze(1)


def suffix_matches(context: DraftContext, longest: int) -> tuple[Tensor, Tensor]:
    """How much of the end of every text stands at each earlier place of it; on any device, the host reads nothing.

    Args:
        longest: tokens up to which lengths are told apart, 255 at most; the work grows with it.

    Returns:
        text: [R, W] int32, the histories up to the longest anchor (int32 halves the traffic of the comparisons, which is all
            the time this takes).
        matched: [R, W] uint8, how many tokens up to and including each one are those up to the anchor; 0 from there on.
    """
    reach = longest - 1
    text = context.history[:, : context.max_length + 1].index_select(0, context.slots).to(torch.int32)
    # Padding at the start lets every place look back `longest` tokens; -1 is no token.
    padded, width = F.pad(text, (reach, 0), value=-1), text.shape[1]
    lengths = context.lengths.unsqueeze(1)  # [R, 1], index of the anchor
    suffix = padded.gather(1, lengths + torch.arange(reach, -1, -1, device=text.device))  # the anchor first
    alive = torch.arange(width, device=text.device) < lengths
    matched = torch.zeros(text.shape, dtype=torch.uint8, device=text.device)
    for back in range(longest):
        alive &= padded[:, reach - back : reach - back + width] == suffix[:, back : back + 1]
        matched += alive.view(torch.uint8)
    return text, matched
