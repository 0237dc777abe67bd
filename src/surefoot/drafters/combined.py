"""Two drafters in one: prompt lookup where the text copies, the trained drafter everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.drafters.base import Draft, DraftContext, Drafter, DraftSampler
from surefoot.drafters.prompt_lookup import PREDICTED as IN_PREDICTION
from surefoot.drafters.prompt_lookup import PREDICTION, PromptLookupDrafter
from surefoot.speculation.estimator import ConfidenceSource
from surefoot.speculation.sources import CombinedConfidence, SourceChoice

if TYPE_CHECKING:
    from surefoot.cache.flat_batch import FlatBatch
    from surefoot.cache.paged import PagedCache
    from surefoot.speculation.live_cost import LiveCost
    from surefoot.targets.target import Target

LOOKUP, TRAINED, PREDICTED, NOBODY = 0, 1, 2, -1
"""Values of `Draft.source`."""


class CombinedDrafter(Drafter):
    """Per request and step either prompt lookup or a trained drafter, whichever `choice` prefers at this match length.

    It stays exact because of the order of things: the match is looked up in the committed context, the choice is made from
    its length, and only then is anything drawn. Whichever source was chosen, q is what its tokens came from: a point mass
    for the lookup's, the sampler's distribution for the trained drafter's.

    Where reading is free (a CPU) the model runs for those requests alone that take its draft, and not at all when nobody
    does. Elsewhere the host does not know who takes what: the model runs for all requests, unless nobody would have taken
    its draft in the last step the host has seen. Its context is kept either way: `extend` is called with the rows of every
    step, so a draft after any number of lookups is the one of a drafter that never paused.

    A draft's `match` is the match length of every request; its `confidence_logits` and `signal` are the trained drafter's:
    NaN where it did not draft, None where its model did not run.
    """

    rests = True

    def __init__(
        self,
        lookup: PromptLookupDrafter,
        trained: Drafter,
        choice: SourceChoice,
        *,
        reads_are_free: bool | None = None,
    ) -> None:
        """
        Args:
            lookup: of at least the trained drafter's gamma; its gamma is that of both.
            trained: the drafter with a model.
            choice: made for these two gammas and this lookup's longest match.
            reads_are_free: whether `propose` may look at its own values (None: on a CPU).
        """
        assert lookup.gamma >= trained.gamma, "a shorter lookup: make it as long as the trained block"
        self.lookup, self.trained, self.choice = lookup, trained, choice
        self.reads_are_free = reads_are_free
        self.gamma, self.block_slots = lookup.gamma, trained.block_slots
        self.feature_layers, self.cache_layers = trained.feature_layers, trained.cache_layers
        self.sources = (lookup.name, trained.name, PREDICTION)
        self.name = "+".join(self.sources[:2])
        self.has_confidence_head = trained.has_confidence_head
        self.model_gamma = trained.gamma

    @property
    def vocabulary(self) -> Tensor | None:  # type: ignore[override]
        return self.trained.vocabulary

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.trained.identity

    def pack(self) -> None:
        self.trained.pack()

    def confidence_source(self, device: torch.device | str, calibration: str | Path | None = None) -> ConfidenceSource:
        return CombinedConfidence(self.choice, self.trained.confidence_source(device, calibration))

    def draft_always(self, always: bool) -> None:
        self.choice.only_trained = always

    def separate(self) -> CombinedDrafter:
        """The same two drafters, and a choice between them of its own."""
        old = self.choice
        choice = SourceChoice(self.lookup.gamma, self.trained.gamma, old.longest_match, old.device)
        return CombinedDrafter(self.lookup, self.trained.separate(), choice, reads_are_free=self.reads_are_free)

    def use_costs(self, costs: LiveCost) -> None:
        """Choose sources by the costs that the engine plans with, from now on."""
        self.choice.costs = costs

    def bind(self, target: Target) -> None:
        self.trained.bind(target)

    def extend(self, features: Tensor, batch: FlatBatch, cache: PagedCache) -> None:
        """Also in steps in which nobody takes the trained draft: its context has no gaps."""
        self.trained.extend(features, batch, cache)

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        """Look up, choose, and let the model draft for the others; shorter trained drafts end early (`lengths`)."""
        found = self.lookup.propose(context)
        assert found.lengths is not None
        assert found.signal is not None
        match = found.signal[:, 0].to(torch.int64)
        reads_are_free = match.device.type == "cpu" if self.reads_are_free is None else self.reads_are_free
        looked_up = self.choice.decide(match, context.max_length, skips_model=reads_are_free)  # [R]
        source = torch.where(found.lengths > 0, LOOKUP, NOBODY)
        if found.source is not None:
            source = torch.where(found.source == IN_PREDICTION, PREDICTED, source)
        count = len(match)
        if reads_are_free:
            rows = (~looked_up).nonzero().squeeze(1)
            count = len(rows)
            if 0 < count < len(match):
                sampler.only(rows)
                context = replace(context, slots=context.slots[rows], lengths=context.lengths[rows])
        elif self.choice.model_rests:
            count = 0
        if not count:
            return replace(found, signal=None, match=match, source=source, model_rows=0)

        trained = self.trained.propose(context, sampler)
        if reads_are_free:
            drawn = (~looked_up).cumsum(0) - 1
        else:
            drawn = torch.arange(count, device=match.device)
        row, mine, gamma = drawn.clamp(min=0), looked_up.unsqueeze(1), self.trained.gamma

        def spread(values: Tensor | None) -> Tensor | None:
            """[count, trained gamma] of the model -> [R, gamma], NaN where it did not draft."""
            if values is None:
                return None
            wide = values.new_full((len(match), self.gamma), torch.nan)
            wide[:, :gamma] = torch.where(mine, torch.nan, values[row])
            return wide

        tokens = found.tokens.clone()
        tokens[:, :gamma] = torch.where(mine, tokens[:, :gamma], trained.tokens[row])
        return Draft(
            tokens=tokens,
            lengths=torch.where(looked_up, found.lengths, gamma if trained.lengths is None else trained.lengths[row]),
            confidence_logits=spread(trained.confidence_logits),
            signal=spread(trained.signal),
            match=match,
            source=torch.where(looked_up, source, TRAINED),
            drawn=torch.where(looked_up, -1, drawn),
            model_rows=count,
        )
