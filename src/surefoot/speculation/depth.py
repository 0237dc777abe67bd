"""How many tokens of a block are worth drafting.

The draft pass computes one row for every token it drafts, for every request, whether or not it is verified. Where target
rows are expensive, or requests are many, a shorter block costs less and loses nothing that would have been verified. The
depth is chosen before anything is drafted, from past blocks alone, so it does not change the output distribution.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.speculation.cost import CostTable
from surefoot.speculation.planner import StepLoad

Floats = npt.NDArray[np.float64]
PROBE_EVERY = 16
"""Of this many steps with drafts one drafts whole blocks: a shorter one shows nothing of the later positions."""
THRESHOLDS = 16


class DraftDepth:
    """The depth with the best expected rate over the whole blocks of the recent past.

    A planner that verifies what survives with probability `t` or more gets, from blocks drafted to depth g,

        rate(g, t) = (R + n E[S_1 + ... + S_w]) / (D(n, g) + V(R + n E[w]) + overheads),  w = positions <= g with S >= t,

    the mean taken over R requests of which n get a draft; the choice is the g of the largest rate over all t.

    Args:
        gamma: tokens of a whole block.
        keep: number of whole blocks that are remembered.
        least: with fewer of them, whole blocks are drafted.
    """

    def __init__(self, gamma: int, *, keep: int = 128, least: int = 16) -> None:
        self.gamma, self.keep, self.least = gamma, keep, least
        self._survival: Floats = np.empty((0, gamma))
        self._chosen: dict[tuple[int, int], int] = {}  # by R and n, for `_chosen_by` and the blocks so far
        self._chosen_by: CostTable | None = None
        self._steps = 0

    def observe(self, survival: npt.NDArray[np.floating]) -> None:
        """Take the calibrated survivals of whole blocks, [N, gamma]."""
        if len(survival):
            self._survival = np.concatenate([self._survival, survival])[-self.keep :]
            self._chosen.clear()

    def choose(self, table: CostTable | None, load: StepLoad) -> int | None:
        """Depth of the coming step; None for whole blocks. Without measured depths in the table always None."""
        if table is None or not table.draft_depths or len(self._survival) < self.least or not load.draft_requests:
            return None
        self._steps = (self._steps + 1) % PROBE_EVERY
        if not self._steps:
            return None
        if table is not self._chosen_by:
            self._chosen.clear()
            self._chosen_by = table
        key = (load.requests, load.draft_requests)
        if key not in self._chosen:
            self._chosen[key] = self._best(table, load)
        best = self._chosen[key]
        return None if best >= self.gamma else best

    def _best(self, table: CostTable, load: StepLoad) -> int:
        thresholds = np.append(np.quantile(self._survival, np.linspace(0.0, 1.0, THRESHOLDS)), 2.0)
        verified = self._survival >= thresholds[:, None, None]  # [T, N, gamma]
        width = verified.mean(1).cumsum(1)  # [T, gamma] at each depth
        accepted = (verified * self._survival).mean(1).cumsum(1)
        drafted, requests = load.draft_requests, load.requests
        verify = table.verify_costs(0, requests + drafted * self.gamma + 1, load.context)
        cost = np.interp(requests + drafted * width, np.arange(len(verify)), verify)
        draft = np.array([table.draft_ms_at(drafted, depth) for depth in range(1, self.gamma + 1)])
        rate = (requests + drafted * accepted) / (cost + draft + table.overhead_ms_at(requests))
        return 1 + int(rate.max(0).argmax())
