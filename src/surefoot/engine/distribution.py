"""From logits to the distribution a request samples from: the same processing for the target's p and the drafter's q.

Order: repetition, presence and frequency penalties; logit bias; masks (end tokens before `min_tokens`, then the request's own
`TokenMask`); temperature; top-k; top-p; min-p. A row sees the history before *its own* position, so drafts inside a block count
for the drafts after them. Temperature 0 is a point mass on the first largest logit. A row whose logits hold NaN or infinity, or
allow no token, has no mass at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.drafters.base import BlockDraw, Draft
from surefoot.engine.masks import TokenMask, masked
from surefoot.kernels.sampling import argmax_rows, filter_rows, sample_rows, softmax_rows
from surefoot.sampling import SamplingParams
from surefoot.speculation.acceptance import Proposal, leading_ones
from surefoot.speculation.uniforms import Purpose, uniforms


class SamplingFlags(NamedTuple):
    """Which stages any request of the step needs; known on the host, so that unused stages cost nothing."""

    greedy: bool = True  # every request takes the argmax of the logits as they are
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False  # end tokens are masked for now
    masked: bool = False  # a request has a `TokenMask`
    top_k: int = 0  # the largest top_k of the batch; 0 = off everywhere
    top_p: bool = False
    min_p: bool = False
    logprobs: int = -1  # the largest number of top log-probs wanted; -1 = none
    reads_are_free: bool = True  # whether the device's values may be looked at on the way

    @classmethod
    def of(cls, params: SamplingParams, *, min_tokens: bool = False, masked: bool = False) -> SamplingFlags:
        """What one request needs; `min_tokens` while it has emitted fewer, `masked` with a mask of its own."""
        bias = bool(params.logit_bias)
        return cls(
            greedy=params.greedy and not (params.penalized or bias or min_tokens or masked),
            penalties=params.penalized,
            bias=bias,
            min_tokens=min_tokens,
            masked=masked,
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
        greedy, penalties, bias, min_tokens, masked, top_k, top_p, min_p, logprobs, _ = zip(*distinct, strict=True)
        return cls(
            greedy=all(greedy),
            penalties=any(penalties),
            bias=any(bias),
            min_tokens=any(min_tokens),
            masked=any(masked),
            top_k=max(top_k),
            top_p=any(top_p),
            min_p=any(min_p),
            logprobs=max(logprobs),
            reads_are_free=reads_are_free,
        )

    @property
    def follows_the_text(self) -> bool:
        """Whether the processing of x_k depends on x_<k or on its position, beyond what the model made of them."""
        return self.penalties or self.min_tokens or self.masked


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
    prompt_len: Tensor  # [S] int64; presence, frequency and masks look at output tokens only
    seed: Tensor  # [S] int64, the stream of uniforms
    bias_ids: Tensor  # [S, B] int64 target ids
    bias_values: Tensor  # [S, B] float32, 0 where unused
    min_tokens: Tensor  # [S] int64, output tokens before any of `end_ids`
    end_ids: Tensor  # [S, N] int64 target ids
    end_values: Tensor  # [S, N] float32, -inf; 0 where unused
    masks: dict[int, TokenMask] = field(default_factory=dict)  # by slot, on the host


class DraftVocabulary(NamedTuple):
    """The columns of a drafter that knows a part of the target's tokens only."""

    ids: Tensor  # [V_draft] int64, target id of each column
    end: int  # all of them are below this

    @classmethod
    def of(cls, ids: Tensor | None) -> DraftVocabulary | None:
        return None if ids is None else cls(ids, int(ids.max()) + 1)


def _by_column(ids: Tensor, values: Tensor, columns: int, vocabulary: DraftVocabulary | None) -> Tensor:
    """Sums of values by target id, as columns of the logits: ids and values [N, n] -> [N, columns].

    Target ids that no column stands for are summed where nobody looks.
    """
    end = columns if vocabulary is None else vocabulary.end
    sums = values.new_zeros(ids.shape[0], end + 1).scatter_add(1, ids.clamp(max=end), values)
    return sums[:, :end] if vocabulary is None else sums[:, vocabulary.ids]


