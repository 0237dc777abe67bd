"""Who gets a draft this step, and how many of the drafted tokens are verified: the planner's place in the engine.

Two ways to choose the budget, both exact (design.md section 3). Where the host must not wait for the device, K comes from
survivals published in an earlier step (`stale`). Where reading is free (a CPU), the optimal-stopping rule looks at this step's
confidences, which is why it is asked in the middle of the step, between draft and verification. Whether to draft at all is
always decided from published survivals: nothing of this step's block exists yet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.engine.device import HostOutputs
from surefoot.engine.messages import StepInputs
from surefoot.engine.request import Request
from surefoot.engine.scheduler import Scheduled
from surefoot.errors import ConfigurationError
from surefoot.kernels import native, planning
from surefoot.speculation.breaker import Breaker, BreakerState
from surefoot.speculation.cost import CostTable
from surefoot.speculation.depth import DraftDepth
from surefoot.speculation.estimator import ConfidenceSource, Evidence
from surefoot.speculation.exploration import Exploration
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import (
    CausalPlanner,
    Decision,
    ForcedWidths,
    StalePlanner,
    StepLoad,
)
from surefoot.speculation.sources import model_scores
from surefoot.speculation.statistics import BlockRecord, Statistics, StepRecord
from surefoot.speculation.stopping import FEW, Selection, StoppingPlanner, StoppingProblem, stopping_rule
from surefoot.speculation.survival import ConfidenceBoard, Seat, prefix_survival

log = logging.getLogger(__name__)

PlannerName = Literal["stale", "causal", "stopping"]
PROBE_EVERY = 16
"""Of this many steps in which drafting promises a loss, one is drafted all the same, to see whether the workload changed."""
SUSPEND_MARGIN = 0.02
"""Drafting must promise at least this relative loss before it is left out: a drafter that costs next to nothing (prompt
lookup) always looks, since its published confidence says little about the next step's match."""
SETTLE_EVERY = 32
"""Steps whose statistics are counted together."""
LEARN_EVERY = 8
"""Steps that the confidence source is told about together, where the host's time counts."""


@dataclass
class Plan:
    """The emitting requests of a step, split by whether they get a draft, and what they may verify."""

    drafted: list[Scheduled]
    undrafted: list[Scheduled]
    limits: list[int]  # [D]
    load: StepLoad
    decision: Decision | None = None  # None until the step has asked (`decide`)
    decide: Callable[[Tensor, Tensor], Decision] | None = None  # survival [D, gamma], limits [D] -> K, widths
    explored: int = 0  # blocks whose windows stay whole, because the confidence source is warming up
    depth: int | None = None  # tokens drafted of each block (None: gamma)
    suspended: bool = False  # nobody is drafted because drafting does not pay
    paused: int = 0  # requests whose breaker is open
    seats: list[Seat] = field(default_factory=list)  # [D] where their survivals are published
    predicted_ms: float | None = None  # for the rows that ran, once the step is observed

    @property
    def budget(self) -> int:
        """K, or the most it can become while the step has not asked yet."""
        return sum(self.limits) if self.decision is None else self.decision.budget

    @property
    def forced(self) -> list[int] | None:
        if self.decision is None or self.decision.widths is None:
            return None
        return list(self.decision.widths)


class Observed(NamedTuple):
    """A step that the statistics have not counted yet."""

    plan: Plan
    outputs: HostOutputs
    proposed: list[int]  # [D] tokens the drafter really proposed
    kept: list[int]  # [E]
    measured_ms: float
    breakers: Counter[BreakerState]

    @property
    def sources(self) -> list[str | None]:
        return self.outputs.sources or [None] * len(self.proposed)

    def record(self) -> StepRecord:
        plan, outputs, kept, count = self.plan, self.outputs, self.kept, len(self.proposed)
        assert plan.decision is not None  # the step has asked
        return StepRecord(
            blocks=[
                *map(BlockRecord, self.proposed, outputs.widths, outputs.accepted[:count], kept[:count], self.sources),
                *(BlockRecord(0, 0, 0, tokens) for tokens in kept[count:]),
            ],
            reason=plan.decision.reason,
            stale_lag=plan.decision.stale_lag,
            predicted_ms=plan.predicted_ms,
            measured_ms=self.measured_ms,
            graph_hit=outputs.replayed,
            prefill=plan.load.prefill_tokens > 0,
            breakers=self.breakers,
        )


class Outcome(NamedTuple):
    """What became of the blocks of a step, for the confidence source."""

    evidence: Evidence
    accepted: list[int]  # [D]
    widths: list[int]  # [D]


