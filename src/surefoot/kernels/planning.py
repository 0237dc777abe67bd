"""The planner's stopping rule in one call (`planning.cpp`); the rule itself is `speculation.planner.admit`."""

from __future__ import annotations

import torch

from surefoot.kernels import native
from surefoot.speculation import planner
from surefoot.speculation.planner import FEW, Admission, StoppingProblem


def admit(problem: StoppingProblem) -> Admission:
    """`speculation.planner.admit`, the same decision in a tenth of its time: for `StoppingPlanner(rule=...)`."""
    if not native.available():
        return planner.admit(problem)
    arrays = (problem.survival, problem.limits, problem.costs, problem.model.edges, problem.model.ratio)
    widths, budget, tokens = torch.ops.surefoot.admit(
        *map(torch.from_numpy, arrays), problem.requests, problem.min_width, problem.price, FEW
    )
    return Admission(budget, tuple(widths.tolist()), tokens)
