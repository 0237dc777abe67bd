"""From logits to the distribution a request samples from: the same processing for the target's p and the drafter's q.

Order: repetition, presence and frequency penalties; logit bias; temperature; top-k; top-p; min-p. A row sees the history in
front of *its own* position, so drafts inside a block count for the drafts behind them. Temperature 0 is a point mass on the
first largest logit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.drafters.base import BlockDraw
from surefoot.kernels import native
from surefoot.kernels.sampling import argmax_rows, sample_rows, softmax_rows
from surefoot.kernels.sequential import filter_rows
from surefoot.sampling import SamplingParams
from surefoot.speculation.acceptance import Proposal
from surefoot.speculation.uniforms import Purpose, uniforms

NUCLEUS_CANDIDATES = (
    1024  # top-p looks at these largest probabilities first; sorting a whole vocabulary costs milliseconds
)


class SamplingFlags(NamedTuple):
    """Which stages any request of the step needs; known on the host, so that unused stages cost nothing."""

    greedy: bool = True  # every request is greedy and unpenalised: argmax is all that is needed
    penalties: bool = False
    bias: bool = False
    top_k: int = 0  # the largest top_k of the batch; 0 = off everywhere
    top_p: bool = False
    min_p: bool = False
    logprobs: int = -1  # the largest number of top log-probs wanted; -1 = none
    reads_are_free: bool = True  # whether the device's values may be looked at on the way

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingFlags:
        """What one request needs."""
        bias = bool(params.logit_bias)
        return cls(
            greedy=params.greedy and not params.penalized and not bias,
            penalties=params.penalized,
            bias=bias,
            top_k=params.top_k,
            top_p=params.top_p < 1,
            min_p=params.min_p > 0,
            logprobs=-1 if params.logprobs is None else params.logprobs,
        )

    @classmethod
    def union(cls, flags: Iterable[SamplingFlags], reads_are_free: bool = True) -> SamplingFlags:
        """What all of these requests need between them."""
        distinct = set(flags) or {cls()}
        if len(distinct) == 1:  # as a rule
            return distinct.pop()._replace(reads_are_free=reads_are_free)
        greedy, penalties, bias, top_k, top_p, min_p, logprobs, _ = zip(*distinct, strict=True)
        return cls(
            greedy=all(greedy),
            penalties=any(penalties),
            bias=any(bias),
            top_k=max(top_k),
            top_p=any(top_p),
            min_p=any(min_p),
            logprobs=max(logprobs),
            reads_are_free=reads_are_free,
        )


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters by state slot, on the device."""

    temperature: Tensor  # [S] float32
    top_k: Tensor  # [S] int64, 0 = off
    top_p: Tensor  # [S] float32, 1 = off
    min_p: Tensor  # [S] float32, 0 = off
    repetition: Tensor  # [S] float32, 1 = off
    presence: Tensor  # [S] float32
    frequency: Tensor  # [S] float32
    prompt_len: Tensor  # [S] int64; presence and frequency count output tokens only
    seed: Tensor  # [S] int64
    bias_ids: Tensor  # [S, B] int64 target ids
    bias_values: Tensor  # [S, B] float32, 0 where unused


