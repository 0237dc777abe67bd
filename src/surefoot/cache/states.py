"""State per frontier slot: how a recurrent layer is rewound without a replay.

Every request owns a ring of `frontier + 1` states per layer; an index says which of them is the committed one. A step whose
window has v rows (the anchor and its drafts, v <= frontier) writes the state after row o into the ring o + 1 places after
the committed one. The committed state itself is never overwritten by the step that starts from it, so that a step which fails
can run again. Committing moves the index by the rows that were accepted: no state is copied, none is computed twice.

Rows of a prompt chunk before the anchor leave no candidates. A chunk that does not emit leaves one state: the one after its
last row, one place after the committed one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.cache.layers import StateSpec


class StateRing:
    """States of all layers and requests.

    Attributes:
        index: [S] int64, the place of the committed state in each request's ring. Written only by `enter` and `commit`.
        states: per layer, [S, frontier + 1, *shape].
    """

    def __init__(
        self, specs: tuple[StateSpec, ...], max_num_seqs: int, frontier: int, device: torch.device | str = "cpu"
    ) -> None:
        self.specs, self.places = specs, frontier + 1
        self.index = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.states = [
            torch.zeros(max_num_seqs, self.places, *spec.shape, dtype=spec.dtype, device=device) for spec in specs
        ]

    def enter(self, slot: int) -> None:
        """A request starts in `slot`: its committed state is zero. One that was preempted starts again the same way."""
        self.index[slot].fill_(0)
        for states in self.states:
            states[slot, 0].zero_()

    def committed(self, layer: int, slots: Tensor) -> Tensor:
        """[R, *shape]: the states that a step of the requests in `slots` ([R] int64) starts from."""
        return self.states[layer][slots, self.index[slots]]

    def write(self, layer: int, slots: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Store candidate states.

        Args:
            slots: [N] int64, state slot of each candidate.
            offsets: [N] int64 in 0 ... frontier - 1, the row of the window that the state comes after.
            values: [N, *shape].
        """
        states = self.states[layer]
        states[slots, (self.index[slots] + offsets + 1) % self.places] = values.to(states.dtype)

    def commit(self, slots: Tensor, rows: Tensor) -> None:
        """Make the state after `rows` window rows ([R] int64 >= 1) the committed one."""
        self.index.index_copy_(0, slots, (self.index.index_select(0, slots) + rows) % self.places)

    @property
    def num_bytes(self) -> int:
        return sum(states.numel() * states.element_size() for states in self.states)
