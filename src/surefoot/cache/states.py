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
    """States of all layers and requests, as device data.

    Attributes:
        index: [S] int64, the place of the committed state in each request's ring.
        first: [S] int64, the position of the first row of this step that leaves a candidate.
        states: per layer, [S + 1, frontier + 1, *shape]; the last request is scratch.
    """

    def __init__(
        self, specs: tuple[StateSpec, ...], max_num_seqs: int, frontier: int, device: torch.device | str = "cpu"
    ) -> None:
        self.places, self.scratch = frontier + 1, max_num_seqs
        self.index = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.first = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.states = [
            torch.zeros(max_num_seqs + 1, self.places, *spec.shape, dtype=spec.dtype, device=device) for spec in specs
        ]

    def enter(self, slot: int) -> None:
        """A request starts in `slot`: its committed state is zero. One that was preempted starts again the same way."""
        self.index[slot].fill_(0)
        for states in self.states:
            states[slot, 0].zero_()

    def begin(self, slots: Tensor, first: Tensor) -> None:
        """Start a step of the requests in `slots` ([R] int64).

        Args:
            first: [R] int64, the anchor's position; of a chunk that does not emit, the position of its last row.
        """
        self.first.index_copy_(0, slots, first)

    def committed(self, layer: int, slots: Tensor) -> Tensor:
        """[R, *shape]: the states that a step of the requests in `slots` ([R] int64) starts from."""
        return self.states[layer][slots, self.index[slots]]

    def write(self, layer: int, row_slot: Tensor, positions: Tensor, real: Tensor, values: Tensor) -> None:
        """Keep the states after the rows of a pass, as far as they are candidates.

        Args:
            row_slot, positions: [T] int64, owner and position of each row.
            real: [T] bool, False for padding.
            values: [T, *shape], the state after each row.
        """
        states = self.states[layer]
        offset = positions - self.first[row_slot]
        slots = torch.where(real & (offset >= 0), row_slot, self.scratch)
        places = (self.index[row_slot] + offset.clamp(min=0) + 1) % self.places
        states[slots, places] = values.to(states.dtype)

    def commit(self, slots: Tensor, lengths: Tensor) -> None:
        """Make the state after position `lengths - 1` ([R] int64), a candidate of this step, the committed one."""
        rows = lengths - self.first.index_select(0, slots)
        self.index.index_copy_(0, slots, (self.index.index_select(0, slots) + rows) % self.places)

    @property
    def num_bytes(self) -> int:
        return sum(states.numel() * states.element_size() for states in self.states)
