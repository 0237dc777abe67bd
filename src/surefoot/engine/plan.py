"""What is planned of a step before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from surefoot.engine.messages import WidthPlan
from surefoot.engine.scheduler import Scheduled
from surefoot.speculation.guard import Arm
from surefoot.speculation.planner import Decision, StepLoad
from surefoot.speculation.survival import Seat


@dataclass
class Plan:
    """The emitting requests of a step, split by whether they get a draft, and what they may verify."""

    drafting: list[Scheduled]
    not_drafting: list[Scheduled]
    limits: list[int]  # [D]
    load: StepLoad
    decision: Decision | None = None  # None until the step has asked (`decide`)
    decide: Callable[[Tensor, Tensor], Decision] | None = None  # survival [D, gamma], limits [D] -> K, widths
    explored: int = 0  # blocks verified whole, because the confidence source is warming up
    depth: int | None = None  # tokens drafted of each block (None: gamma)
    suspended: bool = False  # nothing is drafted, because drafting does not pay
    paused: int = 0  # requests whose breaker is open
    arm: Arm | None = None  # what the guard chose; None: it was not asked
    seats: list[Seat] = field(default_factory=list)  # [D] where their survivals are published
    predicted_ms: float | None = None  # for the rows that ran, once the step is observed

    @property
    def budget(self) -> int:
        """K, or its upper bound while the step has not asked yet."""
        return sum(self.limits) if self.decision is None else self.decision.budget

    @property
    def forced(self) -> list[int] | None:
        if self.decision is None or self.decision.widths is None:
            return None
        return list(self.decision.widths)

    def for_step(self, min_width: int) -> WidthPlan:
        """The part that the step needs."""
        return WidthPlan(
            limits=self.limits,
            budget=self.budget,
            min_width=min_width,
            widths=self.forced,
            explored=self.explored,
            depth=self.depth,
            decide=self.decide,
        )