def _penalised(
    logits: Tensor,
    params: SamplingTensors,
    history: Tensor,
    slots: Tensor,
    seen: Tensor,
    vocabulary: DraftVocabulary | None,
) -> Tensor:
    """Penalties from history[s, :seen]: logits [N, V] float32, slots [N], seen [N]."""
    tokens, columns = history[slots], logits.shape[1]  # [N, L]
    at = torch.arange(tokens.shape[1], device=tokens.device)
    visible = at < seen.unsqueeze(1)
    output = visible & (at >= params.prompt_len[slots].unsqueeze(1))
    present = _by_column(tokens, visible.to(logits.dtype), columns, vocabulary) > 0
    counts = _by_column(tokens, output.to(logits.dtype), columns, vocabulary)
    repetition = params.repetition[slots].unsqueeze(1)
    logits = torch.where(present, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - counts * params.frequency[slots].unsqueeze(1)
    return logits - (counts > 0) * params.presence[slots].unsqueeze(1)


def processed(
    logits: Tensor,
    params: SamplingTensors,
    flags: SamplingFlags,
    history: Tensor,
    slots: Tensor,
    seen: Tensor,
    vocabulary: DraftVocabulary | None = None,
    sharpness: Tensor | None = None,
) -> Tensor:
    """Distribution each row is sampled from.

    Args:
        logits: [N, V] floating (V is the draft vocabulary when `vocabulary` is given).
        params: sampling parameters by state slot.
        flags: stages that are needed.
        history: [S, L] int64 token history.
        slots: [N] int64, state slot of each row.
        seen: [N] int64, tokens of the history before the token to be drawn.
        vocabulary: which tokens the columns stand for (None: those of the target).
        sharpness: [] float32 > 0, divides the temperature (None: 1).

    Returns:
        [N, V] float32, rows sum to 1; all zeros for a row whose logits hold NaN or infinity, or allow no token.
    """
    columns = logits.shape[1]
    if flags.penalties or flags.bias or flags.min_tokens or flags.masked:
        logits = logits.to(torch.float32)
    if flags.penalties:
        logits = _penalised(logits, params, history, slots, seen, vocabulary)
    if flags.bias:
        logits = logits + _by_column(params.bias_ids[slots], params.bias_values[slots], columns, vocabulary)
    if flags.min_tokens:
        early = (seen - params.prompt_len[slots] < params.min_tokens[slots]).unsqueeze(1)
        ends = torch.where(early, params.end_values[slots], 0.0)
        logits = logits + _by_column(params.end_ids[slots], ends, columns, vocabulary)
    if flags.masked:
        ids = None if vocabulary is None else vocabulary.ids
        logits = masked(logits, params.masks, history, slots, params.prompt_len[slots], seen, ids)
    temperature = params.temperature[slots]
    probs = softmax_rows(logits, temperature if sharpness is None else temperature / sharpness)
    if not (flags.top_k or flags.top_p or flags.min_p):
        return probs
    return filter_rows(  # a point mass passes unchanged
        probs,
        params.top_k[slots] if flags.top_k else None,
        params.top_p[slots] if flags.top_p else None,
        params.min_p[slots] if flags.min_p else None,
        largest_k=flags.top_k,
        reads_are_free=flags.reads_are_free,
    )


class BlockSampler:
    """Draws a block left to right and keeps the distributions it drew from: the engine's `DraftSampler`.

    x_k is written into the frontier of the history as soon as it is drawn, so that the processing of position k + 1 sees it.
    A position whose logits hold NaN or infinity, or allow no token, is drawn from nothing: some token stands there, and `sound`
    ends the proposal before it.
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
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self._params, self._flags, self._history = params, flags, history
        self._slots, self._lengths, self._steps = slots, lengths, steps
        self._gamma, self._vocabulary = gamma, vocabulary
        self._probs: Tensor | None = None  # [R, gamma, V_draft]
        self._draft_ids = slots.new_zeros(slots.shape[0], gamma)  # -1 where there was nothing to draw from

    def only(self, rows: Tensor) -> None:
        self._slots, self._lengths, self._steps = self._slots[rows], self._lengths[rows], self._steps[rows]
        self._draft_ids = self._draft_ids[rows]

    def temperatures(self) -> Tensor | None:
        return None if self._flags.greedy else self._params.temperature[self._slots]

    def draw(self, k: int, logits: Tensor, sharpness: Tensor | None = None) -> Tensor:
        if self._flags.greedy:
            index = argmax_rows(logits)
        else:
            probs = processed(
                logits,
                self._params,
                self._flags,
                self._history,
                self._slots,
                self._lengths + k,
                self._vocabulary,
                sharpness,
            )
            if self._probs is None:
                self._probs = probs.new_zeros(probs.shape[0], self._gamma, probs.shape[1])
            self._probs[:, k - 1] = probs
            u = uniforms(self._params.seed[self._slots], self._steps, Purpose.DRAFT, torch.full_like(self._slots, k))
            index = sample_rows(self._probs[:, k - 1], u)
        self._draft_ids[:, k - 1] = index
        token = self._tokens(index)
        self._history[self._slots, self._lengths + k] = token
        return token

    def block_draw(self) -> BlockDraw | None:
        """What `draw` would draw with, for the whole block at once; None where x_k's processing looks at x_<k."""
        flags, params, slots = self._flags, self._params, self._slots
        if flags.follows_the_text or flags.bias:
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
        tokens = self._tokens(draft_ids)
        frontier = self._lengths.unsqueeze(1) + torch.arange(1, count + 1, device=draft_ids.device)
        self._history[self._slots.unsqueeze(1), frontier] = tokens
        return tokens

    def _tokens(self, draft_ids: Tensor) -> Tensor:
        index = draft_ids.clamp(min=0)
        return index if self._vocabulary is None else self._vocabulary.ids[index]

    def sound(self, draft: Draft) -> Draft:
        """The draft up to the first position that was drawn from nothing or whose confidence is NaN.

        Both depend on x_<k alone, so ending there is no choice by x_k. What a drafter gets wrong costs speed, nothing else.
        """
        sound = self._draft_ids >= 0
        if draft.drawn is not None:  # others than these were drawn by no distribution
            sound = sound[draft.drawn.clamp(min=0)]
        for evidence in (draft.confidence_logits, draft.signal):
            if evidence is not None:
                sound = sound & ~evidence.isnan()
        if draft.drawn is not None:
            sound = sound | (draft.drawn < 0).unsqueeze(1)
        if self._flags.reads_are_free and bool(sound.all()):
            return draft
        lengths = leading_ones(sound)
        return replace(draft, lengths=lengths if draft.lengths is None else torch.minimum(lengths, draft.lengths))

    @property
    def proposal(self) -> Proposal:
        """What the block was drawn from; the acceptance divides by this very tensor."""
        ids = None if self._vocabulary is None else self._vocabulary.ids
        return Proposal(self._probs, ids, self._draft_ids.clamp(min=0))
