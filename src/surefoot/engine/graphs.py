"""Running the target on a flat batch: padded token buckets, and one captured callable per bucket.

The key is the padded token count alone, whatever the mix of widths: lengths, slots and widths are data. On CUDA a bucket is a
graph with static buffers; on a CPU it is the eager model with native kernels, or (opt-in) compiled decoder layers.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from surefoot.cache.paged import PagedCache
from surefoot.kernels.packing import FlatBatch
from surefoot.targets.target import Target, TargetOutput


class TargetRunner(Protocol):
    replayed: bool | None  # whether the last pass replayed a captured graph; None where nothing is ever captured

    def bucket(self, rows: int) -> int:
        """Rows the pass is padded to."""
        ...

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput: ...


class EagerRunner:
    """The model as it is, with exactly the rows there are (or padded to `buckets`, which tests use)."""

    def __init__(self, target: Target, buckets: tuple[int, ...] = ()) -> None:
        self.target, self.buckets = target, tuple(sorted(buckets))
        self.replayed: bool | None = None

    def bucket(self, rows: int) -> int:
        index = bisect_left(self.buckets, rows)
        return self.buckets[index] if index < len(self.buckets) else rows

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput:
        return self.target.forward(batch, cache, feature_layers)
