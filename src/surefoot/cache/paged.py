"""Paged key/value storage: tensors, block tables, and the mapping position -> cache slot.

The layers of target and drafter are put into *groups* by their attention window; a group has one block table, so that a
block behind a window can be freed for the sliding layers while the full layers keep theirs. The drafter's context layers
live in the full-attention group and therefore in the very blocks of the target: whoever reuses a block (a shared prefix, a
preempted request) gets the drafter's context with it.

Rewinding is setting a length. Nothing here is ever copied back or replayed: a slot behind a request's committed length is
garbage by definition and is overwritten by the next step. A recurrent or compressed state keeps the same promise by storing
one state per frontier slot and selecting the accepted one by index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer stores per position."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None  # positions a row sees, itself included; None = all


class PagedCache:
    """Key and value tensors of every layer, addressed by cache slot.

    Cache slot of position p of state slot s in group g: `block_tables[g][s, p // block_size] * block_size + p % block_size`.
    Block 0 of every group is scratch: padding rows write there and nobody reads it.
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
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        windows = {spec.window for spec in target_layers}
        if drafter_layers:
            windows.add(None)
        self.windows: tuple[int | None, ...] = tuple(sorted(windows, key=lambda w: (w is not None, w or 0)))
        self.group_blocks = tuple(
            num_blocks if window is None or num_window_blocks is None else num_window_blocks for window in self.windows
        )
        self.target_layers, self.drafter_layers = target_layers, drafter_layers
        self.target_group = tuple(self.windows.index(spec.window) for spec in target_layers)
        # A drafter layer with a window still needs its context for as long as the request lives in the full group.
        self.drafter_group = self.windows.index(None) if drafter_layers else 0
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = tuple(
            torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device) for _ in self.windows
        )

        def storage(spec: LayerSpec, group: int) -> tuple[Tensor, Tensor]:
            slots = self.group_blocks[group] * block_size
            key = torch.zeros(slots, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
            value = torch.zeros(slots, spec.num_kv_heads, spec.value_dim, dtype=dtype, device=device)
            return key, value

        self.target_kv = [storage(spec, group) for spec, group in zip(target_layers, self.target_group, strict=True)]
        self.drafter_kv = [storage(spec, self.drafter_group) for spec in drafter_layers]

    def cache_slots(self, group: int, row_slot: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of rows: [T] int64 from state slots [T] and absolute positions [T]."""
        block = self.block_tables[group][row_slot, positions // self.block_size]
        return torch.add(positions % self.block_size, block, alpha=self.block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for kv in (*self.target_kv, *self.drafter_kv) for t in kv)
