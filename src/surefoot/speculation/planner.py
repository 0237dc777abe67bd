"""How much of the drafted blocks is worth verifying this step.

Three rules choose the budget K, none of which may let the verification of x_k depend on x_k or on anything drawn after
it (design.md section 3):

* `StalePlanner`: a global search on survivals published in an earlier step (DSpark paper, section 3.2 with the
  asynchronous deployment of section 5.2). Its signature takes `PublishedSurvival`, which no data of the current step
  can become.
* `CausalPlanner`: Algorithm 1 of the paper on current survivals: admit in descending survival, stop at the first
  non-improvement. It never looks at a survival it has not admitted the predecessor of.
* `StoppingPlanner`: optimal stopping on current survivals. What lies behind the positions already admitted is valued by
  a model learned from past steps, so a cost cliff that only several further tokens can pay for is still crossed.

The last two look at current confidences from the host; on a device with asynchronous copies that wait is the price of
them. Every survival is rounded to a multiple of 2^-24 before it is summed. Sums are then exact in float64 whatever the
order of the requests, and since division rounds correctly, two budgets tie exactly when their float64 quotients are
equal; the smaller wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.errors import ConfigurationError
from surefoot.speculation.continuation import ContinuationModel
from surefoot.speculation.cost import CostTable
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.survival import PublishedSurvival

Floats = npt.NDArray[np.float64]
GRID = float(1 << 24)
FEW = 8  # requests
CONTEXT_STEP = 16  # tokens; costs are looked up this coarsely
KEPT_COSTS = 64


class Reason(str, Enum):
    """Why the planner chose this budget."""

    PLANNED = "planned"  # trimmed: fewer tokens promise more per ms
    FULL = "full_window_pays"  # searched, and nothing was worth trimming
    NO_TABLE = "no_table"  # verifies everything
    FLAT_TABLE = "flat_table"  # more tokens cost nothing on this table: verifies everything
    COLD = "cold_confidences"  # no request has published yet: verifies everything
    PREFILL = "prefill_in_batch"  # a prompt chunk dominates the step: trimming is suspended
    SMALL_GAIN = "gain_too_small"  # the best trim promises less than the minimum gain: verifies everything
    FORCED = "forced"  # widths were given
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
    widths: tuple[int, ...] | None = None  # [D] forced, or ranked already by this step's survivals (None: `allocate`)

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
    limits: (
        Sequence[int] | npt.NDArray[np.int64]
    )  # [D] largest width of every drafted request; 0 where speculation is off
    prefill_tokens: int = 0  # rows of prompt chunks in the same pass
    context: float = 0.0  # mean cached length, tokens
    step: int = 0  # rotates a forced pattern
    model_rows: int | None = None  # requests the drafter's model is expected to run for (None: every one in limits)
    depth: int | None = None  # tokens it drafts of each block (None: gamma)

    @property
    def drafted(self) -> int:
        """Requests whose draft costs D."""
        return len(self.limits) if self.model_rows is None else min(self.model_rows, len(self.limits))


class ForcedWidths:
    """One width for everybody, or a pattern that rotates over requests and steps: "3", "0,3,1,7".

    It exercises every mix of widths without a table. The widths depend on nothing drafted, so they are always legal.
    """

    def __init__(self, pattern: Sequence[int]) -> None:
        if not pattern or any(width < 0 for width in pattern):
            raise ConfigurationError(f"forced widths must be one or more integers >= 0, got {list(pattern)}")
        self.pattern = tuple(int(width) for width in pattern)

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
        """[D] widths of this step, cut to the limits."""
        index = (np.arange(len(limits)) + step) % len(self.pattern)
        return np.minimum(np.array(self.pattern)[index], limits)


@dataclass
class Planner:
    """What the three rules share: when there is nothing to plan, and how wide a window may be.

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
        """[D] the request's limits within max_width: pass these to `allocate`."""
        widest = self.gamma if self.max_width is None else self.max_width
        return np.minimum(np.asarray(load.limits, dtype=np.int64), widest)

    def settled(self, load: StepLoad, full: int | None = None, lag: float = 0.0) -> Decision | None:
        """The decision of a step in which there is nothing to search, or None.

        Args:
            full: sum of the limits, if it is known already.
            lag: of the survivals that a search would have used.
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
            ms = float(self.table.step_costs(load.requests, first, 1, load.context, load.drafted, load.depth)[0])
        return Decision(budget, reason, full, tokens, ms, gain, lag, widths)

    def _costs(self, load: StepLoad, count: int) -> Floats:
        """Step cost in ms at K = 0 ... count - 1; kept, for the next step is much like this one. Not to be written to."""
        assert self.table is not None
        first, context = load.requests + load.prefill_tokens, round(load.context / CONTEXT_STEP) * CONTEXT_STEP
        key = (load.requests, first, count, context, load.drafted, load.depth)
        if self._kept_version != self.costs.version or len(self._kept) > KEPT_COSTS:
            self._kept_version, self._kept = self.costs.version, {}
        if key not in self._kept:
            self._kept[key] = self.table.step_costs(*key)
        return self._kept[key]


def _ranked(
    survival: npt.NDArray[np.floating], limits: npt.NDArray[np.int64], min_width: int
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """[limits.sum()] survivals in the order `allocate` gives slots out, and the request of each.

    Mandatory positions (up to min_width) come first; positions behind a limit are left out.
    """
    requests, gamma = survival.shape
    full = int(limits.sum())
    values = key = survival.T.ravel()
    if full < len(key) or min_width:
        position = np.arange(gamma)[:, None]
        inside = np.where(position < limits, survival.T, -1.0)
        key = np.where(position < np.minimum(limits, min_width), 2.0, inside).ravel()
    order = np.argsort(-key, kind="stable")[:full]
    return _on_grid(values[order]), order % requests


def _floor(limits: npt.NDArray[np.int64], min_width: int) -> int:
    """Mandatory positions, which every budget covers."""
    return int(np.minimum(limits, min_width).sum()) if min_width else 0


def _widths(owner: npt.NDArray[np.int64], budget: int, requests: int) -> tuple[int, ...]:
    """[D] widths that the first `budget` of ranked positions make."""
    return tuple(np.bincount(owner[:budget], minlength=requests).tolist())


def _sums(gains: Floats) -> Floats:
    """Sums of the first 0, 1, ... gains."""
    sums = np.empty(len(gains) + 1)
    sums[0] = 0.0
    np.cumsum(gains, out=sums[1:])
    return sums


def _on_grid(survival: npt.NDArray[np.floating]) -> Floats:
    return np.rint(np.asarray(survival, dtype=np.float64) * GRID) / GRID


@dataclass
class StalePlanner(Planner):
    """K* = argmax over K of E(K) / (D(R) + V(R + K) + overheads), E(K) = R + the K largest published survivals.

    One block is a noisy witness of the next. Taken at face value its survivals trim after an unlucky block and widen
    after a lucky one, and one request can end up below a fixed width; their regression to the mean
    (`PublishedSurvival.forecast`) is the right expectation then. With many requests the sum of the K largest is what
    counts, which lives on the spread between them that regression takes away. `forecast` therefore weighs the two by
    1/sqrt(R), a choice measured with `simulate`: from 1 to 512 requests it stays at or above the best fixed width, where
    the published values alone fall up to 9 % below it at one request. Without `forecast`, the paper's formula.

    Attributes:
        forecast: plan with the regressed survivals as described.
        min_gain: least relative gain in tokens per ms that a trim must promise over verifying everything.
    """

    forecast: bool = True
    min_gain: float = 0.0

    def decide(self, published: PublishedSurvival, load: StepLoad) -> Decision:
        """Choose the budget of one step.

        Args:
            published: survivals of the D drafted requests from an earlier step; a tensor of this step cannot stand
            here. load: the step.

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
            ordered, floor = _ranked(survival, limits, self.min_width)[0], _floor(limits, self.min_width)
        else:
            whole = len(costs) > survival.size
            inside = survival.ravel() if whole else survival[np.arange(self.gamma) < limits[:, None]]
            ordered = _on_grid(np.sort(inside)[::-1])
        expected = requests + _sums(ordered)
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
    """Algorithm 1: admit in descending current survival and stop at the first token that does not raise E / cost.

    Where the rate is unimodal in K this is the global maximum. On a staircase it would stop at the foot of the first
    step, however much stands above it. With `smooth` it therefore climbs the lower convex hull of the cost, on which
    the rate is always unimodal, and then takes the rest of the shelf it stopped on, which is free. That needs no model
    and stays legal, but pays for a shelf by its first token; `StoppingPlanner` knows better.

    Attributes:
        smooth: climb the convex hull of the cost; False is Algorithm 1 to the letter.
    """

    smooth: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hull: tuple[Floats, Floats] = (np.zeros(0), np.zeros(0))  # costs of the last step, and their hull

    def decide(
        self, current: Tensor | npt.NDArray[np.floating], load: StepLoad, limits: npt.NDArray[np.int64] | None = None
    ) -> Decision:
        """Choose the budget from the survivals of this step's blocks ([D, gamma], on the host).

        `limits` [D], within `max_width`, take the place of the load's.
        """
        limits = self.limits_of(load) if limits is None else limits
        full = int(limits.sum())
        settled = self.settled(load, full)
        if settled is not None:
            return settled
        ordered, owner = _ranked(np.asarray(current), limits, self.min_width)
        floor = _floor(limits, self.min_width)
        costs = self._costs(load, full + 1)
        expected = load.requests + _sums(ordered)
        rate = expected / (self._smoothed(costs) if self.smooth else costs)
        worse = np.flatnonzero(rate[floor + 1 :] <= rate[floor:-1])
        budget = floor + int(worse[0]) if worse.size else full
        if self.smooth:
            budget = int(np.searchsorted(costs, costs[budget], side="right")) - 1
        widths = _widths(owner, budget, len(limits))
        reason = Reason.PLANNED if budget < full else Reason.FULL
        return self._decision(load, budget, reason, full, tokens=float(expected[budget]), costs=costs, widths=widths)

    def _smoothed(self, costs: Floats) -> Floats:
        if not np.array_equal(self._hull[0], costs):
            self._hull = (costs, _lower_convex_hull(costs))
        return self._hull[1]


