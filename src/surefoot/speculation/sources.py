"""Two drafters in one: which of them drafts for a request, and what each of them is believed to be worth.

The choice reads the length of the match that prompt lookup found (a function of the committed context), sizes of the step
that the host knows, and outcomes of earlier steps. No drafted token and no confidence of this step's blocks enters it: when
it is made, none exists. Given the choice, a block is drawn from the q of the chosen source, verified and accepted by the
exact rule, so the emitted token has the target's law whatever was chosen, and therefore on average over choices too
(docs/concepts.md).

What is learned is kept apart: a lookup's outcomes never move the trained drafter's estimates, nor the other way round.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.speculation.estimator import (
    ConfidenceSource,
    Evidence,
    Ints,
    LogisticEstimator,
    SignalConfidence,
    certain,
)
from surefoot.speculation.live_cost import LiveCost

Floats = npt.NDArray[np.float64]
LOOKUP_PRIOR = (-2.0, 1.0)
"""Intercept and slope over log2 of the match length: a match of 4 is believed half the time, one of 16 nine times in ten."""
TRAINED_PRIOR = (0.0, 0.0)
"""Half of the trained drafts, whatever the match."""
PROBE_EVERY = 16
"""Of this many steps in which the trained drafter rests because it promises a loss, it drafts in one all the same: where
the model can be run for some requests alone, for one of them, in turn."""
COMPARE_EVERY = 64
"""While the model does not rest, of this many steps the trained drafter has one for itself and the lookup one in which it
takes every match, whatever is believed: a source that is never chosen would never be seen to have become the better one."""
CONTEXT_STEP = 256  # tokens; costs are looked up this coarsely


class SourceChoice:
    """The match lengths at which a request takes the lookup's draft: those that promise more emitted tokens per ms.

    A source with survivals S is worth max over w of R (1 + S_1 + ... + S_w) / C(w), where C(w) is the measured cost of a
    step of R requests that verify w drafts each, plus D(R) where the model has to run. Without a cost table steps cost the
    same, and the longer draft wins. Where even the trained draft promises less than a plain step, a request without a match
    gets no draft, and the model rests.

    Attributes:
        lookup, trained: conditional acceptance by position, given log2 of the match length; learned by `observe`.
        costs: the live cost of the engine; its own and empty until `CombinedDrafter.use_costs`.
        wants_model: whether a request of the last observed step would take the trained draft again.
    """

    def __init__(
        self,
        lookup_gamma: int,
        trained_gamma: int,
        longest_match: int,
        device: torch.device | str = "cpu",
        costs: LiveCost | None = None,
    ) -> None:
        self.lookup = LogisticEstimator(lookup_gamma, device, prior=LOOKUP_PRIOR)
        self.trained = LogisticEstimator(trained_gamma, prior=TRAINED_PRIOR)
        self.longest_match, self.device = longest_match, torch.device(device)
        self.costs = LiveCost() if costs is None else costs
        self.only_trained = False  # profiling measures D with it
        self.wants_model = True
        self._calls = 0
        self._made_for: tuple[object, ...] = ()
        self._takes_lookup = np.zeros(longest_match + 1, dtype=bool)
        self._tables = torch.empty(0)  # [4, longest_match + 1] bool on the device, by the kind of step

    def decide(self, match: Tensor, context: int, skips_model: bool = True) -> Tensor:
        """Who takes the lookup's draft: [R] int64 match lengths, 0 for none -> [R] bool.

        Args:
            match: on the device; never read by the host.
            context: an upper bound of the cached lengths, in tokens.
            skips_model: the model runs only for those who take its draft; otherwise its time is spent either way, unless
                it rests.
        """
        self._calls += 1
        if self.only_trained:
            return torch.zeros_like(match, dtype=torch.bool)
        learned = (self.lookup.refits, self.trained.refits)
        made_for = (match.shape[0], context // CONTEXT_STEP, skips_model, *learned, self.costs, self.costs.version)
        if made_for != self._made_for:
            self._made_for = made_for
            self._takes_lookup = self.takes_lookup(match.shape[0], context, skips_model)
            found = np.arange(self.longest_match + 1) > 0
            # The usual step; one in which the model does not rest; every match is looked up; the model drafts for all.
            kinds = [self._takes_lookup, self._takes_lookup & found, found, found & False]
            self._tables = self._to_device(np.stack(kinds))
        if skips_model and self._takes_lookup.all():
            # The model rests. It is tried on one request: D(R) is not small.
            looked_up = torch.ones_like(match, dtype=torch.bool)
            if self._probing:
                looked_up[self._calls // PROBE_EVERY % match.shape[0]] = False
            return looked_up
        usual = int(self._probing)
        return self._tables[{0: 3, COMPARE_EVERY // 2: 2}.get(self._calls % COMPARE_EVERY, usual)][match]

    @property
    def _probing(self) -> bool:
        return self._calls % PROBE_EVERY == 0

    @property
    def model_rests(self) -> bool:
        """Whether the model need not run in the step last decided, for all the host knows without looking at it."""
        return not (self.wants_model or self._probing or self.only_trained)

    def takes_lookup(self, requests: int, context: float, skips_model: bool = True) -> npt.NDArray[np.bool_]:
        """The decision for every match length 0 ... longest_match, where all requests decide alike."""
        found = np.arange(self.longest_match + 1)
        lookup, trained = (1.0 + _expected(e, _evidence(found)) for e in (self.lookup, self.trained))
        lookup[0] = 1.0  # no match, no draft
        widest = max(lookup.shape[1], trained.shape[1])
        costs, draft_ms = np.ones(widest), np.zeros(trained.shape[1])
        table = self.costs.table
        if table is not None:
            rows = table.step_costs(requests, requests, requests * (widest - 1) + 1, context, draft_requests=0)
            costs = rows[::requests]
            draft_ms += [table.draft_ms_at(requests, max(width, 1)) for width in range(len(draft_ms))]
        with_lookup = (lookup / costs[: lookup.shape[1]]).max(1)
        with_model, drawn = ((trained / (costs[: trained.shape[1]] + paid)).max(1) for paid in (draft_ms, 0.0))
        takes = with_lookup >= with_model
        if skips_model or takes[0]:  # a model that does not pay without a match rests, and rests for all
            return takes
        return (with_lookup >= drawn) & (found > 0)

    def observe(self, match: Ints, accepted: Ints, widths: Ints, drawn: npt.NDArray[np.bool_]) -> None:
        """Learn about the trained drafter from a step's blocks: [R] each, `drawn` where it drafted.

        The lookup's outcomes reach `lookup` through the `SignalConfidence` that shares it.
        """
        self.wants_model = not self._takes_lookup[match].all()
        if drawn.any():
            signal = np.repeat(_evidence(match[drawn])[:, None], self.trained.gamma, axis=1)
            self.trained.observe(signal, accepted[drawn], widths[drawn])

    def _to_device(self, values: npt.NDArray[np.bool_]) -> Tensor:
        host = torch.from_numpy(values)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def _evidence(match: npt.NDArray[np.integer]) -> Floats:
    """log2 of match lengths; 0 for none."""
    return np.log2(np.maximum(match, 1)).astype(np.float64)


def _expected(estimator: LogisticEstimator, evidence: Floats) -> Floats:
    """Expected accepted drafts at widths 0 ... gamma: [M] -> [M, gamma + 1]."""
    intercept, slope = estimator.fit
    confidence = 0.5 * (1.0 + np.tanh(0.5 * (intercept + slope * evidence[:, None])))
    return np.pad(np.cumprod(confidence, 1).cumsum(1), ((0, 0), (1, 0)))


class CombinedConfidence:
    """Confidence of blocks from two sources: each judged by its own estimate, each learning from its own blocks alone.

    In the evidence, `match` is the match length of every request, whoever drafts for it. `logits` and `signal` are the
    trained drafter's: NaN in the rows of the lookup, None where its model did not run.

    Args:
        choice: whose `lookup` estimate is used and taught, and which learns what the trained drafter is worth.
        trained: confidence of the trained drafter.
    """

    def __init__(self, choice: SourceChoice, trained: ConfidenceSource) -> None:
        self.choice, self.trained = choice, trained
        self.lookup = SignalConfidence(choice.lookup)
        self.gamma = max(self.lookup.gamma, trained.gamma)
        # [longest match + 1, gamma] confidence of the lookup by match length, as of the estimate's refit of this number
        self._by_match, self._refit = torch.empty(0), -1

    @property
    def warming_up(self) -> bool:
        """The lookup alone: what the trained drafter is worth, its head knows."""
        return self.lookup.warming_up

    def confidence(self, evidence: Evidence, explored: int = 0) -> Tensor:
        match, scored = evidence.match, model_scores(evidence)
        assert match is not None
        from_lookup = self._from_lookup(match)
        if scored is None:
            return certain(from_lookup, match > 0, explored) if explored else from_lookup
        looked_up = scored[:, 0].isnan()
        from_model = self._widened(self.trained.confidence(evidence.first(self.trained.gamma)))
        return torch.where(looked_up.unsqueeze(1), certain(from_lookup, (match > 0) & looked_up, explored), from_model)

    def _from_lookup(self, match: Tensor) -> Tensor:
        """[R] -> [R, gamma]; worked out for every match length once the estimate has changed."""
        if self._refit != self.choice.lookup.refits:
            self._refit = self.choice.lookup.refits
            every = torch.arange(self.choice.longest_match + 1, device=match.device)
            evidence = every.clamp(min=1).log2().unsqueeze(1).expand(-1, self.lookup.gamma)
            self._by_match = self._widened(self.choice.lookup.estimate(evidence))
        return self._by_match[match]

    def _widened(self, confidence: Tensor) -> Tensor:
        """[R, n] -> [R, gamma], 0 where its source never drafts."""
        missing = self.gamma - confidence.shape[1]
        return F.pad(confidence, (0, missing)) if missing else confidence

    def observe(self, evidence: Evidence, accepted: Tensor | Ints, widths: Tensor | Ints) -> None:
        assert evidence.match is not None
        accepted, widths = np.asarray(accepted, np.int64), np.asarray(widths, np.int64)
        match, scored = evidence.match.numpy(), model_scores(evidence)
        drawn = np.zeros(len(match), bool) if scored is None else ~np.isnan(scored[:, 0].numpy())
        self.choice.observe(match, accepted, widths, drawn)
        if drawn.any():
            own = evidence.first(self.trained.gamma).rows(torch.from_numpy(drawn))
            self.trained.observe(own, accepted[drawn], widths[drawn])
        if (found := ~drawn & (match > 0)).any():
            signal = torch.from_numpy(_evidence(match[found])).unsqueeze(1).expand(-1, self.lookup.gamma)
            self.lookup.observe(Evidence(signal=signal), accepted[found], widths[found])


def model_scores(evidence: Evidence) -> Tensor | None:
    """[R, gamma] of the drafter's model, NaN in the rows of blocks that another source drafted; None: it did not run."""
    return evidence.signal if evidence.logits is None else evidence.logits
