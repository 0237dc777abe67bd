"""How many of the drafted tokens are worth verifying in this step.

Three rules choose the budget K. Under none of them does the verification of x_k depend on x_k or on anything drawn after
it; `docs/planning.md` says why that keeps the output distribution exact.

* `StalePlanner`: a global search on survivals published in an earlier step (DSpark paper, section 3.2, deployed
  asynchronously as in section 5.2). It takes `PublishedSurvival`, and no data of the current step can become one.
* `CausalPlanner`: Algorithm 1 of the paper on current survivals: verify in descending survival, stop at the first
  position that does not improve the rate. It reads a survival only after the position before it was chosen.
* `StoppingPlanner` (`stopping.py`): optimal stopping on current survivals. Positions after the chosen ones are valued by
  a model learned from past steps, so a cost cliff that only several more tokens pay for is still crossed.

The last two read current confidences on the host; on a device with asynchronous copies the step has to wait for them.
Every survival is rounded to a multiple of 2^-24 before it is summed. Sums are then exact in float64 whatever the order of
the requests, and since division rounds correctly, two budgets tie exactly when their float64 quotients are equal; the
smaller one wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.errors import ConfigurationError
from surefoot.speculation.cost import CostTable
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.ranking import GRID, Floats, mandatory, on_grid, ranked, sums, widths_of
from surefoot.speculation.survival import PublishedSurvival
from surefoot.validation import integer, number

CONTEXT_STEP = 16  # tokens; costs are looked up this coarsely
MOST_WIDTH = 1 << 12
KEPT_COSTS = 64


class Reason(str, Enum):
    """Why the planner chose this budget."""

    PLANNED = "planned"  # trimmed: fewer tokens are expected to emit more per ms
    FULL = "full_window_pays"  # searched, and verifying everything is best
    NO_TABLE = "no_table"  # verifies everything
    FLAT_TABLE = "flat_table"  # more tokens cost nothing on this table: verifies everything
    COLD = "cold_confidences"  # no request has published yet: verifies everything
    PREFILL = "prefill_in_batch"  # a prompt chunk dominates the step: trimming is suspended
    SMALL_GAIN = "gain_too_small"  # the best trim is expected to gain less than the minimum: verifies everything
    FORCED = "forced"  # the widths are given
    GUARD_WINDOW = "guard_window"  # target-only for a moment, to compare
    GUARD_OFF = "guard_off"  # target-only, because measured steps with drafts brought fewer tokens per ms
    NOTHING_DRAFTED = "nothing_drafted"  # every limit is 0

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Decision:
    """The budget of one step and what was expected of it.

    `expected_tokens` and `predicted_ms` are None where there was no table to predict with.
    """

    budget: int  # K
    reason: Reason
    full_budget: int  # what verifying everything would take
    expected_tokens: float | None = None
    predicted_ms: float | None = None
    predicted_gain: float = 0.0  # relative gain in tokens per ms over verifying everything, as the planner saw it
    stale_lag: float = 0.0  # mean age in steps of the survivals it planned with
    widths: tuple[int, ...] | None = None  # [D] forced, or chosen from this step's survivals (None: `allocate` chooses)

    @property
    def trims(self) -> bool:
        return self.budget < self.full_budget

    @property
    def expected_tokens_per_ms(self) -> float | None:
        if self.expected_tokens is None or not self.predicted_ms:
            return None
        return self.expected_tokens / self.predicted_ms


class StepLoad(NamedTuple):
    """What the host knows about a step before its blocks are drafted."""

    requests: int  # R, requests that emit: each brings an anchor row
    limits: Sequence[int] | npt.NDArray[np.int64]  # [D] largest width of each request that gets a draft
    prefill_tokens: int = 0  # rows of prompt chunks in the same pass
    context: float = 0.0  # mean cached length, tokens
    step: int = 0  # rotates a forced pattern
    model_requests: int | None = None  # requests the drafter's model is expected to run for (None: all D)
    depth: int | None = None  # tokens it drafts of each block (None: gamma)

    @property
    def draft_requests(self) -> int:
        """Requests that the draft pass is charged for: R in D(R)."""
        return len(self.limits) if self.model_requests is None else min(self.model_requests, len(self.limits))


def _width(name: str, value: int) -> int:
    return integer(name, value, ConfigurationError, low=0, high=MOST_WIDTH, remedy="a number of draft tokens")


class ForcedWidths:
    """One width for all requests, or a pattern that rotates over requests and steps: "3", "0,3,1,7".

    It exercises every mix of widths without a table. The widths do not depend on what is drafted, so they are exact.
    """

    def __init__(self, pattern: Sequence[int]) -> None:
        if not pattern:
            raise ConfigurationError("forced widths must be one or more integers >= 0, got none")
        self.pattern = tuple(_width("forced width", width) for width in pattern)

    @classmethod
    def parse(cls, text: str | int | Sequence[int]) -> ForcedWidths:
        """Read an integer, a sequence, or text such as "3" or "0,3,1,7"."""
        if isinstance(text, int):
            return cls([text])
        if isinstance(text, str):
            try:
                return cls([int(part) for part in text.split(",")])
            except ValueError as problem:
                raise ConfigurationError(
                    f"forced width must be a number or a pattern such as '0,3,1,7', got {text!r}"
                ) from problem
        return cls(text)

    def widths(self, step: int, limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[D] widths of this step, within the limits."""
        index = (np.arange(len(limits)) + step) % len(self.pattern)
        return np.minimum(np.array(self.pattern)[index], limits)


