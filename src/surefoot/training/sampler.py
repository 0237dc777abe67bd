"""Sampling in bulk on an accelerator: thousands of texts at once, with no host work per text and step.

The engine's own work on the host grows with its requests (plans, detokenisation, statistics). At the batch sizes that fill
a GPU it would take longer than the target's pass; text for training needs none of it. So this loop keeps everything on the
device and looks at the result every `LOOK` steps only, to retire what has ended and to admit what waits.
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
"""Steps between two looks; a text that has ended runs on for half as many on average, and what it adds is cut off."""
_BLOCK = 16
_PREFILL_ROWS = 8192
_DRAW_ROWS = 512  # rows whose probabilities exist at a time: 512 x 152k in float32 are 0.3 GiB


@dataclass(frozen=True)
class Continuation:
    """One text to be continued."""

    index: int
    tokens: tuple[int, ...]
    temperature: float
    max_new: int
    seed: int  # with the text's length it addresses every uniform: neighbours have no say


@dataclass(frozen=True)
class SampledText:
    job: Continuation
    tokens: npt.NDArray[np.int64]  # [length] with the prompt, the end token if one came
    ended: bool  # by itself, not by running out of room or time


class BulkSampler:
    """Continues texts in `rows` state slots of one target."""

    def __init__(self, target: Target, *, rows: int, max_len: int) -> None:
        """
        Args:
            rows: texts at a time.
            max_len: tokens of the longest text, prompt included.
        """
        self.target, self.rows = target, rows
        self.width = -(-(max_len + LOOK) // _BLOCK) * _BLOCK  # an ended text runs on for a little
        per_row, device = self.width // _BLOCK, target.device
        self.cache = PagedCache(
            target.layers, num_blocks=1 + rows * per_row, block_size=_BLOCK, max_num_seqs=rows,
            max_model_len=self.width, dtype=target.dtype, device=device,
        )  # fmt: skip
        for table in self.cache.block_tables:  # every slot owns its blocks for good; block 0 is scratch
            table.copy_(1 + torch.arange(rows * per_row, dtype=torch.int32, device=device).view(rows, per_row))
        self.history = torch.zeros(rows, self.width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.ends = torch.tensor(sorted(target.eos_token_ids), dtype=torch.int64, device=device)
        self.jobs: dict[int, Continuation] = {}  # by slot
        self.generated = 0  # tokens of the texts handed out

    @torch.no_grad()
    def run(self, jobs: Iterable[Continuation]) -> Iterator[list[SampledText]]:
        """Continue `jobs`; yields what ended since the last look, which may be nothing. Stop iterating to stop early."""
        waiting = iter(jobs)
        self._admit(waiting)
        while self.jobs:
            active = sorted(self.jobs, key=lambda slot: self.jobs[slot].temperature > 0)
            greedy = sum(self.jobs[slot].temperature == 0 for slot in active)
            slots = torch.tensor(active, device=self.history.device)
            for _ in range(LOOK):
                self._extend(slots, greedy)
            texts = self._retire(slots)
            self._admit(waiting)
            yield texts

    @torch.no_grad()
    def unfinished(self) -> list[SampledText]:
        """What the running texts have so far; they are dropped."""
        return self._take(list(self.jobs))

    # -- one step ----------------------------------------------------------------------------------------------------------

    def _extend(self, slots: Tensor, greedy: int) -> None:
        """One more token in every slot; the first `greedy` of them take the most likely one."""
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

    # -- joining and leaving -----------------------------------------------------------------------------------------------

    def _admit(self, waiting: Iterator[Continuation]) -> None:
        """Fill the free slots and run the prompts, so that every running text has its next token to come."""
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
        # All but the last token of each prompt: the first step of the text runs that one.
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
        """The texts of these slots, which become free."""
        where = torch.tensor(slots, dtype=torch.int64, device=self.history.device)
        rows, lengths = self.history[where].cpu().numpy(), self.lengths[where].tolist()
        return [self._cut(self.jobs.pop(slot), rows[i, : lengths[i]]) for i, slot in enumerate(slots)]

    def _cut(self, job: Continuation, tokens: npt.NDArray[np.int64]) -> SampledText:
        """Up to the first end token behind the prompt, or to the room it had."""
        start = len(job.tokens)
        tokens = tokens[: start + job.max_new]
        ends = np.flatnonzero(np.isin(tokens[start:], list(self.target.eos_token_ids)))
        stop = start + int(ends[0]) + 1 if len(ends) else len(tokens)
        self.generated += stop - start
        return SampledText(job, tokens[:stop].copy(), bool(len(ends)))