def width_limit(request: Request) -> int:
    """Most drafts worth verifying: the request's own limit, and never beyond its last token."""
    assert request.params.max_tokens is not None  # the engine has filled it in
    left = request.params.max_tokens - request.num_output - (request.in_flight > 0)
    return min(request.gamma, left - 1) if left > 0 else 0


def fast_stopping_rule(problem: StoppingProblem) -> Selection:
    """`stopping_rule` in one native call, where there are native kernels: the same decision in a tenth of the time."""
    if not native.available():
        return stopping_rule(problem)
    widths, budget, tokens = planning.stopping_rule(
        problem.survival,
        problem.limits,
        problem.costs,
        problem.model.edges,
        problem.model.ratio,
        requests=problem.requests,
        min_width=problem.min_width,
        price=problem.price,
        few=FEW,
    )
    return Selection(budget, tuple(widths), tokens)


class WidthPolicy:
    """Plans every step and learns from it."""

    def __init__(
        self,
        gamma: int,
        *,
        num_slots: int,
        costs: LiveCost | None = None,
        forced: ForcedWidths | None = None,
        confidence: ConfidenceSource | None = None,
        planner: PlannerName = "stopping",
        breaker: Callable[[], Breaker] | None = None,
        min_gain: float = 0.0,
        min_width: int = 0,
        max_width: int | None = None,
        trim_beside_prefill: bool = False,
        suspends: bool = True,
        model_gamma: int | None = None,
    ) -> None:
        """
        Args:
            suspends: leave drafting out where it promises a loss; False for a drafter that knows when to rest its model.
            model_gamma: tokens of a whole block of the drafter's model (None: gamma).
        """
        self.costs = LiveCost() if costs is None else costs
        settings: dict[str, Any] = {
            "gamma": gamma,
            "costs": self.costs,
            "forced": forced,
            "min_width": min_width,
            "max_width": max_width,
            "trim_beside_prefill": trim_beside_prefill,
        }
        self.stale = StalePlanner(**settings, min_gain=min_gain)
        self.current: CausalPlanner | StoppingPlanner | None = None
        if planner == "causal":
            self.current = CausalPlanner(**settings)
        elif planner == "stopping":
            self.current = StoppingPlanner(**settings, rule=fast_stopping_rule)
        elif planner != "stale":
            raise ConfigurationError(f"planner is {planner!r}; allowed: stale, causal, stopping")
        self.gamma, self.planner_name = gamma, planner
        self.confidence = confidence
        self.board = ConfidenceBoard(num_slots, gamma)
        # Published survivals choose the budget, or whether to draft at all; else nobody asks for them.
        self._publishes = self.current is None or suspends
        self._statistics = Statistics()
        self._observed: list[Observed] = []  # what they do not count yet
        self._outcomes: list[Outcome] = []  # what the confidence source has not been told yet
        # A device that runs beside the host hides the host's time, and its drafter asks what the last step has shown.
        self._learn_every = 1 if self.current is None else LEARN_EVERY
        self.min_width, self.max_width = min_width, gamma if max_width is None else max_width
        self._new_breaker = breaker
        self._step = 0
        self._suspended_steps = 0
        self._exploration = Exploration()
        self._depth = DraftDepth(gamma if model_gamma is None else model_gamma)
        self.fixed_depth: int | None = None  # replaces what `_depth` would choose; for measuring
        self.suspends = suspends
        self._model_share = 1.0  # of the last step's drafts, how many cost a pass of the drafter's model

    # -- requests ----------------------------------------------------------------------------------------------------------

    def new_breaker(self) -> Breaker | None:
        return self._new_breaker() if self._new_breaker else None

    def leave(self, request: Request) -> None:
        """The request leaves its slot: whoever comes next finds neutral confidences there."""
        request.seat = None

    # -- planning ----------------------------------------------------------------------------------------------------------

    def plan(self, scheduled: list[Scheduled]) -> Plan:
        """Decide one step, as far as it can be decided before its blocks are drafted."""
        self._step += 1
        emitting = [part for part in scheduled if part.emits]
        drafted: list[Scheduled] = []
        undrafted: list[Scheduled] = []
        limits: list[int] = []
        paused, widest = 0, self.max_width
        for part in emitting:
            request = part.request
            limit = min(width_limit(request), widest) if part.may_draft else 0
            if limit and request.breaker is not None and not request.breaker.allows:
                paused += 1
                limit = 0
            if limit:
                drafted.append(part)
                limits.append(limit)
            else:
                undrafted.append(part)
        load = StepLoad(
            requests=len(emitting),
            limits=limits,
            prefill_tokens=sum(part.context_rows for part in scheduled),
            context=sum(part.request.num_cached for part in emitting) / max(len(emitting), 1),
            step=self._step,
            model_requests=None if self._model_share == 1.0 else round(self._model_share * len(limits)),
        )
        if drafted and (depth := self._depth_of(load)) is not None:
            load = load._replace(depth=depth)
        plan = Plan(drafted, undrafted, limits, load, self.stale.settled(load), depth=load.depth, paused=paused)
        if self._publishes and drafted:
            plan.seats = [self._seat(part.request) for part in drafted]
        if plan.decision is not None:
            return plan
        if self.confidence is not None and self.confidence.warming_up:
            plan.explored = self._exploration.affordable
        if self._publishes:
            decision = self.stale.decide(self.board.read(self._step, plan.seats), load)
            if not plan.explored and self._draft_loses(decision, load):
                load = load._replace(limits=[])
                return Plan(
                    [], [*drafted, *undrafted], [], load, self.stale.settled(load), suspended=True, paused=paused
                )
            plan.decision = decision
        if self.current is not None:
            plan.decision, plan.decide = None, partial(self._decide, self.current, plan)
        return plan

    def _depth_of(self, load: StepLoad) -> int | None:
        """How many tokens to draft of each block; None for whole blocks."""
        if self.fixed_depth is not None:
            return self.fixed_depth
        forced = self.stale.forced
        # Who forces a width of 0 wants drafts that nobody verifies.
        widest = self.max_width if forced is None else min(max(forced.pattern), self.max_width) or self.gamma
        depth = self._depth.choose(self.costs.table, load) or self._depth.gamma
        depth = max(min(depth, widest), self.min_width, 1)
        return None if depth >= self._depth.gamma else depth

    def _seat(self, request: Request) -> Seat:
        if request.seat is None:
            request.seat = self.board.open(request.slot)
        return request.seat

    def _decide(
        self, planner: CausalPlanner | StoppingPlanner, plan: Plan, survival: Tensor, limits: Tensor
    ) -> Decision:
        """Asked by the step between draft and verification, where the host may read: K from this step's survivals."""
        plan.decision = planner.decide(survival.numpy(), plan.load, limits.numpy())
        return plan.decision

    def _draft_loses(self, decision: Decision, load: StepLoad) -> bool:
        """Whether not drafting at all promises more tokens per ms than the best budget, by the published survivals.

        Now and then a draft is made all the same, to see whether the workload has changed.
        """
        table, rate = self.costs.table, decision.expected_tokens_per_ms
        if not self.suspends or table is None or rate is None:
            return False
        if load.requests / self._plain_ms(table, load) <= rate * (1 + SUSPEND_MARGIN):
            self._suspended_steps = 0
            return False
        self._suspended_steps = (self._suspended_steps + 1) % PROBE_EVERY
        return self._suspended_steps != 0

    def _gain_ms(self, plan: Plan, accepted: list[int]) -> float:
        """How much longer plain steps would have taken for the tokens of this one; a prompt chunk takes what it takes."""
        table, load = self.costs.table, plan.load
        assert table is not None
        assert plan.predicted_ms is not None
        spared = sum(accepted) / load.requests * self._plain_ms(table, load._replace(prefill_tokens=0))
        return spared + self._plain_ms(table, load) - plan.predicted_ms

    def _plain_ms(self, table: CostTable, load: StepLoad) -> float:
        """What the step costs without drafts."""
        rows = load.requests + load.prefill_tokens
        return float(table.step_costs(load.requests, rows, 1, load.context, draft_requests=0)[0])

    @property
    def statistics(self) -> Statistics:
        """What has happened up to the last step observed."""
        self._settle()
        return self._statistics

    def _settle(self) -> None:
        """Count what has been put aside: many steps together cost little more than one."""
        observed, self._observed = self._observed, []
        self._statistics.record(*(step.record() for step in observed))
        judged = [step for step in observed if step.proposed and step.outputs.confidence is not None]
        if judged:
            self._depth.observe(np.concatenate([self._whole_blocks(step) for step in judged]))
            self._statistics.record_confidence(
                np.concatenate([self._survival(step.outputs.confidence, step.proposed) for step in judged]),
                np.concatenate([step.outputs.widths for step in judged]),
                np.concatenate([step.outputs.accepted[: len(step.proposed)] for step in judged]),
                [name for step in judged for name in step.sources],
            )

    # -- learning ----------------------------------------------------------------------------------------------------------

    def observe(self, plan: Plan, inputs: StepInputs, outputs: HostOutputs, kept: list[int], host_ms: float) -> None:
        """Take the result of a planned step.

        Args:
            kept: [E] tokens each emitting request delivered; 0 where it had left meanwhile.
            host_ms: host time of the step that the device could not hide.
        """
        count = inputs.num_drafted
        widths, accepted = outputs.widths, outputs.accepted
        proposed = [self.gamma] * count if outputs.proposed is None else outputs.proposed
        model_rows = count if outputs.model_rows is None else outputs.model_rows
        if count:
            self._model_share = model_rows / count
        if count and self.confidence is not None:
            if self._publishes:
                self.board.publish(plan.load.step, plan.seats, self._survival(outputs.confidence, proposed))
            self._outcomes.append(Outcome(outputs.evidence, accepted[:count], widths))
            if len(self._outcomes) >= self._learn_every:
                self._learn(self.confidence)
        measured = outputs.device_ms + host_ms
        assert plan.decision is not None  # the step has asked
        plan.predicted_ms = self._predicted_ms(plan, plan.decision, sum(widths), model_rows)
        if plan.predicted_ms is not None:
            self._exploration.observe(plan.predicted_ms, self._gain_ms(plan, accepted) if plan.explored else 0.0)
        breakers = self._observe_breakers(plan, widths, accepted) if self._new_breaker is not None else Counter()
        self._observed.append(Observed(plan, outputs, proposed, kept, measured, breakers))
        if len(self._observed) >= SETTLE_EVERY:
            self._settle()
        if plan.predicted_ms and not plan.load.prefill_tokens:
            change = self.costs.observe(plan.predicted_ms, measured, plan.load.requests + sum(widths))
            if change is not None:
                log.info("%s", change)
                self._statistics.rescales += 1

    @property
    def lacks_table(self) -> bool:
        """Whether widths would be planned, if only the cost were known."""
        return bool(self.gamma) and self.stale.forced is None and self.costs.table is None

    def _learn(self, confidence: ConfidenceSource) -> None:
        """Tell the confidence source what became of the last blocks."""
        evidence, accepted, widths = zip(*self._outcomes, strict=True)
        self._outcomes.clear()
        rows = [len(part) for part in widths]
        confidence.observe(Evidence.joined(evidence, rows), np.concatenate(accepted), np.concatenate(widths))

    def _survival(self, confidence: Tensor | None, proposed: list[int]) -> npt.NDArray[np.float32]:
        """[D, gamma] survivals of blocks as far as they go; without `confidence` nothing was proposed."""
        if confidence is None:
            return np.zeros((len(proposed), self.gamma), np.float32)
        return prefix_survival(confidence).numpy() * (np.array(proposed)[:, None] > np.arange(self.gamma))

    def _whole_blocks(self, step: Observed) -> npt.NDArray[np.float32]:
        """[N, model_gamma] survivals of the blocks that the drafter's model has drafted to the end."""
        gamma = self._depth.gamma
        if step.plan.depth is not None:
            return np.zeros((0, gamma), np.float32)
        outputs = step.outputs
        whole = np.array(step.proposed) >= gamma
        if (scores := model_scores(outputs.evidence)) is not None:
            whole &= ~np.isnan(scores[:, 0].numpy())  # where another source has drafted
        elif outputs.model_rows is not None:
            whole[:] = False
        return self._survival(outputs.confidence, step.proposed)[whole, :gamma]

    def _observe_breakers(self, plan: Plan, widths: list[int], accepted: list[int]) -> Counter[BreakerState]:
        """Tell every request's breaker what became of its block; how many are in which state."""
        states: Counter[BreakerState] = Counter()
        for index, part in enumerate([*plan.drafted, *plan.undrafted]):
            breaker = part.request.breaker
            if breaker is not None:
                verified = widths[index] if index < len(widths) else 0
                if part.may_draft:
                    breaker.observe(verified, accepted[index] if verified else 0)
                states[breaker.state] += 1
        return states

    def _predicted_ms(self, plan: Plan, decision: Decision, verified: int, model_rows: int) -> float | None:
        """The prediction, for the rows that were there: a drafter may have proposed less than was planned for."""
        table, load = self.costs.table, plan.load
        if table is None or decision.predicted_ms is None:
            return None
        if verified == decision.budget and model_rows == load.draft_requests:
            return decision.predicted_ms
        rows = load.requests + load.prefill_tokens + verified
        return float(table.step_costs(load.requests, rows, 1, load.context, model_rows, load.depth)[0])

    def describe(self) -> str:
        """What decides the widths, in one line."""
        if not self.gamma:
            return "target only: no drafter"
        if self.stale.forced is not None:
            return f"forced widths {','.join(map(str, self.stale.forced.pattern))}"
        if self.costs.table is None:
            return "verifies everything: no cost table for this engine (make one with 'surefoot profile')"
        if self.costs.table.is_flat:
            return "verifies everything: the cost table is flat"
        return f"{self.planner_name} planner on the measured cost table"