@dataclass
class Planner:
    """What the three rules share: the steps without a search, and how wide a window may be.

    Attributes:
        gamma: block length of the drafter.
        costs: measured cost; without a table everything is verified (and the reason says so).
        min_width, max_width: bounds of every request's window, within its own limit (max_width None: gamma).
        forced: widths that replace planning.
        trim_beside_prefill: trim although a prompt chunk shares the pass; its rows count as load either way.
    """

    gamma: int
    costs: LiveCost = field(default_factory=LiveCost)
    min_width: int = 0
    max_width: int | None = None
    forced: ForcedWidths | None = None
    trim_beside_prefill: bool = False

    def __post_init__(self) -> None:
        self.gamma, self.min_width = _width("gamma", self.gamma), _width("min_width", self.min_width)
        if self.max_width is not None:
            self.max_width = _width("max_width", self.max_width)
        self._kept_version = self.costs.version
        self._kept: dict[tuple[object, ...], Floats] = {}  # step costs of that version
        widest = self.gamma if self.max_width is None else self.max_width
        if not 0 <= self.min_width <= widest <= self.gamma:
            raise ConfigurationError(
                f"widths must satisfy 0 <= min_width <= max_width <= gamma, got min_width={self.min_width}, "
                f"max_width={widest}, gamma={self.gamma}"
            )

    @property
    def table(self) -> CostTable | None:
        return self.costs.table

    def limits_of(self, load: StepLoad) -> npt.NDArray[np.int64]:
        """[D] the limits of the requests, at most max_width: pass these to `allocate`."""
        widest = self.gamma if self.max_width is None else self.max_width
        return np.minimum(np.asarray(load.limits, dtype=np.int64), widest)

    def settled(self, load: StepLoad, full: int | None = None, lag: float = 0.0) -> Decision | None:
        """The decision of a step in which there is nothing to search, or None.

        Args:
            full: sum of the limits, if the caller has it.
            lag: mean age of the survivals that a search would use, in steps.
        """
        if full is None:
            widest = self.gamma if self.max_width is None else self.max_width
            full = int(sum(min(limit, widest) for limit in load.limits))
        if self.forced is not None:
            widths = self.forced.widths(load.step, self.limits_of(load))
            return self._decision(load, int(widths.sum()), Reason.FORCED, full, widths=tuple(widths.tolist()))
        if full == 0:
            return self._decision(load, 0, Reason.NOTHING_DRAFTED, full)
        if self.table is None:
            return Decision(full, Reason.NO_TABLE, full)
        if self.table.is_flat:
            return self._decision(load, full, Reason.FLAT_TABLE, full)
        if load.prefill_tokens and not self.trim_beside_prefill:
            return self._decision(load, full, Reason.PREFILL, full, lag=lag)
        return None

    def _decision(
        self,
        load: StepLoad,
        budget: int,
        reason: Reason,
        full: int,
        *,
        tokens: float | None = None,
        costs: Floats | None = None,
        gain: float = 0.0,
        lag: float = 0.0,
        widths: tuple[int, ...] | None = None,
    ) -> Decision:
        ms = None
        if costs is not None:
            ms = float(costs[budget])
        elif self.table is not None:
            first = load.requests + load.prefill_tokens + budget
            ms = float(self.table.step_costs(load.requests, first, 1, load.context, load.draft_requests, load.depth)[0])
        return Decision(budget, reason, full, tokens, ms, gain, lag, widths)

    def _costs(self, load: StepLoad, count: int) -> Floats:
        """Step cost in ms at K = 0 ... count - 1. Kept for steps of the same sizes; do not write to it."""
        assert self.table is not None
        first, context = load.requests + load.prefill_tokens, round(load.context / CONTEXT_STEP) * CONTEXT_STEP
        key = (load.requests, first, count, context, load.draft_requests, load.depth)
        if self._kept_version != self.costs.version or len(self._kept) > KEPT_COSTS:
            self._kept_version, self._kept = self.costs.version, {}
        if key not in self._kept:
            self._kept[key] = self.table.step_costs(*key)
        return self._kept[key]


