"""The planner's stopping rule in one call (`planning.cpp`); the rule itself is `speculation.planner.admit`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surefoot.kernels import native
from surefoot.speculation import planner
from surefoot.speculation.continuation import ContinuationModel
from surefoot.speculation.planner import FEW, Admission, StoppingProblem


def admit(problem: StoppingProblem) -> Admission:
    """`speculation.planner.admit`, the same decision in a tenth of its time: for `StoppingPlanner(rule=...)`."""
    if not native.available():
        return planner.admit(problem)
    of_step = map(torch.from_numpy, (problem.survival, problem.limits, problem.costs))
    widths, budget, tokens = torch.ops.surefoot.admit(
        *of_step, *_learned(problem.model), problem.requests, problem.min_width, problem.price, FEW
    )
    return Admission(budget, tuple(widths.tolist()), tokens)


_VIEWS: WeakKeyDictionary[ContinuationModel, tuple[object, Tensor, Tensor]] = WeakKeyDictionary()


def _learned(model: ContinuationModel) -> tuple[Tensor, Tensor]:
    """A model's edges and ratios as tensors, made anew once it has learned."""
    kept = _VIEWS.get(model)
    if kept is None or kept[0] is not model.ratio:
        kept = _VIEWS[model] = (model.ratio, torch.from_numpy(model.edges), torch.from_numpy(model.ratio))
    return kept[1:]
