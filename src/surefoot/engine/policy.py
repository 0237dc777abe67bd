"""Who gets a draft in a step, and how many of the drafted tokens are verified.

Two ways to choose the budget, both exact (`docs/planning.md`). Where the host must not wait for the device, K comes from
survivals published in an earlier step (`stale`). Where reading is free (a CPU), the stopping rule reads this step's
confidences; the step therefore asks for K between draft and verification. Whether to draft at all is always decided from
published survivals, before any token of the step is drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from surefoot.engine.learning import TEACH_EVERY, StepLearner, plain_ms
from surefoot.engine.plan import Plan
from surefoot.engine.request import Request
from surefoot.engine.scheduler import Scheduled
from surefoot.errors import ConfigurationError
from surefoot.kernels import native, planning
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.estimator import ConfidenceSource
from surefoot.speculation.guard import Arm, Guard
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import CausalPlanner, Decision, ForcedWidths, Reason, StalePlanner, StepLoad
from surefoot.speculation.stopping import FEW, Selection, StoppingPlanner, StoppingProblem, stopping_rule
from surefoot.speculation.survival import Seat

PlannerName = Literal["stale", "causal", "stopping"]
PROBE_EVERY = 16
"""Of this many steps in which drafting is expected to lose, one drafts all the same, to see whether the text changed."""
SUSPEND_MARGIN = 0.02
"""Least expected relative loss for which drafting is left out: a drafter that costs almost nothing (prompt lookup) always
drafts, since its published confidence says little about the next step's match."""