@dataclass
class StalePlanner(Planner):
    """K* = argmax over K of E(K) / (D(R) + V(R + K) + overheads), E(K) = R + the K largest published survivals.

    One block says little about the next. Used as they are, its survivals trim after an unlucky block and widen after a
    lucky one, and one request can end up below a fixed width; their regression to the mean
    (`PublishedSurvival.forecast`) is the better expectation. With many requests the sum of the K largest counts, and it
    depends on the spread between requests, which regression removes. `forecast` therefore weighs the two by 1/sqrt(R).
    Measured with `simulate`: from 1 to 512 requests this stays at or above the best fixed width, where the published
    values alone fall up to 9 % below it at one request. Without `forecast` it is the paper's formula.

    Attributes:
        forecast: plan with the regressed survivals as described.
        min_gain: least relative gain in tokens per ms that a trim must be expected to bring over verifying everything.
    """

    forecast: bool = True
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.min_gain = number("min_gain", self.min_gain, ConfigurationError, low=0.0, remedy="0 is the default")

    def decide(self, published: PublishedSurvival, load: StepLoad) -> Decision:
        """Choose the budget of one step.

        Args:
            published: survivals of the D requests with a draft, from an earlier step.
            load: the sizes of the step.

        Raises:
            TypeError: anything but `PublishedSurvival`.
        """
        if not isinstance(published, PublishedSurvival):
            raise TypeError(
                f"StalePlanner plans with PublishedSurvival, got {type(published).__name__}: survivals of the current "
                "step must not choose the budget by a global search (publish them and read them in a later step, or use "
                "CausalPlanner or StoppingPlanner)"
            )
        limits = self.limits_of(load)
        full = int(limits.sum())
        settled = self.settled(load, full, published.lag)
        if settled is not None:
            return settled
        costs = self._costs(load, full + 1)
        if len(limits) == load.requests == 1:
            tokens, best, gain = self._search_one(published, full, costs)
        else:
            tokens, best, gain = self._search(published, limits, load.requests, costs)
        reason = Reason.PLANNED
        if best == full:
            reason = Reason.COLD if published.cold.all() else Reason.FULL
        elif gain < self.min_gain:
            best, reason = full, Reason.SMALL_GAIN
        return self._decision(
            load, best, reason, full, tokens=float(tokens[best]), costs=costs, gain=gain, lag=published.lag
        )

    def _search(
        self, published: PublishedSurvival, limits: npt.NDArray[np.int64], requests: int, costs: Floats
    ) -> tuple[Sequence[float] | Floats, int, float]:
        """Expected tokens at K = 0 ... limits.sum(), the best K, and its relative gain over verifying everything."""
        survival = published.values
        if self.forecast:
            survival = survival + len(limits) ** -0.5 * (published.forecast - survival)
        floor = 0
        if self.min_width:
            ordered, floor = ranked(survival, limits, self.min_width)[0], mandatory(limits, self.min_width)
        else:
            whole = len(costs) > survival.size
            inside = survival.ravel() if whole else survival[np.arange(self.gamma) < limits[:, None]]
            ordered = on_grid(np.sort(inside)[::-1])
        expected = requests + sums(ordered)
        rate = expected / costs
        best = floor + int(rate[floor:].argmax())  # the first maximum: ties keep the smaller K
        return expected, best, float(rate[best] / rate[-1] - 1.0)

    def _search_one(
        self, published: PublishedSurvival, full: int, costs: Floats
    ) -> tuple[Sequence[float] | Floats, int, float]:
        """The same for one request, which needs no ranking: k* = argmax_k (1 + S_1 + ... + S_k) / (D + V(1 + k))."""
        survival = (published.forecast if self.forecast else published.values)[0].tolist()
        expected = [1.0]
        for value in survival[:full]:
            expected.append(expected[-1] + round(value * GRID) / GRID)
        rate = [tokens / ms for tokens, ms in zip(expected, costs.tolist(), strict=True)]
        best = max(range(min(self.min_width, full), full + 1), key=rate.__getitem__)  # the first maximum
        return expected, best, rate[best] / rate[-1] - 1.0


