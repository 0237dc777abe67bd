"""What the device knows about every running request, by state slot.

Only `DeviceState.apply` (at the start of a step) and `step` (at its end) write here, both on the device's own time line; the
host hands over descriptions of changes and never touches the tensors. That is what lets it prepare step n + 1 while step n
still runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.drafters.base import Prediction
from surefoot.engine.distribution import SamplingTensors
from surefoot.engine.masks import TokenMask
from surefoot.sampling import SamplingParams


@dataclass(frozen=True)
class SlotUpdate:
    """A request enters a slot: its tokens so far, and how many of them are cached already (a prefix hit)."""

    slot: int
    token_ids: list[int]
    num_cached: int
    prompt_len: int
    params: SamplingParams
    seed: int  # the stream of uniforms
    end_ids: tuple[int, ...] = ()  # tokens that `params.min_tokens` keeps back
    mask: TokenMask | None = None


@dataclass(frozen=True)
class TableUpdate:
    """New block ids of one request in one cache group, from block index `first` on."""

    group: int
    slot: int
    first: int
    blocks: list[int]


@dataclass
class StateUpdates:
    """Everything the host wants changed before a step runs."""

    slots: list[SlotUpdate] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)


NUMPY: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.float32: np.float32}


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Host numbers as a device tensor. Never waits: a plain copy to CUDA would, for everything queued before it."""
    host = torch.from_numpy(np.array(values, dtype=NUMPY[dtype]))  # a third of the time of torch.tensor
    return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host.to(device)


class DeviceState:
    """Token history, committed lengths and sampling parameters of all state slots.

    `history[s, : lengths[s]]` is cached, `history[s, lengths[s]]` is the anchor, after it lie provisional drafts.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, frontier: int, device: torch.device | str) -> None:
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((max_num_seqs,), value, dtype=dtype, device=device)

        self.device = device
        self.history = torch.zeros(max_num_seqs, max_model_len + frontier, dtype=torch.int64, device=device)
        self.lengths = full(0, torch.int64)
        self.predictions: dict[int, Prediction] = {}  # by slot, of requests that bring one
        self.sampling = SamplingTensors(
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int64),
            top_p=full(1, torch.float32),
            min_p=full(0, torch.float32),
            repetition=full(1, torch.float32),
            presence=full(0, torch.float32),
            frequency=full(0, torch.float32),
            prompt_len=full(0, torch.int64),
            seed=full(0, torch.int64),
            bias_ids=torch.zeros(max_num_seqs, 1, dtype=torch.int64, device=device),
            bias_values=torch.zeros(max_num_seqs, 1, dtype=torch.float32, device=device),
            min_tokens=full(0, torch.int64),
            end_ids=torch.zeros(max_num_seqs, 1, dtype=torch.int64, device=device),
            end_values=torch.zeros(max_num_seqs, 1, dtype=torch.float32, device=device),
        )

    def apply(self, updates: StateUpdates, tables: Sequence[Tensor | npt.NDArray[np.int32]]) -> None:
        """Write all changes; `tables` are the block tables, or the same memory as arrays where the host may write there."""
        for entering in updates.slots:
            self._enter(entering)
        for group, table in enumerate(tables):
            grown = [update for update in updates.tables if update.group == group]
            if isinstance(table, np.ndarray):
                for update in grown:
                    table[update.slot, update.first : update.first + len(update.blocks)] = update.blocks
            elif grown:
                cells = [
                    (update.slot, index, block)
                    for update in grown
                    for index, block in enumerate(update.blocks, update.first)
                ]
                slots, indices, blocks = to_device(cells, torch.int64, self.device).unbind(1)
                table[slots, indices] = blocks.to(table.dtype)

    def _enter(self, update: SlotUpdate) -> None:
        slot, params, sampling = update.slot, update.params, self.sampling
        self.history[slot, : len(update.token_ids)] = to_device(update.token_ids, torch.int64, self.device)
        for values, value in (
            (self.lengths, update.num_cached),
            (sampling.temperature, params.temperature),
            (sampling.top_k, params.top_k),
            (sampling.top_p, params.top_p),
            (sampling.min_p, params.min_p),
            (sampling.repetition, params.repetition_penalty),
            (sampling.presence, params.presence_penalty),
            (sampling.frequency, params.frequency_penalty),
            (sampling.prompt_len, update.prompt_len),
            (sampling.min_tokens, params.min_tokens),
            (sampling.seed, update.seed),
        ):
            values[slot].fill_(value)  # assigning a number would make the host wait for a GPU
        self._list(slot, "bias", params.logit_bias)
        self._list(slot, "end", dict.fromkeys(update.end_ids if params.min_tokens else (), -math.inf))
        self.predictions.pop(slot, None)
        if params.prediction:
            predicted = to_device(list(params.prediction), torch.int64, self.device)
            self.predictions[slot] = Prediction(predicted, update.prompt_len)
        self.sampling.masks.pop(slot, None)
        if update.mask is not None:
            self.sampling.masks[slot] = update.mask

    def _list(self, slot: int, name: str, values: Mapping[int, float]) -> None:
        """Write {token id: value} of one slot; the lists of all slots grow as long as the longest."""
        ids_name, values_name = f"{name}_ids", f"{name}_values"
        ids, numbers = getattr(self.sampling, ids_name), getattr(self.sampling, values_name)
        if (extra := len(values) - ids.shape[1]) > 0:
            ids, numbers = (torch.nn.functional.pad(each, (0, extra)) for each in (ids, numbers))
            changed: dict[str, Any] = {ids_name: ids, values_name: numbers}
            self.sampling = replace(self.sampling, **changed)
        numbers[slot].zero_()
        if values:
            ids[slot, : len(values)] = to_device(list(values), torch.int64, self.device)
            numbers[slot, : len(values)] = to_device(list(values.values()), torch.float32, self.device)
