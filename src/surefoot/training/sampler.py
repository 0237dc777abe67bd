"""Bulk sampling on an accelerator: thousands of texts at once, without host work per text and step.

The engine's host work grows with its requests (planning, detokenisation, statistics). At the batch sizes that fill a GPU it
would take longer than the target pass, and training text needs none of it. This loop keeps all state on the device and
reads it back only every `LOOK` steps, to retire finished texts and to start waiting ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.speculation.uniforms import Purpose, uniforms
from surefoot.targets.target import Target

LOOK = 16
"""Steps between two reads; a finished text runs on for half as many on average, and the surplus is cut off."""
_BLOCK = 16
_PREFILL_ROWS = 8192
_DRAW_ROWS = 512  # rows of probabilities held at a time: 512 x 152k in float32 are 0.3 GiB


@dataclass(frozen=True)
class Continuation:
    """One text to continue."""

    index: int
    tokens: tuple[int, ...]
    temperature: float
    max_new: int
    seed: int  # seed and length address every uniform: results do not depend on other texts


@dataclass(frozen=True)
class SampledText:
    """A continued text."""

    job: Continuation
    tokens: npt.NDArray[np.int64]  # [length] prompt, continuation and the end token if there is one
    ended: bool  # by an end token, not by length or time


class BulkSampler:
    """Continues texts in `rows` state slots of one target."""

    def __init__(self, target: Target, *, rows: int, max_len: int) -> None:
        """
        Args:
            rows: concurrent texts.
            max_len: tokens of the longest text, including its prompt.
        """
        self.target, self.rows = target, rows
        self.width = -(-(max_len + LOOK) // _BLOCK) * _BLOCK  # a finished text runs on until the next read
        per_row, device = self.width // _BLOCK, target.device
        self.cache = PagedCache(
            target.layers, num_blocks=1 + rows * per_row, block_size=_BLOCK, max_num_seqs=rows,
            max_model_len=self.width, dtype=target.dtype, device=device,
        )  # fmt: skip
        for table in self.cache.block_tables:  # fixed blocks per slot; block 0 is the scratch block
            table.copy_(1 + torch.arange(rows * per_row, dtype=torch.int32, device=device).view(rows, per_row))
        self.history = torch.zeros(rows, self.width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.ends = torch.tensor(sorted(target.eos_token_ids), dtype=torch.int64, device=device)
        self.jobs: dict[int, Continuation] = {}  # by slot
        self.generated = 0  # tokens of all texts returned

    @torch.no_grad()
    def run(self, jobs: Iterable[Continuation]) -> Iterator[list[SampledText]]:
        """Continue `jobs`; yields the texts finished since the last read, possibly none. Stop iterating to stop early."""
        waiting = iter(jobs)
        self._fill_slots(waiting)
        while self.jobs:
            active = sorted(self.jobs, key=lambda slot: self.jobs[slot].temperature > 0)
            greedy = sum(self.jobs[slot].temperature == 0 for slot in active)
            slots = torch.tensor(active, device=self.history.device)
            for _ in range(LOOK):
                self._extend(slots, greedy)
            texts = self._retire(slots)
            self._fill_slots(waiting)
            yield texts

    @torch.no_grad()
    def unfinished(self) -> list[SampledText]:
        """Return the running texts as far as they are, and drop them."""
        return self._take(list(self.jobs))

    # -- one step ----------------------------------------------------------------------------------------------------------

    def _extend(self, slots: Tensor, greedy: int) -> None:
        """Append a token in every slot; the first `greedy` slots take the most likely one."""
        positions = self.lengths[slots] - 1
        logits = self._forward(slots, positions)
        self._append(slots, self._choose(logits, slots, greedy))

    def _choose(self, logits: Tensor, slots: Tensor, greedy: int) -> Tensor:
        chosen = [logits[:greedy].argmax(1)] if greedy else []
        for first in range(greedy, len(slots), _DRAW_ROWS):
            rows = slots[first : first + _DRAW_ROWS]
            scaled = logits[first : first + _DRAW_ROWS].to(torch.float32) / self.temperature[rows].unsqueeze(1)
            edges = scaled.softmax(1).cumsum(1)
            zero = torch.zeros_like(rows)
            u = uniforms(self.seed[rows], self.lengths[rows], Purpose.EMIT, zero).to(torch.float32)
            place = torch.searchsorted(edges, (u * edges[:, -1]).unsqueeze(1), right=True).squeeze(1)
            chosen.append(place.clamp(max=logits.shape[1] - 1))
        return torch.cat(chosen)

    def _append(self, slots: Tensor, tokens: Tensor) -> None:
        self.history[slots, self.lengths[slots]] = tokens
        self.lengths[slots] += 1
        self.ended[slots] |= torch.isin(tokens, self.ends)

    def _forward(self, owner: Tensor, positions: Tensor, logit_rows: Tensor | None = None) -> Tensor:
        rows = torch.arange(len(owner), device=owner.device) if logit_rows is None else logit_rows
        batch = FlatBatch.of_rows(self.cache, self.history[owner, positions], positions, owner, rows)
        return self.target.forward(batch, self.cache).logits

    # -- start and end of texts--------------------------------------------------------------------------------------------

    def _fill_slots(self, waiting: Iterator[Continuation]) -> None:
        """Fill the free slots and run the prompts up to their last token."""
        free = [slot for slot in range(self.rows) if slot not in self.jobs]
        new = list(zip(free, islice(waiting, len(free)), strict=False))
        if not new:
            return
        rows = np.zeros((len(new), self.width), dtype=np.int64)
        for number, (slot, job) in enumerate(new):
            rows[number, : len(job.tokens)] = job.tokens
            self.jobs[slot] = job
        device = self.history.device
        slots = torch.tensor([slot for slot, _ in new], device=device)
        self.history[slots] = torch.from_numpy(rows).to(device)
        self.lengths[slots] = torch.tensor([len(job.tokens) for _, job in new], device=device)
        self.temperature[slots] = torch.tensor([job.temperature for _, job in new], device=device)
        self.seed[slots] = torch.tensor([job.seed for _, job in new], device=device)
        self.ended[slots] = False
        # All but the last token of each prompt, which the first step of the text runs.
        part: list[tuple[int, int]] = []
        for slot, job in new:
            part.append((slot, len(job.tokens) - 1))
            if sum(count for _, count in part) >= _PREFILL_ROWS:
                self._prefill(part)
                part = []
        self._prefill(part)

    def _prefill(self, part: list[tuple[int, int]]) -> None:
        part = [(slot, count) for slot, count in part if count]
        if not part:
            return
        slots, counts = (torch.tensor(values) for values in zip(*part, strict=True))
        ends = counts.cumsum(0)
        owner = slots.repeat_interleave(counts)
        positions = torch.arange(len(owner)) - (ends - counts).repeat_interleave(counts)
        device = self.history.device
        nothing = ends.new_zeros(0).to(device)
        self._forward(owner.to(device), positions.to(device), nothing)

    def _retire(self, slots: Tensor) -> list[SampledText]:
        seen = zip(slots.tolist(), self.ended[slots].tolist(), self.lengths[slots].tolist(), strict=True)
        full = {slot: len(job.tokens) + job.max_new for slot, job in self.jobs.items()}
        return self._take([slot for slot, ended, length in seen if ended or length >= full[slot]])

    def _take(self, slots: list[int]) -> list[SampledText]:
        """Return the texts of these slots and free the slots."""
        where = torch.tensor(slots, dtype=torch.int64, device=self.history.device)
        rows, lengths = self.history[where].cpu().numpy(), self.lengths[where].tolist()
        return [self._cut(self.jobs.pop(slot), rows[i, : lengths[i]]) for i, slot in enumerate(slots)]

    def _cut(self, job: Continuation, tokens: npt.NDArray[np.int64]) -> SampledText:
        """The text up to the first end token after the prompt, or to its maximum length."""
        start = len(job.tokens)
        tokens = tokens[: start + job.max_new]
        ends = np.flatnonzero(np.isin(tokens[start:], list(self.target.eos_token_ids)))
        stop = start + int(ends[0]) + 1 if len(ends) else len(tokens)
        self.generated += stop - start
        return SampledText(job, tokens[:stop].copy(), bool(len(ends)))
