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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from surefoot.engine.device import HostOutputs
from surefoot.engine.request import Request
from surefoot.engine.scheduler import Scheduled
from surefoot.engine.step import StepInputs
from surefoot.errors import ConfigurationError
from surefoot.speculation.breaker import Breaker
from surefoot.speculation.cost import CostTable, DriftTracker
from surefoot.speculation.estimator import ConfidenceSource
from surefoot.speculation.planner import (
    CausalPlanner,
    Decision,
    ForcedWidths,
    Reason,
    StalePlanner,
    StepLoad,
    StoppingPlanner,
)
from surefoot.speculation.statistics import BlockRecord, Statistics, StepRecord
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
SEARCHED = (Reason.PLANNED, Reason.FULL, Reason.SMALL_GAIN, Reason.COLD)


@dataclass
class Plan:
    """The emitting requests of a step, split by whether they get a draft, and what they may verify."""

    drafted: list[Scheduled]
    undrafted: list[Scheduled]
    limits: list[int]  # [D]
    load: StepLoad
    decision: Decision | None = None  # None until the step has asked (`decide`)
    decide: Callable[[Tensor, Tensor], Decision] | None = None  # survival [D, gamma], limits [D] -> K, widths
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


def width_limit(request: Request) -> int:
    """Most drafts worth verifying: the request's own limit, and never beyond its last token."""
    assert request.params.max_tokens is not None  # the engine has filled it in
    left = request.params.max_tokens - request.num_output - min(request.in_flight, 1)
    return max(0, min(request.gamma, left - 1))