def _penalised(
    logits: Tensor, params: SamplingTensors, history: Tensor, slots: Tensor, seen: Tensor, vocab_size: int
) -> Tensor:
    """Penalties from history[s, :seen]: logits [N, V], slots [N], seen [N]."""
    tokens = history[slots]  # [N, L]
    at = torch.arange(tokens.shape[1], device=tokens.device)
    visible = at < seen.unsqueeze(1)
    output = visible & (at >= params.prompt_len[slots].unsqueeze(1))
    tokens = tokens.clamp(0, vocab_size - 1)
    counts = logits.new_zeros(logits.shape[0], vocab_size)
    present = counts.scatter_add(1, tokens, visible.to(counts.dtype)) > 0
    counts = counts.scatter_add(1, tokens, output.to(counts.dtype))
    repetition = params.repetition[slots].unsqueeze(1)
    logits = torch.where(present, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - counts * params.frequency[slots].unsqueeze(1)
    return logits - (counts > 0) * params.presence[slots].unsqueeze(1)


def _nucleus_threshold(probs: Tensor, top_p: Tensor, reads_are_free: bool) -> Tensor:
    """Smallest probability kept by top-p: [N, V], [N] -> [N, 1]. The kept set is the smallest whose mass reaches top_p."""
    size = probs.shape[-1]
    count = min(NUCLEUS_CANDIDATES, size)
    ordered = probs.topk(count, dim=-1).values
    # The candidates suffice when they hold the mass; checking that takes a host read.
    if count < size and (not reads_are_free or bool((ordered.sum(-1) < top_p).any())):
        ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered  # mass in front of each candidate
    kept = (before < top_p.unsqueeze(1)) | (torch.arange(ordered.shape[1], device=probs.device) == 0)
    return ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)


