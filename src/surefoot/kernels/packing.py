"""The flat token axis: every row the target runs in one step, whatever request it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FlatBatch:
    """One target pass over T rows of R requests, as device data.

    Rows of one request are contiguous and in position order; `qo_indptr` delimits them. Rows behind `qo_indptr[-1]` are
    padding up to the token bucket: their `kv_lens` is 0, they write to the scratch block, and nobody reads them.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute position of each row in its request
    row_slot: Tensor  # [T] int64, state slot of the request that owns the row (0 for padding)
    kv_lens: Tensor  # [T] int64, cached positions the row may see, itself included (position + 1; 0 for padding)
    cache_slots: tuple[Tensor, ...]  # per cache group: [T] int64, cache slot the row's key and value are written to
    block_tables: tuple[Tensor, ...]  # per cache group: [S, max_blocks] int32
    qo_indptr: Tensor  # [R + 1] int64
    logit_rows: Tensor  # [L] int64, the rows whose logits are needed

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]
