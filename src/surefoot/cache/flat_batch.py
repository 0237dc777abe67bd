"""The flat token axis: every row the target runs in one step, whatever request it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surefoot.cache.paged import PagedCache


@dataclass(frozen=True)
class FlatBatch:
    """One target pass over T rows, as device data.

    Rows of one request are contiguous and in position order. Padding rows up to the token bucket come last: their `kv_lens` is
    0, they write to the scratch block, and nothing reads them.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute position of each row in its request
    row_slot: Tensor  # [T] int64, state slot of the request that owns the row (0 for padding)
    kv_lens: Tensor  # [T] int64, cached positions the row may see, itself included (position + 1; 0 for padding)
    cache_slots: tuple[Tensor, ...]  # per cache group: [T] int64, cache slot the row's key and value are written to
    block_tables: tuple[Tensor, ...]  # per cache group: [S, max_blocks] int32
    logit_rows: Tensor  # [L] int64, the rows whose logits are needed

    @classmethod
    def of_rows(
        cls,
        cache: PagedCache,
        token_ids: Tensor,
        positions: Tensor,
        row_slot: Tensor,
        logit_rows: Tensor,
        real: Tensor | None = None,
    ) -> FlatBatch:
        """Rows by state slot and position; the cache's block tables say where they are stored.

        Args:
            cache: the cache of the pass.
            token_ids, positions, row_slot: [T] int64 each; padding stands at slot 0, position 0.
            logit_rows: [L] int64.
            real: [T] bool, False for padding (None: no row is padding).
        """
        visible = positions + 1
        places = [cache.cache_slots(group, row_slot, positions) for group in range(len(cache.groups))]
        if real is not None:
            visible, places = visible * real, [place * real for place in places]
        return cls(token_ids, positions, row_slot, visible, tuple(places), cache.block_tables, logit_rows)

    @classmethod
    def of_table(cls, cache: PagedCache, table: Tensor, logit_rows: Tensor) -> FlatBatch:
        """The columns of all rows in one tensor: table [4 + groups, T] int64, in the order of `columns`."""
        token_ids, positions, row_slot, kv_lens, *cache_slots = table.unbind()
        return cls(token_ids, positions, row_slot, kv_lens, tuple(cache_slots), cache.block_tables, logit_rows)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Everything that is said row by row: 4 + groups tensors, [T] int64 each."""
        return self.token_ids, self.positions, self.row_slot, self.kv_lens, *self.cache_slots

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]