def width_limit(request: Request) -> int:
    """Largest useful width: the request's own limit, and never beyond its last token."""
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
    """Plans the steps of one engine; `learner` takes their results."""

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
        guard: Guard | None = None,
    ) -> None:
        """
        Args:
            suspends: leave drafting out where it is expected to lose; False for a drafter that rests its model itself.
            model_gamma: tokens of a whole block of the drafter's model (None: gamma).
            guard: switches speculation off where measured steps show that it does not pay; not asked where widths are forced.
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
        self.guard = None if forced is not None else guard
        # Published survivals choose the budget, or whether to draft at all; otherwise nobody reads them.
        self._publishes = self.current is None or suspends
        self.learner = StepLearner(
            gamma,
            self.costs,
            num_slots=num_slots,
            confidence=confidence,
            model_gamma=model_gamma,
            publishes=self._publishes,
            guard=self.guard,
            # A device that runs beside the host hides the host's time, and its drafter needs the last step's outcome.
            teach_every=1 if self.current is None else TEACH_EVERY,
        )
        self.min_width, self.max_width = min_width, gamma if max_width is None else max_width
        self._new_breaker = breaker
        self._step = 0
        self._suspended_steps = 0
        self.fixed_depth: int | None = None  # replaces the chosen depth; for measuring
        self.suspends = suspends

    # -- requests ----------------------------------------------------------------------------------------------------------

    def new_breaker(self) -> Breaker | None:
        return self._new_breaker() if self._new_breaker else None

    def leave(self, request: Request) -> None:
        """The request leaves its slot; the next one there starts with neutral confidences."""
        request.seat = None

    # -- planning ----------------------------------------------------------------------------------------------------------

    def plan(self, scheduled: list[Scheduled]) -> Plan:
        """Decide one step, as far as it can be decided before its blocks are drafted."""
        self._step += 1
        emitting = [part for part in scheduled if part.emits]
        drafting: list[Scheduled] = []
        not_drafting: list[Scheduled] = []
        limits: list[int] = []
        paused, widest = 0, self.max_width
        for part in emitting:
            request = part.request
            limit = min(width_limit(request), widest) if part.may_draft else 0
            if limit and request.breaker is not None and not request.breaker.allows:
                paused += 1
                limit = 0
            if limit:
                drafting.append(part)
                limits.append(limit)
            else:
                not_drafting.append(part)
        share = self.learner.model_share
        load = StepLoad(
            requests=len(emitting),
            limits=limits,
            prefill_tokens=sum(part.context_rows for part in scheduled),
            context=sum(part.request.num_cached for part in emitting) / max(len(emitting), 1),
            step=self._step,
            model_requests=None if share == 1.0 else round(share * len(limits)),
        )
        arm = None
        if drafting and self.guard is not None:
            arm = self.guard.choose(load.requests, load.context, alone=not load.prefill_tokens)
            if arm is Arm.TARGET_ONLY:
                return self._target_only(drafting, not_drafting, load, paused, arm)
        if drafting and (depth := self._depth_of(load)) is not None:
            load = load._replace(depth=depth)
        plan = Plan(drafting, not_drafting, limits, load, self.stale.settled(load), depth=load.depth, paused=paused)
        plan.arm = arm
        if self._publishes and drafting:
            plan.seats = [self._seat(part.request) for part in drafting]
        if plan.decision is not None:
            return plan
        if self.confidence is not None and self.confidence.warming_up:
            plan.explored = self.learner.exploration.affordable
        if self._publishes:
            decision = self.stale.decide(self.learner.board.read(self._step, plan.seats), load)
            if not plan.explored and self._draft_loses(decision, load):
                return self._target_only(drafting, not_drafting, load, paused, arm)
            plan.decision = decision
        if self.current is not None:
            plan.decision, plan.decide = None, partial(self._decide, self.current, plan)
        return plan

    def _target_only(
        self, drafting: list[Scheduled], not_drafting: list[Scheduled], load: StepLoad, paused: int, arm: Arm | None
    ) -> Plan:
        """A step without drafts, though there could be some."""
        load = load._replace(limits=[])
        decision = self.stale.settled(load)
        if decision is not None and arm is Arm.TARGET_ONLY:
            decision = replace(
                decision, reason=Reason.GUARD_WINDOW if self.guard and self.guard.on else Reason.GUARD_OFF
            )
        return Plan([], [*drafting, *not_drafting], [], load, decision, suspended=True, paused=paused, arm=arm)

    def _depth_of(self, load: StepLoad) -> int | None:
        """How many tokens to draft of each block; None for whole blocks."""
        if self.fixed_depth is not None:
            return self.fixed_depth
        whole, forced = self.learner.depth.gamma, self.stale.forced
        # A forced width of 0 still drafts: such drafts are measured, though none is verified.
        widest = self.max_width if forced is None else min(max(forced.pattern), self.max_width) or self.gamma
        depth = self.learner.depth.choose(self.costs.table, load) or whole
        depth = max(min(depth, widest), self.min_width, 1)
        return None if depth >= whole else depth

    def _seat(self, request: Request) -> Seat:
        if request.seat is None:
            request.seat = self.learner.board.open(request.slot)
        return request.seat

    def _decide(
        self, planner: CausalPlanner | StoppingPlanner, plan: Plan, survival: Tensor, limits: Tensor
    ) -> Decision:
        """Called by the step between draft and verification, where the host may read: K from this step's survivals."""
        plan.decision = planner.decide(survival.numpy(), plan.load, limits.numpy())
        return plan.decision

    def _draft_loses(self, decision: Decision, load: StepLoad) -> bool:
        """Whether a step without drafts is expected to emit more tokens per ms than one with the best budget.

        Every `PROBE_EVERY`-th time the answer is no, to see whether the text has changed.
        """
        table, rate = self.costs.table, decision.expected_tokens_per_ms
        if not self.suspends or table is None or rate is None:
            return False
        if load.requests / plain_ms(table, load) <= rate * (1 + SUSPEND_MARGIN):
            self._suspended_steps = 0
            return False
        self._suspended_steps = (self._suspended_steps + 1) % PROBE_EVERY
        return self._suspended_steps != 0

    @property
    def lacks_table(self) -> bool:
        """Whether widths would be planned if there were a cost table."""
        return bool(self.gamma) and self.stale.forced is None and self.costs.table is None

    def describe(self) -> str:
        """What decides the widths, in one line."""
        if not self.gamma:
            return "target only: no drafter"
        if self.stale.forced is not None:
            return f"forced widths {','.join(map(str, self.stale.forced.pattern))}"
        if self.costs.table is None:
            return "verifies everything: no cost table for this engine"
        if self.costs.table.is_flat:
            return "verifies everything: the cost table is flat"
        return f"{self.planner_name} planner on the measured cost table"