def processed(
    logits: Tensor,
    params: SamplingTensors,
    flags: SamplingFlags,
    history: Tensor,
    slots: Tensor,
    seen: Tensor,
    vocabulary: Tensor | None = None,
    target_size: int | None = None,
    sharpness: Tensor | None = None,
) -> Tensor:
    """Distribution each row is sampled from.

    Args:
        logits: [N, V] float32 (V is the draft vocabulary when `vocabulary` is given).
        params: sampling parameters by state slot.
        flags: stages that are needed.
        history: [S, L] int64 token history.
        slots: [N] int64, state slot of each row.
        seen: [N] int64, tokens of the history in front of the token to be drawn.
        vocabulary: [V] int64 target id of each column (None: identity).
        target_size: target ids in `vocabulary` are below this; needed with it.
        sharpness: [] float32 > 0, divides the temperature (None: 1).

    Returns:
        [N, V] float32, rows sum to 1.
    """
    if flags.penalties or flags.bias:
        logits = logits.to(torch.float32)
    if flags.penalties:
        if vocabulary is None:
            logits = _penalised(logits, params, history, slots, seen, logits.shape[1])
        else:  # work in target ids, where the history lives
            assert target_size is not None
            wide = logits.new_zeros(logits.shape[0], target_size)
            wide[:, vocabulary] = logits
            logits = _penalised(wide, params, history, slots, seen, wide.shape[1])[:, vocabulary]
    if flags.bias:
        ids, values = params.bias_ids[slots], params.bias_values[slots]  # [N, B]
        if vocabulary is None:
            logits = logits.scatter_add(1, ids, values)
        else:
            assert target_size is not None
            logits = logits + logits.new_zeros(logits.shape[0], target_size).scatter_add(1, ids, values)[:, vocabulary]
    temperature = params.temperature[slots]
    probs = softmax_rows(logits, temperature if sharpness is None else temperature / sharpness)
    if (flags.top_k or flags.top_p or flags.min_p) and native.usable(probs):
        return filter_rows(
            probs,
            params.top_k[slots] if flags.top_k else None,
            params.top_p[slots] if flags.top_p else None,
            params.min_p[slots] if flags.min_p else None,
        )
    if flags.top_k:
        k = params.top_k[slots]
        ordered = probs.topk(min(flags.top_k, probs.shape[-1]), dim=-1).values
        threshold = ordered.gather(-1, (k - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(1))
        probs = torch.where((probs >= threshold) | (k <= 0).unsqueeze(1), probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if flags.top_p:
        top_p = params.top_p[slots]
        threshold = _nucleus_threshold(probs, top_p, flags.reads_are_free)
        probs = torch.where((probs >= threshold) | (top_p >= 1).unsqueeze(1), probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if flags.min_p:
        floor = probs.amax(-1, keepdim=True) * params.min_p[slots].unsqueeze(1)
        probs = torch.where(probs >= floor, probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs  # a point mass passes every filter unchanged


class BlockSampler:
    """Draws a block left to right and keeps the distributions it drew from: the engine's `DraftSampler`.

    x_k is written into the frontier of the history as soon as it is drawn, so that penalties of position k + 1 see it.
    """

    def __init__(
        self,
        params: SamplingTensors,
        flags: SamplingFlags,
        history: Tensor,
        slots: Tensor,
        lengths: Tensor,
        steps: Tensor,
        gamma: int,
        vocabulary: Tensor | None,
        target_size: int | None = None,
    ) -> None:
        self._params, self._flags, self._history = params, flags, history
        self._slots, self._lengths, self._steps = slots, lengths, steps
        self._gamma, self._vocabulary, self._target_size = gamma, vocabulary, target_size
        self._probs: Tensor | None = None  # [R, gamma, V_draft]
        self._draft_ids = slots.new_zeros(slots.shape[0], gamma)

    def only(self, rows: Tensor) -> None:
        self._slots, self._lengths, self._steps = self._slots[rows], self._lengths[rows], self._steps[rows]
        self._draft_ids = self._draft_ids[rows]

    def temperatures(self) -> Tensor | None:
        return None if self._flags.greedy else self._params.temperature[self._slots]

    def draw(self, k: int, logits: Tensor, sharpness: Tensor | None = None) -> Tensor:
        if self._flags.greedy:
            index = argmax_rows(logits)
        else:
            seen = self._lengths + k
            probs = processed(
                logits,
                self._params,
                self._flags,
                self._history,
                self._slots,
                seen,
                vocabulary=self._vocabulary,
                target_size=self._target_size,
                sharpness=sharpness,
            )
            if self._probs is None:
                self._probs = probs.new_zeros(probs.shape[0], self._gamma, probs.shape[1])
            self._probs[:, k - 1] = probs
            u = uniforms(self._params.seed[self._slots], self._steps, Purpose.DRAFT, torch.full_like(self._slots, k))
            index = sample_rows(self._probs[:, k - 1], u)
        self._draft_ids[:, k - 1] = index
        token = index if self._vocabulary is None else self._vocabulary[index]
        self._history[self._slots, self._lengths + k] = token
        return token

    def block_draw(self) -> BlockDraw | None:
        """What `draw` would draw with, for the whole block at once; None where x_k's processing looks at x_<k."""
        flags, params, slots = self._flags, self._params, self._slots
        if flags.penalties or flags.bias:
            return None
        if flags.greedy:
            return BlockDraw()
        k = torch.arange(1, self._gamma + 1, device=slots.device)
        return BlockDraw(
            params.temperature[slots],
            uniforms(params.seed[slots].unsqueeze(1), self._steps.unsqueeze(1), Purpose.DRAFT, k),
            params.top_k[slots] if flags.top_k else None,
            params.top_p[slots] if flags.top_p else None,
            params.min_p[slots] if flags.min_p else None,
        )

    def take(self, draft_ids: Tensor, probs: Tensor | None) -> Tensor:
        count = draft_ids.shape[1]
        missing = self._gamma - count  # of a drafter with a shorter block than this sampler's
        self._draft_ids = torch.nn.functional.pad(draft_ids, (0, missing))
        self._probs = probs if probs is None or not missing else torch.nn.functional.pad(probs, (0, 0, 0, missing))
        tokens = draft_ids if self._vocabulary is None else self._vocabulary[draft_ids]
        frontier = self._lengths.unsqueeze(1) + torch.arange(1, count + 1, device=draft_ids.device)
        self._history[self._slots.unsqueeze(1), frontier] = tokens
        return tokens

    @property
    def proposal(self) -> Proposal:
        """What the block was drawn from; the acceptance divides by this very tensor."""
        return Proposal(self._probs, self._vocabulary, self._draft_ids)