@dataclass
class CausalPlanner(Planner):
    """Algorithm 1: verify in descending current survival and stop at the first token that does not raise E / cost.

    Where the rate is unimodal in K this is the global maximum. On a staircase it stops before the first step, whatever
    comes after it. With `smooth` it therefore uses the lower convex hull of the cost, on which the rate is always
    unimodal, and then takes the rest of the shelf it stopped on, which is free. That needs no model and is exact, but
    the first token of a shelf has to pay for it; `StoppingPlanner` also expects something from the next ones.

    Attributes:
        smooth: use the convex hull of the cost; False is Algorithm 1 as published.
    """

    smooth: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hull: tuple[Floats, Floats] = (np.zeros(0), np.zeros(0))  # costs of the last step, and their hull

    def decide(
        self, current: Tensor | npt.NDArray[np.floating], load: StepLoad, limits: npt.NDArray[np.int64] | None = None
    ) -> Decision:
        """Choose the budget from the survivals of this step's blocks ([D, gamma], on the host).

        `limits` [D], at most `max_width`, replace those of the load.
        """
        limits = self.limits_of(load) if limits is None else limits
        full = int(limits.sum())
        settled = self.settled(load, full)
        if settled is not None:
            return settled
        ordered, owner = ranked(np.asarray(current), limits, self.min_width)
        floor = mandatory(limits, self.min_width)
        costs = self._costs(load, full + 1)
        expected = load.requests + sums(ordered)
        rate = expected / (self._smoothed(costs) if self.smooth else costs)
        worse = np.flatnonzero(rate[floor + 1 :] <= rate[floor:-1])
        budget = floor + int(worse[0]) if worse.size else full
        if self.smooth:
            budget = int(np.searchsorted(costs, costs[budget], side="right")) - 1
        widths = widths_of(owner, budget, len(limits))
        reason = Reason.PLANNED if budget < full else Reason.FULL
        return self._decision(load, budget, reason, full, tokens=float(expected[budget]), costs=costs, widths=widths)

    def _smoothed(self, costs: Floats) -> Floats:
        if not np.array_equal(self._hull[0], costs):
            self._hull = (costs, _lower_convex_hull(costs))
        return self._hull[1]


def _lower_convex_hull(costs: Floats) -> Floats:
    """The largest convex curve that is nowhere above `costs`, at 0, 1, 2, ... ."""
    corners = np.concatenate(
        [np.flatnonzero(np.diff(costs)), [len(costs) - 1]]
    )  # ends of shelves, where the hull rests
    hull: list[int] = [0]
    for i in corners.tolist():
        while len(hull) > 1 and (costs[hull[-1]] - costs[hull[-2]]) * (i - hull[-1]) >= (costs[i] - costs[hull[-1]]) * (
            hull[-1] - hull[-2]
        ):
            hull.pop()
        if i:
            hull.append(i)
    return np.interp(np.arange(len(costs)), hull, costs[hull])
