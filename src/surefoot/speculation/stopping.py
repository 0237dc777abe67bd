"""Optimal stopping: choose positions to verify one by one, as long as going on is expected to pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.speculation.continuation import ContinuationModel
from surefoot.speculation.planner import Decision, Planner, Reason, StepLoad
from surefoot.speculation.ranking import Floats, mandatory, ranked, sums, widths_of

FEW = 8
"""Up to so many requests the rule looks again after every position."""


class Selection(NamedTuple):
    """What the stopping rule chooses to verify."""

    budget: int  # K
    widths: tuple[int, ...]  # [D]
    expected_tokens: float


@dataclass(frozen=True)
class StoppingProblem:
    """One step as the stopping rule sees it; every array is on the host."""

    survival: npt.NDArray[np.float32]  # [D, gamma] of this step's blocks
    limits: npt.NDArray[np.int64]  # [D] largest widths
    costs: Floats  # [limits.sum() + 1] ms of the step at K = 0, 1, ...
    requests: int  # R, tokens that are emitted without any draft
    min_width: int
    price: float | None  # tokens per ms of past steps (None: not known yet)
    model: ContinuationModel


def stopping_rule(problem: StoppingProblem) -> Selection:
    """The rule of `StoppingPlanner`: choose positions one by one until no number of further ones is expected to pay."""
    survival, limits, costs, price = problem.survival, problem.limits, problem.costs, problem.price
    ordered, owner = ranked(survival, limits, problem.min_width)
    full, few = len(ordered), len(limits) <= FEW
    expected = problem.requests + sums(ordered)
    chosen = mandatory(limits, problem.min_width)
    rises = np.flatnonzero(costs[1:] > costs[:-1])  # the last K of every shelf: the rest of a shelf is free
    start = np.arange(len(limits)) * (survival.shape[1] + 1)
    gains_ahead: Floats | None = None  # computed when first needed
    while chosen < full:
        shelf = int(rises.searchsorted(chosen))
        end = int(rises[shelf]) if shelf < len(rises) else full
        if end > chosen:
            chosen = end  # whatever these positions are: reading them first would be looking ahead
            continue
        stop, now = expected[chosen], costs[chosen]
        if few:  # a next position that pays for itself needs no model
            with_next, then = expected[chosen + 1], costs[chosen + 1]
            if with_next * now > stop * then if price is None else with_next - stop > price * (then - now):
                chosen += 1
                continue
        if gains_ahead is None:
            gains_ahead = _gains(problem)
        widths = np.bincount(owner[:chosen], minlength=len(limits))
        gains = gains_ahead[start + widths].ravel()
        gains.sort()
        ahead, go = stop + gains[: chosen - full - 1 : -1].cumsum(), costs[chosen + 1 :]
        worth = ahead / go - stop / now if price is None else (ahead - stop) - price * (go - now)
        best = int(worth.argmax())
        if worth[best] <= 0:
            break
        # With few requests every position can change the plan: look again after each. With many, what they reveal is
        # on average what was expected, and half of the way is soon enough.
        chosen += 1 if few else 1 + best // 2
    return Selection(chosen, widths_of(owner, chosen, len(limits)), float(expected[chosen]))


def _gains(problem: StoppingProblem) -> Floats:
    """Expected gain of every further position, for every width a request may have so far: [D * (gamma + 1), gamma].

    The next position counts its own survival, later ones what the model expects; -1 for the positions before it and for
    those beyond the limit.
    """
    requests, gamma = problem.survival.shape
    next_position = np.arange(problem.survival.size) % gamma
    expected = problem.model.expect(next_position, problem.survival.ravel()).reshape(requests, gamma, gamma)
    ahead = np.where(np.tri(gamma, k=-1), -1.0, 1.0)  # [next position, position]: -1 before it
    gains = np.full((requests, gamma + 1, gamma), -1.0)
    np.minimum(expected, ahead, out=gains[:, :-1])
    if problem.limits.min() < gamma:
        inside = np.arange(gamma) < problem.limits[:, None]
        np.minimum(gains, np.where(inside, 1.0, -1.0)[:, None], out=gains)
    return gains.reshape(-1, gamma)


@dataclass
class StoppingPlanner(Planner):
    """Optimal stopping on current survivals over any cost curve, without looking ahead.

    Positions are chosen in descending survival, each request's from left to right. The rule then knows the survivals of
    the chosen positions and of the next position of every request; that one depends on the tokens before it alone.
    Positions after it are valued by `model`, learned from past steps. Stop when no number n >= 1 of further positions is
    expected to pay; otherwise choose the next one and look again, with the survival it reveals.

    "To pay" is measured at the long-run price of time: tokens minus `price` times ms, where the price is the tokens per
    ms of past steps at this batch size. Users wait for a sum of steps, and that is maximised by one price for all of
    them (Dinkelbach's transform of the ratio of sums). Maximising each step's own ratio would trim unlucky blocks too
    little and lucky ones too much. Until a price is known the ratio of the step itself is used (beside a prompt chunk:
    the rate of these requests without drafts).

    Steps with prompt chunks do not count towards the price. Every answer needs its prompt, whatever is verified: that
    time is the same for all plans. Against the ratio of such a step, most of which is spent already, a row would look
    cheap; it is worth what it is worth in any other step.

    Attributes:
        rule: `stopping_rule`, or a faster implementation of it.
    """

    rule: Callable[[StoppingProblem], Selection] = stopping_rule

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = ContinuationModel(self.gamma)
        self.prices, self._time_scale = PriceOfTime(), self.costs.time_scale

    def decide(
        self, current: Tensor | npt.NDArray[np.floating], load: StepLoad, limits: npt.NDArray[np.int64] | None = None
    ) -> Decision:
        """Choose the budget from the survivals of this step's blocks ([D, gamma], on the host), then learn from them.

        `limits` [D], at most `max_width`, replace those of the load.
        """
        limits = self.limits_of(load) if limits is None else limits
        if self._time_scale != self.costs.time_scale:  # old prices are in old milliseconds
            self.prices, self._time_scale = PriceOfTime(), self.costs.time_scale
        survival = np.asarray(current)
        full = int(limits.sum())
        decision = self.settled(load, full) or self._search(survival, load, limits, full)
        self.model.observe(survival, limits)  # after the decision: nothing of this step informs its own continuation
        if decision.expected_tokens is not None and decision.predicted_ms and not load.prefill_tokens:
            self.prices.observe(load.requests, decision.expected_tokens, decision.predicted_ms)
        return decision

    def _search(
        self, survival: npt.NDArray[np.floating], load: StepLoad, limits: npt.NDArray[np.int64], full: int
    ) -> Decision:
        costs, price = self._costs(load, full + 1), self.prices.price(load.requests)
        if price is None and load.prefill_tokens:
            assert self.table is not None
            price = load.requests / float(self.table.step_costs(load.requests, load.requests, 1, load.context, 0)[0])
        budget, widths, tokens = self.rule(
            StoppingProblem(survival, limits, costs, load.requests, self.min_width, price, self.model)
        )
        reason = Reason.PLANNED if budget < full else Reason.FULL
        return self._decision(load, budget, reason, full, tokens=tokens, costs=costs, widths=widths)


class PriceOfTime:
    """Tokens per ms of past steps, by power of two of the batch size, with exponential forgetting."""

    def __init__(self, decay: float = 0.995, settle: int = 32) -> None:
        self.decay, self.settle = decay, settle
        self._totals: dict[int, tuple[float, float, int]] = {}

    def observe(self, requests: int, tokens: float, ms: float) -> None:
        """Take one step."""
        old_tokens, old_ms, steps = self._totals.get(requests.bit_length(), (0.0, 0.0, 0))
        self._totals[requests.bit_length()] = (old_tokens * self.decay + tokens, old_ms * self.decay + ms, steps + 1)

    def price(self, requests: int) -> float | None:
        """Tokens per ms at this batch size, or None before enough steps."""
        tokens, ms, steps = self._totals.get(requests.bit_length(), (0.0, 0.0, 0))
        return tokens / ms if steps >= self.settle else None