def _lower_convex_hull(costs: Floats) -> Floats:
    """The largest convex curve below `costs` at 0, 1, 2, ... ."""
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


class Admission(NamedTuple):
    """What the stopping rule admits."""

    budget: int  # K
    widths: tuple[int, ...]  # [D]
    expected_tokens: float


@dataclass(frozen=True)
class StoppingProblem:
    """One step as the stopping rule sees it; every array is on the host."""

    survival: npt.NDArray[np.float32]  # [D, gamma] of this step's blocks
    limits: npt.NDArray[np.int64]  # [D] largest widths
    costs: Floats  # [limits.sum() + 1] ms of the step at K = 0, 1, ...
    requests: int  # R, tokens that come without a draft
    min_width: int
    price: float | None  # tokens per ms of past steps; None: not known yet
    model: ContinuationModel


def admit(problem: StoppingProblem) -> Admission:
    """The rule of `StoppingPlanner`: admit heads until no number of further admissions is expected to pay."""
    survival, limits, costs, price = problem.survival, problem.limits, problem.costs, problem.price
    ordered, owner = _ranked(survival, limits, problem.min_width)
    full, few = len(ordered), len(limits) <= FEW
    expected = problem.requests + _sums(ordered)
    admitted = _floor(limits, problem.min_width)
    rises = np.flatnonzero(costs[1:] > costs[:-1])  # the last K of every shelf: what is left of a shelf is free
    start = np.arange(len(limits)) * (survival.shape[1] + 1)
    ahead_of: Floats | None = None  # once somebody wants to know
    while admitted < full:
        shelf = int(rises.searchsorted(admitted))
        end = int(rises[shelf]) if shelf < len(rises) else full
        if end > admitted:
            admitted = end  # whatever stands on it: to look before would be to look ahead
            continue
        stop, now = expected[admitted], costs[admitted]
        if few:  # a head that pays for itself needs no plan
            head, then = expected[admitted + 1], costs[admitted + 1]
            if head * now > stop * then if price is None else head - stop > price * (then - now):
                admitted += 1
                continue
        if ahead_of is None:
            ahead_of = _gains(problem)
        widths = np.bincount(owner[:admitted], minlength=len(limits))
        gains = ahead_of[start + widths].ravel()
        gains.sort()
        ahead, go = stop + gains[: admitted - full - 1 : -1].cumsum(), costs[admitted + 1 :]
        worth = ahead / go - stop / now if price is None else (ahead - stop) - price * (go - now)
        best = int(worth.argmax())
        if worth[best] <= 0:
            break
        # A few requests: look again at once, every head can change the plan. Many: half-way is soon enough, since what
        # their heads reveal is on average what was expected.
        admitted += 1 if few else 1 + best // 2
    return Admission(admitted, _widths(owner, admitted, len(limits)), float(expected[admitted]))


