"""One decode step, as the data flows: draft, allocate, pack, verify, accept, commit.

Everything here runs on the device's time line from host-known sizes (how many requests, how many rows) and device-known data
(lengths, tokens, widths). Nothing reads a device value back, except where reading is free (a CPU) and saves padding rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import Draft, DraftContext, Drafter
from surefoot.engine.clock import Laps, ignore
from surefoot.engine.distribution import BlockSampler, SamplingFlags, processed
from surefoot.engine.graphs import TargetRunner
from surefoot.engine.state import DeviceState, StateUpdates, to_device
from surefoot.kernels import native
from surefoot.kernels.packing import FlatBatch
from surefoot.kernels.sampling import argmax_rows, sample_rows
from surefoot.speculation.acceptance import Proposal, Verdict, accept_greedy, accept_sampled
from surefoot.speculation.allocation import allocate
from surefoot.speculation.estimator import ConfidenceSource
from surefoot.speculation.planner import Decision
from surefoot.speculation.survival import prefix_survival
from surefoot.speculation.uniforms import Purpose, uniforms


@dataclass(frozen=True)
class StepInputs:
    """What the host decided about one step. Requests stand in the order: drafted, other emitting, prompt chunks."""

    slots: list[int]  # [R] state slots
    num_drafted: int  # D: requests that get a draft
    num_emitting: int  # E: requests that emit tokens this step (D of them drafted)
    context_rows: list[int]  # [R] rows in front of the anchor: a prompt chunk; 0 for a pure decode
    steps: list[int]  # [E] decode steps the request has taken
    limits: list[int]  # [D] largest width each request may get
    min_width: int = 0  # positions every request verifies before survival decides; as the planner ranks
    budget: int = 0  # K, chosen by the planner; an upper bound where `decide` chooses it
    # Where the host may read: survival [D, gamma], limits [D] -> K and, if it has ranked them already, the widths.
    decide: Callable[[Tensor, Tensor], Decision] | None = None
    forced: list[int] | None = None  # [D] widths that replace allocation
    explored: int = 0  # blocks whose windows stay whole for the sake of learning
    depth: int | None = None  # tokens that a model drafts of each block (None: gamma)
    flags: SamplingFlags = field(default_factory=SamplingFlags)
    updates: StateUpdates = field(default_factory=StateUpdates)
    max_length: int = 0  # an upper bound of the committed lengths

    def even_width(self, budget: int) -> int:
        """The one width of a static step: the budget spread evenly, rounded up."""
        return -(-budget // max(self.num_drafted, 1))


@dataclass(frozen=True)
class StepOutputs:
    """Device tensors the host is told about. Drafts and confidences are published while the target still runs; of the
    target pass itself two integers per request leave the device (and log-probs, where they were asked for)."""

    accepted: Tensor  # [E] int64
    next_token: Tensor  # [E] int64
    drafts: Tensor  # [D, gamma] int64
    widths: Tensor  # [D] int64
    proposed: Tensor | None = None  # [D] int64, tokens the drafter really proposed (None: gamma)
    confidence: Tensor | None = None  # [D, gamma] float32, calibrated
    confidence_logits: Tensor | None = None  # [D, gamma] float32
    signal: Tensor | None = None  # [D, gamma] float32
    logprobs: Tensor | None = None  # [L] float32 of the token behind each logit row
    top_logprobs: Tensor | None = None  # [L, n] float32
    top_tokens: Tensor | None = None  # [L, n] int64
    rows: int = 0  # rows the target ran, padding included
    replayed: bool | None = None  # whether a captured graph ran them (None: this runner captures none)
    laps: Laps | None = None  # times of the stages, where somebody watches
    source: Tensor | None = None  # [D] int64 index into `sources`, of a drafter that has several; -1: no proposal
    sources: tuple[str, ...] = ()
    model_rows: int | None = None  # requests the drafter's model ran for (None: D)


class Requests(NamedTuple):
    """The requests of one step as device data."""

    slots: Tensor  # [R] int64
    context: Tensor  # [R] int64, rows in front of the anchor
    steps: Tensor  # [E] int64
    limits: Tensor  # [D] int64
    lengths: Tensor  # [R] int64, cached before the step


class DecodeStep:
    """The step of one engine: which target, which drafter, which cache, which state."""

    def __init__(
        self,
        runner: TargetRunner,
        drafter: Drafter | None,
        cache: PagedCache,
        state: DeviceState,
        confidence: ConfidenceSource | None,
        gamma: int,
        *,
        uniform_widths: bool = False,
        check_layout: bool = False,
        reads_are_free: bool = True,
    ) -> None:
        self.runner, self.drafter, self.cache, self.state = runner, drafter, cache, state
        self.confidence, self.gamma = confidence, gamma
        self.uniform_widths, self.check_layout = uniform_widths, check_layout
        self.reads_are_free = reads_are_free
        # On a CPU the arithmetic of packing takes a fifth of the time in numpy, on the memory of the tensors.
        self._arrays: tuple[Any, Any, Any] = (torch, _same, _same)
        if reads_are_free:
            self._arrays = (np, Tensor.numpy, torch.from_numpy)
        self._history = self._arrays[1](state.history)
        self._tables = [self._arrays[1](table) for table in cache.block_tables]
        vocabulary = drafter.vocabulary if drafter else None
        self.vocabulary_end = None if vocabulary is None else int(vocabulary.max()) + 1
        self.laps: Callable[[], Laps] | None = None  # starts the clock of a step; None: nobody watches

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs) -> StepOutputs:
        laps = self.laps() if self.laps is not None else None
        lap = laps or ignore
        self.state.apply(inputs.updates, self._tables)
        requests = self._requests(inputs)
        lap("update")
        draft, proposal = self._draft(inputs, requests)
        lap("draft")
        confidence = self._confidence(draft, inputs.explored)
        widths = self._allocate(inputs, requests.limits, draft, confidence)
        lap("plan")
        batch, anchor_row = self._pack(inputs, requests, widths)
        lap("pack")
        output = self.runner.run(batch, self.cache, self.drafter.feature_layers if self.drafter else ())
        lap("target")
        verdict = self._accept(inputs, output.logits, batch, anchor_row, requests, draft, widths, proposal)
        self._commit(inputs, requests, verdict)
        lap("accept")
        if self.drafter is not None and output.features is not None:
            self.drafter.extend(output.features, batch, self.cache)
        lap("extend")

        logprobs, top_logprobs, top_tokens = self._logprobs(inputs.flags, output.logits, batch)
        return StepOutputs(
            verdict.accepted,
            verdict.next_token,
            draft.tokens,
            widths[: inputs.num_drafted],
            draft.lengths,
            confidence,
            draft.confidence_logits,
            draft.signal,
            logprobs,
            top_logprobs,
            top_tokens,
            batch.num_rows,
            self.runner.replayed,
            laps,
            draft.source,
            self.drafter.sources if self.drafter else (),
            draft.model_rows,
        )

    def _requests(self, inputs: StepInputs) -> Requests:
        """What the host says about the requests, in one transfer."""
        count = len(inputs.slots)
        columns = (inputs.slots, inputs.context_rows, inputs.steps, inputs.limits)
        table = [[*column, *[0] * (count - len(column))] for column in columns]
        slots, context, steps, limits = to_device(table, torch.int64, self.state.device).unbind()
        lengths = self.state.lengths.index_select(0, slots)
        return Requests(slots, context, steps[: inputs.num_emitting], limits[: inputs.num_drafted], lengths)

    def _draft(self, inputs: StepInputs, requests: Requests) -> tuple[Draft, Proposal]:
        slots, steps, lengths = requests.slots, requests.steps, requests.lengths[: inputs.num_drafted]
        drafted = slots[: inputs.num_drafted]
        if self.drafter is None or not inputs.num_drafted:
            return Draft(slots.new_zeros(0, self.gamma), point_mass=True), Proposal(None)
        sampler = BlockSampler(
            self.state.sampling,
            inputs.flags,
            self.state.history,
            drafted,
            lengths,
            steps[: inputs.num_drafted],
            self.gamma,
            self.drafter.vocabulary,
            self.vocabulary_end,
        )
        context = DraftContext(drafted, lengths, self.state.history, self.cache, inputs.max_length, inputs.depth)
        draft = self.drafter.propose(context, sampler)
        if draft.point_mass or draft.drawn is not None:
            frontier = lengths.unsqueeze(1) + torch.arange(1, self.gamma + 1, device=slots.device)
            self.state.history[drafted.unsqueeze(1), frontier] = draft.tokens
        if draft.point_mass:
            return draft, Proposal(None)
        return draft, sampler.proposal if draft.drawn is None else replace(sampler.proposal, rows=draft.drawn)

    def _confidence(self, draft: Draft, explored: int) -> Tensor | None:
        if self.confidence is None or not draft.tokens.shape[0]:
            return None
        if self.reads_are_free and draft.lengths is not None and not draft.lengths.numpy().any():
            return None  # nothing was proposed
        return self.confidence.confidence(draft.confidence_logits, draft.signal, explored)

    def _allocate(self, inputs: StepInputs, limits: Tensor, draft: Draft, confidence: Tensor | None) -> Tensor:
        """Widths of the emitting requests, [E] int64; requests without a draft get 0."""
        device, undrafted = limits.device, inputs.num_emitting - inputs.num_drafted
        if not inputs.num_drafted:
            return limits.new_zeros(undrafted)
        if draft.lengths is not None:
            limits = torch.minimum(limits, draft.lengths)
        if inputs.forced is not None:
            widths = torch.minimum(to_device(inputs.forced, torch.int64, device), limits)
        else:
            if confidence is None:
                confidence = torch.ones(inputs.num_drafted, self.gamma, device=device)
            survival = prefix_survival(confidence)
            decision = None if inputs.decide is None else inputs.decide(survival, limits)
            budget = inputs.budget if decision is None else decision.budget
            if self.uniform_widths:
                widths = limits.clamp(max=inputs.even_width(budget))
            elif decision is not None and decision.widths is not None:
                widths = to_device(decision.widths, torch.int64, device)
            else:
                widths = allocate(survival, budget, limits, inputs.min_width)
        return torch.cat([widths, widths.new_zeros(undrafted)]) if undrafted else widths

    def _pack(self, inputs: StepInputs, requests: Requests, widths: Tensor) -> tuple[FlatBatch, Tensor]:
        """The flat batch, and the logit row of every emitting request's anchor ([E] int64)."""
        pack = self._pack_rows if self.reads_are_free and native.usable(widths) else self._pack_arrays
        batch, anchor_row = pack(inputs, requests, widths)
        if self.check_layout:
            from surefoot.engine.layout import check_layout

            check_layout(inputs, self.state, self.cache, batch, widths, anchor_row)
        return batch, anchor_row

    def _pack_rows(self, inputs: StepInputs, requests: Requests, widths: Tensor) -> tuple[FlatBatch, Tensor]:
        """`_pack_arrays` in one native call."""
        bucket = self.runner.bucket(sum(inputs.context_rows) + sum(widths.tolist()) + inputs.num_emitting)
        rows, qo_indptr, logit_rows, anchor_row = torch.ops.surefoot.pack_rows(
            requests.slots,
            requests.lengths,
            requests.context,
            widths,
            self.state.history,
            self.cache.block_tables,
            self.cache.block_size,
            bucket,
        )
        token_ids, positions, row_slot, kv_lens, *cache_slots = rows.unbind()
        tables = self.cache.block_tables
        return (
            FlatBatch(token_ids, positions, row_slot, kv_lens, tuple(cache_slots), tables, qo_indptr, logit_rows),
            anchor_row,
        )

    def _pack_arrays(self, inputs: StepInputs, requests: Requests, widths: Tensor) -> tuple[FlatBatch, Tensor]:
        """The same in array operations, on any device."""
        xp, array, tensor = self._arrays
        slots, lengths, drafts = array(requests.slots), array(requests.lengths), array(widths)
        count, emitting = len(inputs.slots), inputs.num_emitting
        if self.reads_are_free:  # no padding for widths that limits have cut
            num_logits = int(drafts.sum()) + emitting
        else:
            even = inputs.num_drafted * inputs.even_width(inputs.budget)
            num_logits = emitting + min(even if self.uniform_widths else inputs.budget, sum(inputs.limits))
        total = sum(inputs.context_rows) + num_logits
        bucket = self.runner.bucket(total)

        windows = drafts + 1
        mixed = any(inputs.context_rows)  # else every row is an anchor or a draft
        rows = windows
        if mixed:
            context = array(requests.context)
            rows = context + xp.concatenate([windows, context[emitting:] * 0])
        ends = rows.cumsum(0)
        starts = ends - rows
        row = array(torch.arange(bucket, device=widths.device))
        owner = xp.searchsorted(ends, row, side="right")
        padded = bucket > total or not self.reads_are_free
        if padded:
            real, owner = owner < count, owner.clip(max=count - 1)
        row_slot, positions = slots[owner], (lengths - starts)[owner] + row
        if padded:  # padding stands at slot 0, position 0 and sees nothing
            row_slot, positions = row_slot * real, positions * real
        kv_lens = positions + 1
        block, place = positions // self.cache.block_size, positions % self.cache.block_size
        cache_slots = [table[row_slot, block] * self.cache.block_size + place for table in self._tables]
        if padded:
            kv_lens, cache_slots = kv_lens * real, [slots * real for slots in cache_slots]
        anchor_row, logit_rows = starts, row[:num_logits]
        if mixed:
            window_ends = windows.cumsum(0)
            anchor_row = window_ends - windows
            window = xp.searchsorted(window_ends, logit_rows, side="right")
            first = ((starts + context)[:emitting] - anchor_row)[window.clip(max=max(emitting - 1, 0))]
            logit_rows = xp.where(window < emitting, first + logit_rows, 0)
        batch = FlatBatch(
            token_ids=tensor(self._history[row_slot, positions]),
            positions=tensor(positions),
            row_slot=tensor(row_slot),
            kv_lens=tensor(kv_lens),
            cache_slots=tuple(map(tensor, cache_slots)),
            block_tables=self.cache.block_tables,
            qo_indptr=tensor(xp.concatenate([starts[:1], ends])),
            logit_rows=tensor(logit_rows),
        )
        return batch, tensor(anchor_row)

    def _accept(
        self,
        inputs: StepInputs,
        logits: Tensor,
        batch: FlatBatch,
        anchor_row: Tensor,
        requests: Requests,
        draft: Draft,
        widths: Tensor,
        proposal: Proposal,
    ) -> Verdict:
        emitting, drafted = inputs.num_emitting, inputs.num_drafted
        slots, steps = requests.slots, requests.steps
        if not emitting:
            return Verdict(slots.new_zeros(0), slots.new_zeros(0))
        if inputs.flags.greedy:
            return accept_greedy(argmax_rows(logits), anchor_row, draft.tokens, widths[:drafted])
        row_slot, positions = batch.row_slot[batch.logit_rows], batch.positions[batch.logit_rows]
        target_probs = processed(logits, self.state.sampling, inputs.flags, self.state.history, row_slot, positions + 1)
        seeds = self.state.sampling.seed[slots[:emitting]]
        k = torch.arange(self.gamma, device=slots.device)
        return accept_sampled(
            target_probs,
            anchor_row,
            draft.tokens,
            widths[:drafted],
            proposal,
            uniforms(seeds[:drafted].unsqueeze(1), steps[:drafted].unsqueeze(1), Purpose.ACCEPT, k),
            uniforms(seeds, steps, Purpose.EMIT, torch.zeros_like(steps)),
            sample_rows,
        )

    def _commit(self, inputs: StepInputs, requests: Requests, verdict: Verdict) -> None:
        """Set the lengths: the whole of rewinding. The accepted drafts stand in the history already."""
        slots, emitting = requests.slots, inputs.num_emitting
        lengths = requests.lengths + requests.context
        lengths[:emitting] += verdict.accepted + 1
        self.state.lengths.index_copy_(0, slots, lengths)
        self.state.history[slots[:emitting], lengths[:emitting]] = verdict.next_token

    def _logprobs(
        self, flags: SamplingFlags, logits: Tensor, batch: FlatBatch
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The target's own log-probs of the token behind each logit row, before any processing."""
        if flags.logprobs < 0 or not batch.logit_rows.shape[0]:
            return None, None, None
        slots, positions = batch.row_slot[batch.logit_rows], batch.positions[batch.logit_rows]
        emitted = self.state.history[slots, positions + 1]
        log_probs = torch.log_softmax(logits.to(torch.float32), -1)
        chosen = log_probs.gather(-1, emitted.unsqueeze(-1)).squeeze(-1)
        if not flags.logprobs:
            return chosen, None, None
        top = log_probs.topk(flags.logprobs, dim=-1)
        return chosen, top.values, top.indices


def _same(tensor: Tensor) -> Tensor:
    return tensor
