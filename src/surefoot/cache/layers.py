"""What one layer of a model keeps between steps: entries in the paged cache, or a state per frontier slot."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class LayerSpec:
    """What a layer stores in the paged cache.

    An *entry* is one row of every stored tensor. Attention stores an entry per position (a key and a value per head), a
    compressed layer one per `stride` positions, a latent layer whatever tensors its latent has.
    """

    entry: tuple[tuple[int, ...], ...]  # shape of each stored tensor, per entry
    window: int | None = None  # positions a row sees, itself included; None = all
    stride: int = 1  # positions that share one entry

    @classmethod
    def attention(cls, num_kv_heads: int, head_dim: int, value_dim: int, window: int | None = None) -> LayerSpec:
        """A key [num_kv_heads, head_dim] and a value [num_kv_heads, value_dim] per position."""
        return cls(((num_kv_heads, head_dim), (num_kv_heads, value_dim)), window)

    @property
    def group(self) -> Group:
        return Group(self.window, self.stride)

    @property
    def entry_size(self) -> int:
        """Numbers stored per entry."""
        return sum(prod(shape) for shape in self.entry)


@dataclass(frozen=True)
class Group:
    """Layers that share a block table: they see the same window and store entries for the same positions."""

    window: int | None = None
    stride: int = 1

    @property
    def order(self) -> tuple[bool, int, int]:
        """Full attention first: it keeps what every other group can be rebuilt from."""
        return self.window is not None, self.stride, self.window or 0

    def positions_per_block(self, block_size: int) -> int:
        return block_size * self.stride

    def first_visible(self, length: int, block_size: int) -> int:
        """Index of the first block that a row at position `length` can see."""
        if self.window is None:
            return 0
        return max(0, length - self.window + 1) // self.positions_per_block(block_size)


@dataclass(frozen=True)
class StateSpec:
    """What a recurrent or convolutional layer keeps: one tensor of this shape per request, whatever its length."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