def _gains(problem: StoppingProblem) -> Floats:
    """Expected gains of a request's positions, for every width it may have been admitted: [D * (gamma + 1), gamma].

    The head is taken as it is, what lies behind it by the model; -1 in front of the head and behind the limit.
    """
    requests, gamma = problem.survival.shape
    heads = np.arange(problem.survival.size) % gamma
    expected = problem.model.expect(heads, problem.survival.ravel()).reshape(requests, gamma, gamma)
    ahead = np.where(np.tri(gamma, k=-1), -1.0, 1.0)  # [head, position]: -1 in front of the head
    gains = np.full((requests, gamma + 1, gamma), -1.0)
    np.minimum(expected, ahead, out=gains[:, :-1])
    if problem.limits.min() < gamma:
        inside = np.arange(gamma) < problem.limits[:, None]
        np.minimum(gains, np.where(inside, 1.0, -1.0)[:, None], out=gains)
    return gains.reshape(-1, gamma)


@dataclass
class StoppingPlanner(Planner):
    """Optimal stopping on current survivals over a jagged cost curve, without looking ahead.

    Heads (the next unadmitted position of every request) are admitted in descending survival. What is known then is
    the survival of every admitted position and of every head; a head's survival depends on the tokens before it alone.
    Whatever lies further is valued by `model`, learned from past steps. Stop when no number n >= 1 of further
    admissions is expected to pay; otherwise go on, and look again with what the admissions have revealed.

    "To pay" is measured at the long-run price of time: tokens minus `price` times ms, the price being the tokens per
    ms of past steps at this batch size. A sum of steps is what a user waits for, and it is maximised by paying one
    price in all of them (Dinkelbach's transform of the ratio of sums), not by maximising each step's own ratio: that
    would trim unlucky blocks too little and lucky ones too much. Until a price is known the ratio of the step itself
    is used (beside a prompt chunk, the rate of these requests without drafts).

    Prompt chunks have no part in the price. Every answer brings its prompt, whatever is verified: their time is the same
    for all plans, and only decoding can be made dearer or cheaper. In a step that carries a chunk a row is worth what it
    is worth in any other; against the ratio of that step, most of which is spent already, it would look cheap.

    Attributes:
        rule: `admit`, or something that admits the same faster.
    """

    rule: Callable[[StoppingProblem], Admission] = admit

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = ContinuationModel(self.gamma)
        self.prices, self._time_scale = PriceOfTime(), self.costs.time_scale

    def decide(
        self, current: Tensor | npt.NDArray[np.floating], load: StepLoad, limits: npt.NDArray[np.int64] | None = None
    ) -> Decision:
        """Choose the budget from the survivals of this step's blocks ([D, gamma], on the host), then learn from them.

        `limits` [D], within `max_width`, take the place of the load's.
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
    """Tokens per ms of past steps, per doubling of the batch size, with forgetting."""

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
