"""The planner's stopping rule in one native call (`planning.cpp`), on plain arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def stopping_rule(
    survival: npt.NDArray[np.float32],
    limits: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
    edges: npt.NDArray[np.float64],
    ratio: npt.NDArray[np.float64],
    *,
    requests: int,
    min_width: int,
    price: float | None,
    few: int,
) -> tuple[list[int], int, float]:
    """Choose the positions to verify, decision for decision as the rule written in numpy does. Needs the native kernels.

    Args:
        survival: [D, gamma] of this step's blocks.
        limits: [D] largest widths.
        costs: [limits.sum() + 1] ms of the step at K = 0, 1, ...
        edges: [gamma, bins - 1] survivals at which the next bin of the continuation model begins, by position.
        ratio: [gamma, bins, gamma] expected S_j / S_k by position k, bin of S_k and position j.
        requests: R, tokens that are emitted without any draft.
        min_width: positions that are verified in any case.
        price: tokens per ms of past steps (None: not known yet).
        few: number of requests up to which every position is decided one by one.

    Returns:
        [D] widths, their sum K, and the expected number of emitted tokens.
    """
    arrays = map(torch.from_numpy, (survival, limits, costs, edges, ratio))
    widths, budget, tokens = torch.ops.surefoot.stopping_rule(*arrays, requests, min_width, price, few)
    return widths.tolist(), budget, tokens
