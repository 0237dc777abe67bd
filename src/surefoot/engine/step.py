"""One decode step, as the data flows: draft, allocate, pack, verify, accept, commit.

Everything here runs on the device's time line from host-known sizes (how many requests, how many rows) and device-known data
(lengths, tokens, widths). Nothing reads a device value back, except where reading is free (a CPU) and saves padding rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import Draft, DraftContext, Drafter
from surefoot.engine.clock import Laps, ignore
from surefoot.engine.distribution import BlockSampler, DraftVocabulary, processed
from surefoot.engine.graphs import TargetRunner
from surefoot.engine.layout import check_layout
from surefoot.engine.logprobs import LogitRows, target_logprobs
from surefoot.engine.messages import StepInputs, StepOutputs, StepRequests
from surefoot.engine.packing import pack
from surefoot.engine.state import DeviceState, to_device
from surefoot.kernels.sampling import argmax_rows, sample_rows
from surefoot.speculation.acceptance import Proposal, Verdict, accept_greedy, accept_sampled
from surefoot.speculation.allocation import allocate
from surefoot.speculation.estimator import ConfidenceSource
from surefoot.speculation.survival import prefix_survival
from surefoot.speculation.uniforms import Purpose, uniforms


class DecodeStep:
    """The step of one engine: which target, which drafter, which cache, which state.

    Args:
        confidence: what makes confidences of a draft (None: every draft counts as certain).
        check_layout: compare the packed rows with the requests in every step; reads the device.
        reads_are_free: whether a step may look at its own values.
    """

    def __init__(
        self,
        runner: TargetRunner,
        drafter: Drafter | None,
        cache: PagedCache,
        state: DeviceState,
        confidence: ConfidenceSource | None,
        gamma: int,
        *,
        check_layout: bool = False,
        reads_are_free: bool = True,
    ) -> None:
        self.runner, self.drafter, self.cache, self.state = runner, drafter, cache, state
        self.confidence, self.gamma = confidence, gamma
        self.check_layout, self.reads_are_free = check_layout, reads_are_free
        self.sources = drafter.sources if drafter else ()
        self.vocabulary = DraftVocabulary.of(drafter.vocabulary if drafter else None)
        # Where the host may write to the tables, the same memory as arrays: that takes a fifth of the time.
        self._tables = [table.numpy() if reads_are_free else table for table in cache.block_tables]
        self.laps: Callable[[], Laps] | None = None  # starts the clock of a step; None: nobody watches

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs) -> StepOutputs:
        laps = self.laps() if self.laps is not None else None
        lap = laps or ignore
        self.state.apply(inputs.updates, self._tables)
        requests = StepRequests.of(inputs, self.state)
        lap("update")
        draft, proposal = self._draft(inputs, requests)
        lap("draft")
        confidence = self._confidence(draft, inputs.plan.explored)
        widths = self._allocate(inputs, requests, draft, confidence)
        lap("plan")
        batch, anchor_row = self._pack(inputs, requests, widths)
        lap("pack")
        output = self.runner.run(batch, self.cache, self.drafter.feature_layers if self.drafter else ())
        lap("target")
        rows, prompt = LogitRows.split(batch, output.logits, inputs.prompt_rows)
        verdict = self._accept(inputs, requests, rows, anchor_row, draft, widths, proposal)
        self._commit(inputs, requests, verdict)
        lap("accept")
        if self.drafter is not None and output.features is not None:
            self.drafter.extend(output.features, batch, self.cache)
        lap("extend")
        return StepOutputs(
            draft,
            widths[: inputs.num_drafting],
            verdict,
            confidence,
            target_logprobs(inputs.flags.logprobs, rows, self.state.history),
            target_logprobs(inputs.prompt_likeliest, prompt, self.state.history),
            self.sources,
            batch.num_rows,
            self.runner.replayed,
            laps,
        )

    def _draft(self, inputs: StepInputs, requests: StepRequests) -> tuple[Draft, Proposal]:
        """A block for each of the first D requests, written after their anchors, and what it was drawn from."""
        drafting = inputs.num_drafting
        slots, lengths, history = requests.slots[:drafting], requests.lengths[:drafting], self.state.history
        sampling, flags, steps = self.state.sampling, inputs.flags, requests.steps[:drafting]
        if self.drafter is None or not drafting:
            return Draft(slots.new_zeros(0, self.gamma), point_mass=True), Proposal(None)
        sampler = BlockSampler(sampling, flags, history, slots, lengths, steps, self.gamma, self.vocabulary)
        longest, depth, predictions = inputs.max_length, inputs.plan.depth, self.state.predictions
        context = DraftContext(slots, lengths, history, self.cache, longest, depth, predictions)
        temperature = sampler.temperatures()
        draft = replace(self.drafter.propose(context, sampler), temperature=temperature)
        draft = draft if draft.point_mass else sampler.sound(draft)
        if not draft.point_mass and draft.drawn is None:
            return draft, sampler.proposal  # the sampler has written the tokens
        frontier = lengths.unsqueeze(1) + torch.arange(1, self.gamma + 1, device=slots.device)
        history[slots.unsqueeze(1), frontier] = draft.tokens
        return draft, Proposal(None) if draft.point_mass else replace(sampler.proposal, rows=draft.drawn)

    def _confidence(self, draft: Draft, explored: int) -> Tensor | None:
        if self.confidence is None or not draft.tokens.shape[0]:
            return None
        if self.reads_are_free and draft.lengths is not None and not draft.lengths.numpy().any():
            return None  # nothing was proposed
        return self.confidence.confidence(draft.evidence, explored).nan_to_num(0.0)

    def _allocate(self, inputs: StepInputs, requests: StepRequests, draft: Draft, confidence: Tensor | None) -> Tensor:
        """Widths of the emitting requests, [E] int64; requests without a draft get 0."""
        plan, limits, others = inputs.plan, requests.limits, inputs.num_emitting - inputs.num_drafting
        if not inputs.num_drafting:
            return limits.new_zeros(others)
        if draft.lengths is not None:
            limits = torch.minimum(limits, draft.lengths)
        if plan.widths is not None:
            widths = torch.minimum(to_device(plan.widths, torch.int64, limits.device), limits)
        else:
            if confidence is None:
                confidence = torch.ones(inputs.num_drafting, self.gamma, device=limits.device)
            survival = prefix_survival(confidence)
            decision = None if plan.decide is None else plan.decide(survival, limits)
            if decision is not None and decision.widths is not None:
                widths = to_device(decision.widths, torch.int64, limits.device)
            else:
                budget = plan.budget if decision is None else decision.budget
                widths = allocate(survival, budget, limits, plan.min_width)
        return torch.cat([widths, widths.new_zeros(others)]) if others else widths

    def _pack(self, inputs: StepInputs, requests: StepRequests, widths: Tensor) -> tuple[FlatBatch, Tensor]:
        """The flat batch, and the logit row of every emitting request's anchor ([E] int64)."""
        bucket, free = self.runner.bucket, self.reads_are_free
        batch, anchor_row = pack(inputs, requests, widths, self.state.history, self.cache, bucket, reads_are_free=free)
        if self.check_layout:
            check_layout(inputs, self.state, self.cache, batch, widths, anchor_row)
        return batch, anchor_row

    def _accept(
        self,
        inputs: StepInputs,
        requests: StepRequests,
        rows: LogitRows,
        anchor_row: Tensor,
        draft: Draft,
        widths: Tensor,
        proposal: Proposal,
    ) -> Verdict:
        emitting, drafting = inputs.num_emitting, inputs.num_drafting
        slots, steps = requests.slots[:emitting], requests.steps
        if not emitting:
            return Verdict.of(steps, steps)
        if inputs.flags.greedy:
            return accept_greedy(argmax_rows(rows.logits), anchor_row, draft.tokens, widths[:drafting])
        sampling, history = self.state.sampling, self.state.history
        target_probs = processed(rows.logits, sampling, inputs.flags, history, rows.slots, rows.positions + 1)
        seeds, k = sampling.seed[slots], torch.arange(self.gamma, device=slots.device)
        return accept_sampled(
            target_probs,
            anchor_row,
            draft.tokens,
            widths[:drafting],
            proposal,
            uniforms(seeds[:drafting].unsqueeze(1), steps[:drafting].unsqueeze(1), Purpose.ACCEPT, k),
            uniforms(seeds, steps, Purpose.EMIT, torch.zeros_like(steps)),
            sample_rows,
        )

    def _commit(self, inputs: StepInputs, requests: StepRequests, verdict: Verdict) -> None:
        """Set the lengths: the whole of rewinding. The accepted drafts stand in the history already."""
        slots, emitting = requests.slots, inputs.num_emitting
        lengths = requests.lengths + requests.context
        lengths[:emitting] += verdict.accepted + 1
        if self.cache.states is not None:
            self.cache.states.commit(slots, lengths)
        self.state.lengths.index_copy_(0, slots, lengths)
        self.state.history[slots[:emitting], lengths[:emitting]] = verdict.next_token
