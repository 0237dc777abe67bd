"""Paged storage: tensors, block tables, and the mapping position -> cache slot.

The layers of target and drafter are put into *groups* by their attention window and by the positions that share an entry; a
group has one block table, so that a block before a window can be freed for the sliding layers while the full layers keep
theirs, and a compressed layer needs fewer blocks than the others. The drafter's context layers live in the full-attention
group and therefore in the very blocks of the target: whoever reuses a block (a shared prefix, a preempted request) gets the
drafter's context with it.

Rewinding is setting a length. Nothing here is ever copied back or replayed: a slot after a request's committed length is
garbage by definition and is overwritten by the next step. A recurrent layer keeps the same promise in `states.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.cache.layers import Group, LayerSpec, StateSpec
from surefoot.cache.states import StateRing

__all__ = ["Group", "LayerSpec", "PagedCache", "StateRing", "StateSpec"]


class PagedCache:
    """The stored tensors of every layer, addressed by cache slot.

    Cache slot of position p of state slot s in group g, with e = p // stride the entry that p belongs to:
    `block_tables[g][s, e // block_size] * block_size + e % block_size`. Block 0 of every group is scratch: padding rows write
    there and nobody reads it.
    """

    def __init__(
        self,
        target_layers: tuple[LayerSpec, ...],
        drafter_layers: tuple[LayerSpec, ...] = (),
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_window_blocks: int | None = None,
        states: tuple[StateSpec, ...] = (),
        frontier: int = 1,
    ) -> None:
        """
        Args:
            num_blocks: blocks of a group that keeps every entry; a compressed group gets as many as the same positions need.
            block_size: entries of a block.
            num_window_blocks: blocks of every group with a window (None: `num_blocks`).
            states: what the target's recurrent layers keep.
            frontier: most rows of a window; each has a candidate of every state.
        """
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        groups = {spec.group for spec in target_layers}
        if drafter_layers:
            groups.add(Group())
        self.groups: tuple[Group, ...] = tuple(sorted(groups, key=lambda group: group.order))
        self.group_blocks = tuple(
            num_window_blocks
            if group.window is not None and num_window_blocks is not None
            else 1 + -(-(num_blocks - 1) // group.stride)
            for group in self.groups
        )
        self.target_layers, self.drafter_layers = target_layers, drafter_layers
        self.target_group = tuple(self.groups.index(spec.group) for spec in target_layers)
        # A drafter layer with a window still needs its context for as long as the request lives in the full group.
        self.drafter_group = self.groups.index(Group()) if drafter_layers else 0
        self.block_tables = tuple(
            torch.zeros(
                max_num_seqs,
                -(-max_model_len // group.positions_per_block(block_size)),
                dtype=torch.int32,
                device=device,
            )
            for group in self.groups
        )

        def storage(spec: LayerSpec, group: int) -> tuple[Tensor, ...]:
            slots = self.group_blocks[group] * block_size
            return tuple(torch.zeros(slots, *shape, dtype=dtype, device=device) for shape in spec.entry)

        self.target_kv = [storage(spec, group) for spec, group in zip(target_layers, self.target_group, strict=True)]
        self.drafter_kv = [storage(spec, self.drafter_group) for spec in drafter_layers]
        self.states = StateRing(states, max_num_seqs, frontier, device) if states else None

    @property
    def strides(self) -> tuple[int, ...]:
        """Positions per entry of every group."""
        return tuple(group.stride for group in self.groups)

    def cache_slots(self, group: int, row_slot: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of rows: [T] int64 from state slots [T] and absolute positions [T]."""
        stride = self.groups[group].stride
        entries = positions if stride == 1 else positions // stride
        block = self.block_tables[group][row_slot, entries // self.block_size]
        return torch.add(entries % self.block_size, block, alpha=self.block_size)

    @property
    def num_bytes(self) -> int:
        stored = sum(t.numel() * t.element_size() for tensors in (*self.target_kv, *self.drafter_kv) for t in tensors)
        return stored + (self.states.num_bytes if self.states is not None else 0)