class WidthPolicy:
    """Plans every step and learns from it."""

    def __init__(
        self,
        gamma: int,
        *,
        num_slots: int,
        table: CostTable | None = None,
        forced: ForcedWidths | None = None,
        confidence: ConfidenceSource | None = None,
        planner: PlannerName = "stopping",
        breaker: Callable[[], Breaker] | None = None,
        min_gain: float = 0.0,
        min_width: int = 0,
        max_width: int | None = None,
        trim_beside_prefill: bool = False,
        suspends: bool = True,
    ) -> None:
        """
        Args:
            suspends: leave drafting out where it promises a loss; False for a drafter that knows when to rest its model.
        """
        settings: dict[str, Any] = {
            "gamma": gamma,
            "table": table,
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
            self.current = StoppingPlanner(**settings)
        elif planner != "stale":
            raise ConfigurationError(f"planner is {planner!r}; allowed: stale, causal, stopping")
        self.gamma, self.planner_name = gamma, planner
        self.confidence = confidence
        self.board = ConfidenceBoard(num_slots, gamma)
        self._nobody = self.board.read(0, [])
        self._statistics = Statistics()
        self._records: list[StepRecord] = []  # what they do not count yet
        self._confidences: list[tuple[Any, ...]] = []
        self.drift = DriftTracker(table) if table is not None else None
        self.min_width, self.max_width = min_width, gamma if max_width is None else max_width
        self._new_breaker = breaker
        self._step = 0
        self._suspended_steps = 0
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
        paused = 0
        for part in emitting:
            limit = min(width_limit(part.request), self.max_width) if part.may_draft else 0
            if limit and part.request.breaker is not None and not part.request.breaker.allows:
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
            warming_up=self.confidence is not None and self.confidence.warming_up,
            model_rows=None if self._model_share == 1.0 else round(self._model_share * len(limits)),
        )
        seats = [self._seat(part.request) for part in drafted]
        published = self.board.read(self._step, seats) if seats else self._nobody
        decision = self.stale.decide(published, load)
        if self._draft_loses(decision, load):
            load = replace(load, limits=[])
            decision = self.stale.decide(published, load)
            return Plan([], [*drafted, *undrafted], [], load, decision, suspended=True, paused=paused)
        plan = Plan(drafted, undrafted, limits, load, paused=paused, seats=seats)
        if self.current is None or load.warming_up or decision.reason not in SEARCHED:
            plan.decision = decision
        else:
            plan.decide = partial(self._decide, self.current, plan)
        return plan

    def _seat(self, request: Request) -> Seat:
        if request.seat is None:
            request.seat = self.board.open(request.slot)
        return request.seat

    def _decide(
        self, planner: CausalPlanner | StoppingPlanner, plan: Plan, survival: Tensor, limits: Tensor
    ) -> Decision:
        """Asked by the step between draft and verification, where the host may read: K from this step's survivals."""
        load = replace(plan.load, limits=limits.numpy())
        plan.decision = planner.decide(survival.numpy(), load)
        return plan.decision

    def _draft_loses(self, decision: Decision, load: StepLoad) -> bool:
        """Whether not drafting at all promises more tokens per ms than the best budget, by the published survivals.

        Now and then a draft is made all the same, to see whether the workload has changed.
        """
        table, rate = self.stale.table, decision.expected_tokens_per_ms
        if not self.suspends or table is None or rate is None or decision.reason not in SEARCHED or load.warming_up:
            return False
        plain = float(
            table.step_costs(load.requests, load.requests + load.prefill_tokens, 1, load.context, drafted=0)[0]
        )
        if load.requests / plain <= rate * (1 + SUSPEND_MARGIN):
            self._suspended_steps = 0
            return False
        self._suspended_steps = (self._suspended_steps + 1) % PROBE_EVERY
        return self._suspended_steps != 0

    @property
    def statistics(self) -> Statistics:
        """What has happened up to the last step observed."""
        self._settle()
        return self._statistics

    def _settle(self) -> None:
        """Count what has been put aside: many steps together cost little more than one."""
        self._statistics.record(*self._records)
        if self._confidences:
            *arrays, sources = zip(*self._confidences, strict=True)
            survival, widths, accepted = (np.concatenate(parts) for parts in arrays)
            names = [name for part in sources for name in part]
            self._statistics.record_confidence(survival, widths, accepted, names)
        self._records.clear()
        self._confidences.clear()

    # -- learning ----------------------------------------------------------------------------------------------------------

    def observe(self, plan: Plan, inputs: StepInputs, outputs: HostOutputs, kept: list[int], host_ms: float) -> None:
        """Take the result of a planned step.

        Args:
            kept: [E] tokens each emitting request delivered; 0 where it had left meanwhile.
            host_ms: host time of the step that the device could not hide.
        """
        count = inputs.num_drafted
        widths, accepted = outputs.widths, outputs.accepted
        proposed = outputs.proposed or [self.gamma] * count
        sources = outputs.sources or [None] * count
        model_rows = count if outputs.model_rows is None else outputs.model_rows
        if count:
            self._model_share = model_rows / count
        parts = [*plan.drafted, *plan.undrafted]
        for index, part in enumerate(parts):
            if part.request.breaker is not None and part.may_draft:
                verified = widths[index] if index < count else 0
                part.request.breaker.observe(verified, accepted[index] if verified else 0)
        if count and outputs.confidence is not None and self.confidence is not None:
            known = np.array(proposed)[:, None] > np.arange(self.gamma)
            survival = prefix_survival(outputs.confidence).numpy() * known
            outcome, window = np.array(accepted[:count]), np.array(widths)
            self.board.publish(plan.load.step, plan.seats, survival)
            self.confidence.observe(outputs.confidence_logits, outputs.signal, outcome, window)
            self._confidences.append((survival, window, outcome, sources))
        measured = outputs.device_ms + host_ms
        decision = plan.decision
        assert decision is not None  # the step has asked
        plan.predicted_ms = self._predicted_ms(plan, decision, sum(widths), model_rows)
        self._records.append(
            StepRecord(
                blocks=[
                    *map(BlockRecord, proposed, widths, accepted[:count], kept[:count], sources),
                    *(BlockRecord(0, 0, 0, tokens) for tokens in kept[count:]),
                ],
                reason=decision.reason,
                stale_lag=decision.stale_lag,
                predicted_ms=plan.predicted_ms,
                measured_ms=measured,
                graph_hit=outputs.replayed,
                prefill=plan.load.prefill_tokens > 0,
                breakers=Counter(part.request.breaker.state for part in parts if part.request.breaker is not None),
            )
        )
        if len(self._records) >= SETTLE_EVERY:
            self._settle()
        if self.drift is not None and plan.predicted_ms and not plan.load.prefill_tokens:
            rescale = self.drift.observe(plan.predicted_ms, measured)
            if rescale is not None:
                log.info("%s", rescale)
                self._statistics.rescales += 1
                self.stale.table = self.drift.table
                if self.current is not None:
                    self.current.table = self.drift.table

    def _predicted_ms(self, plan: Plan, decision: Decision, verified: int, model_rows: int) -> float | None:
        """The prediction, for the rows that were there: a drafter may have proposed less than was planned for."""
        table, load = self.stale.table, plan.load
        if table is None or decision.predicted_ms is None:
            return None
        if verified == decision.budget and model_rows == load.drafted:
            return decision.predicted_ms
        rows = load.requests + load.prefill_tokens + verified
        return float(table.step_costs(load.requests, rows, 1, load.context, model_rows)[0])

    def describe(self) -> str:
        """What decides the widths, in one line."""
        if not self.gamma:
            return "target only: no drafter"
        if self.stale.forced is not None:
            return f"forced widths {','.join(map(str, self.stale.forced.pattern))}"
        if self.stale.table is None:
            return "verifies everything: no cost table for this engine (make one with 'surefoot profile')"
        if self.stale.table.is_flat:
            return "verifies everything: the cost table is flat"
        return f"{self.planner_name} planner on the measured cost table"
