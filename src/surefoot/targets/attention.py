"""surefoot's attention and cache, called by transformers' own model code.

`AttentionInterface` lets a model graph call any attention function by name, and the graph hands its keys and values to
whatever object it was given as a cache. One `PagedStep` per target pass plays both parts: `update` writes the pass's
keys and values into the paged cache, `attend` lets every row of the flat axis read its own request. The step travels as
an explicit keyword argument of the model call, so two passes can never see each other's state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.errors import ModelError
from surefoot.kernels.attention import paged_attention

ATTENTION_NAME = "surefoot"
STEP_ARGUMENT = "surefoot_step"


ASKS_FOR_POSITIONS = ("Llama4TextAttention",)
"""Attention modules that add the cache's length to 0 ... T-1 to get the rows' positions."""


class StepMissing(ModelError):
    """An attention module that drops the keyword arguments of the model call, and with them the step."""


class FlatCache:
    """What transformers asks of a cache, answered for a flat token axis: nothing is cached, no mask is needed.

    A model asks once per pass, without a layer, and is told positions and masks otherwise. A layer that asks needs its own
    answer: `probe` refuses it, unless it is one of `ASKS_FOR_POSITIONS`.

    The masks transformers would build are skipped altogether, because `ATTENTION_NAME` names no mask function: the
    attention knows from the batch which positions a row may see.
    """

    is_compileable = False

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class PagedStep(FlatCache):
    """One target pass over `batch`, writing to and reading from `cache`."""

    def __init__(self, batch: FlatBatch, cache: PagedCache) -> None:
        self.batch, self.cache = batch, cache
        self.layer = -1  # the layer whose keys and values were written last: the one that attends next

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `key` [1, Hkv, T, D] and `value` [1, Hkv, T, Dv] of one layer at the rows' cache slots."""
        self.layer = layer_idx
        slots = self.batch.cache_slots[self.cache.target_group[layer_idx]]
        key_cache, value_cache = self.cache.target_kv[layer_idx]
        key_cache.index_copy_(0, slots, key[0].transpose(0, 1).to(key_cache.dtype))
        value_cache.index_copy_(0, slots, value[0].transpose(0, 1).to(value_cache.dtype))
        return key, value

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """Of a layer: what each row has to add to its place on the flat axis to get its position, [T] int64."""
        positions = self.batch.positions
        return 0 if layer_idx is None else positions - torch.arange(len(positions), device=positions.device)

    def stores(self, dtype: torch.dtype) -> bool:
        """Whether keys and values of this dtype are cached as they are."""
        return self.cache.target_kv[0][0].dtype == dtype

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention of `query` [1, Hq, T, D] over the cache: [T, Hq, Dv]."""
        batch, cache, layer = self.batch, self.cache, self.layer
        key_cache, value_cache = cache.target_kv[layer]
        scaling = options.get("scaling")
        return paged_attention(
            query[0].transpose(0, 1),
            key_cache,
            value_cache,
            batch.block_tables[cache.target_group[layer]],
            batch.row_slot,
            batch.kv_lens,
            block_size=cache.block_size,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=cache.target_layers[layer].window,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )


def surefoot_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function registered with transformers; its step comes as a keyword argument of the model call."""
    step: FlatCache | None = options.get(STEP_ARGUMENT)
    if step is None:
        raise StepMissing(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    options["attention_mask"] = attention_mask
    return step.attend(module, query, key, value, options)[None], None


AttentionInterface.register(ATTENTION_NAME, surefoot_attention)
