"""What becomes of a step: published survivals, taught confidences, breakers, drift of the cost table, statistics."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.engine.device import HostOutputs
from surefoot.engine.plan import Plan
from surefoot.speculation.breaker import BreakerState
from surefoot.speculation.cost import CostTable
from surefoot.speculation.depth import DraftDepth
from surefoot.speculation.estimator import ConfidenceSource, Evidence
from surefoot.speculation.exploration import Exploration
from surefoot.speculation.guard import Guard
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import Decision, StepLoad
from surefoot.speculation.sources import model_scores
from surefoot.speculation.statistics import BlockRecord, Statistics, StepRecord
from surefoot.speculation.survival import ConfidenceBoard, prefix_survival

log = logging.getLogger(__name__)

COUNT_EVERY = 32
"""Steps whose statistics are counted together."""
TEACH_EVERY = 8
"""Steps that the confidence source is taught together, where the host's time counts."""


class ObservedStep(NamedTuple):
    """A step that the statistics do not count yet."""

    plan: Plan
    outputs: HostOutputs
    proposed: list[int]  # [D] tokens the drafter proposed
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


class BlockOutcomes(NamedTuple):
    """The blocks of a step and how much of them was accepted, for the confidence source."""

    evidence: Evidence
    accepted: list[int]  # [D]
    widths: list[int]  # [D]


class StepLearner:
    """Takes the results of steps; what it has learned is read when the next ones are planned.

    Args:
        publishes: whether survivals of this step are planned with later.
        teach_every: steps that the confidence source is taught together.
        guard: told what steps took and brought.

    Attributes:
        board: survivals of earlier steps, by slot.
        depth: the whole blocks of the recent past, for the draft depth.
        exploration: how many blocks may be verified whole while the confidence source is warming up.
        model_share: share of the last step's drafts that needed a pass of the drafter's model.
    """

    def __init__(
        self,
        gamma: int,
        costs: LiveCost,
        *,
        num_slots: int,
        confidence: ConfidenceSource | None = None,
        model_gamma: int | None = None,
        publishes: bool = True,
        teach_every: int = 1,
        guard: Guard | None = None,
    ) -> None:
        self.gamma, self.costs, self.confidence = gamma, costs, confidence
        self.board = ConfidenceBoard(num_slots, gamma)
        self.depth = DraftDepth(gamma if model_gamma is None else model_gamma)
        self.exploration = Exploration()
        self.model_share = 1.0
        self._publishes, self._teach_every, self._guard = publishes, teach_every, guard
        self._statistics = Statistics()
        self._uncounted: list[ObservedStep] = []
        self._untaught: list[BlockOutcomes] = []

    @property
    def statistics(self) -> Statistics:
        """Counters up to the last observed step."""
        self._count()
        return self._statistics

    def observe(self, plan: Plan, outputs: HostOutputs, kept: list[int], host_ms: float) -> None:
        """Take the result of a planned step.

        Args:
            kept: [E] tokens each emitting request delivered; 0 where it had left meanwhile.
            host_ms: host time of the step that the device could not hide.
        """
        count = len(plan.drafting)
        widths, accepted = outputs.widths, outputs.accepted
        proposed = [self.gamma] * count if outputs.proposed is None else outputs.proposed
        model_requests = count if outputs.model_rows is None else outputs.model_rows
        if count:
            self.model_share = model_requests / count
        if count and self.confidence is not None:
            if self._publishes:
                self.board.publish(plan.load.step, plan.seats, self._survival(outputs.confidence, proposed))
            self._untaught.append(BlockOutcomes(outputs.evidence, accepted[:count], widths))
            if len(self._untaught) >= self._teach_every:
                self._teach(self.confidence)
        measured = outputs.device_ms + host_ms
        assert plan.decision is not None  # the step has asked
        plan.predicted_ms = self._predicted_ms(plan, plan.decision, sum(widths), model_requests)
        if plan.predicted_ms is not None:
            self.exploration.observe(plan.predicted_ms, self._gain_ms(plan, accepted) if plan.explored else 0.0)
        self._uncounted.append(ObservedStep(plan, outputs, proposed, kept, measured, _observe_breakers(plan, outputs)))
        if len(self._uncounted) >= COUNT_EVERY:
            self._count()
        if self._guard is not None and plan.arm is not None and not plan.load.prefill_tokens:
            self._guard.observe(plan.load.requests, plan.load.context, plan.arm, sum(kept), measured)
        if plan.predicted_ms and not plan.load.prefill_tokens:
            change = self.costs.observe(plan.predicted_ms, measured, plan.load.requests + sum(widths))
            if change is not None:
                log.info("%s", change)
                self._statistics.rescales += 1

    def _count(self) -> None:
        """Add the observed steps to the statistics: many together cost little more than one."""
        steps, self._uncounted = self._uncounted, []
        self._statistics.record(*(step.record() for step in steps))
        judged = [step for step in steps if step.proposed and step.outputs.confidence is not None]
        if judged:
            self.depth.observe(np.concatenate([self._whole_blocks(step) for step in judged]))
            self._statistics.record_confidence(
                np.concatenate([self._survival(step.outputs.confidence, step.proposed) for step in judged]),
                np.concatenate([step.outputs.widths for step in judged]),
                np.concatenate([step.outputs.accepted[: len(step.proposed)] for step in judged]),
                [name for step in judged for name in step.sources],
            )

    def _teach(self, confidence: ConfidenceSource) -> None:
        evidence, accepted, widths = zip(*self._untaught, strict=True)
        self._untaught.clear()
        rows = [len(part) for part in widths]
        confidence.observe(Evidence.joined(evidence, rows), np.concatenate(accepted), np.concatenate(widths))

    def _survival(self, confidence: Tensor | None, proposed: list[int]) -> npt.NDArray[np.float32]:
        """[D, gamma] survivals, 0 beyond the end of a block; without `confidence` nothing was proposed."""
        if confidence is None:
            return np.zeros((len(proposed), self.gamma), np.float32)
        return prefix_survival(confidence).numpy() * (np.array(proposed)[:, None] > np.arange(self.gamma))

    def _whole_blocks(self, step: ObservedStep) -> npt.NDArray[np.float32]:
        """[N, model_gamma] survivals of the blocks that the drafter's model has drafted to the end."""
        gamma = self.depth.gamma
        if step.plan.depth is not None:
            return np.zeros((0, gamma), np.float32)
        outputs = step.outputs
        whole = np.array(step.proposed) >= gamma
        if (scores := model_scores(outputs.evidence)) is not None:
            whole &= ~np.isnan(scores[:, 0].numpy())  # where another source has drafted
        elif outputs.model_rows is not None:
            whole[:] = False
        return self._survival(outputs.confidence, step.proposed)[whole, :gamma]

    def _predicted_ms(self, plan: Plan, decision: Decision, verified: int, model_requests: int) -> float | None:
        """The prediction for the rows that ran: a drafter may have proposed less than was planned for."""
        table, load = self.costs.table, plan.load
        if table is None or decision.predicted_ms is None:
            return None
        if verified == decision.budget and model_requests == load.draft_requests:
            return decision.predicted_ms
        rows = load.requests + load.prefill_tokens + verified
        return float(table.step_costs(load.requests, rows, 1, load.context, model_requests, load.depth)[0])

    def _gain_ms(self, plan: Plan, accepted: list[int]) -> float:
        """How much longer plain steps would have taken for the tokens of this one; a prompt chunk takes as long in both."""
        table, load = self.costs.table, plan.load
        assert table is not None
        assert plan.predicted_ms is not None
        spared = sum(accepted) / load.requests * plain_ms(table, load._replace(prefill_tokens=0))
        return spared + plain_ms(table, load) - plan.predicted_ms


def plain_ms(table: CostTable, load: StepLoad) -> float:
    """Cost of the step without drafts, in ms."""
    rows = load.requests + load.prefill_tokens
    return float(table.step_costs(load.requests, rows, 1, load.context, draft_requests=0)[0])


def _observe_breakers(plan: Plan, outputs: HostOutputs) -> Counter[BreakerState]:
    """Tell every request's breaker what became of its block; the number of breakers in each state."""
    states: Counter[BreakerState] = Counter()
    parts = [*plan.drafting, *plan.not_drafting]
    if not parts or parts[0].request.breaker is None:  # an engine has them for all requests or for none
        return states
    for index, part in enumerate(parts):
        breaker = part.request.breaker
        if breaker is not None:
            verified = outputs.widths[index] if index < len(outputs.widths) else 0
            if part.may_draft:
                breaker.observe(verified, outputs.accepted[index] if verified else 0)
            states[breaker.state] += 1
    return states
