"""The drafter over a DSpark or DFlash network: its context in the paged cache, one block per call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.cache.paged import LayerSpec, PagedCache
from surefoot.drafters.base import BlockwiseSampler, Draft, DraftContext, Drafter, DraftSampler
from surefoot.drafters.config import fit_problems
from surefoot.drafters.copying import Copier, raise_copies
from surefoot.drafters.heads import ConfidenceHead
from surefoot.drafters.locations import find_calibration
from surefoot.drafters.model import DSparkModel
from surefoot.errors import CalibrationError, DrafterError
from surefoot.kernels import native
from surefoot.kernels.attention import paged_attention
from surefoot.kernels.linear import PackedLinear
from surefoot.kernels.sampling import softmax_rows
from surefoot.kernels.sequential import draft_block
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.estimator import ConfidenceSource, HeadConfidence, LogisticEstimator

if TYPE_CHECKING:
    from surefoot.cache.flat_batch import FlatBatch
    from surefoot.targets.target import Target

CERTAIN = 1e-6
"""Probabilities nearer to 0 or 1 than this count as this near, so that log-odds stay finite."""


class DSparkDrafter(Drafter):
    """`Drafter` over a `DSparkModel`: keeps the projected context in the paged cache and drafts one block per call.

    A draft step projects the rows just committed and the block, never the whole context again. The block runs at its
    trained length, because attention inside it is bidirectional and a shorter one is another model; fewer tokens (a smaller
    gamma, or `DraftContext.depth`) are only drawn from it, unless the configuration says that it bears `shorter_blocks`.
    Its keys and values pass through the `block_slots` cache slots from the anchor on, which `extend` overwrites once the
    target has run there.
    """

    def __init__(
        self, model: DSparkModel, gamma: int | None = None, *, origin: str = "", checkpoint: Path | None = None
    ) -> None:
        """
        Args:
            gamma: draft tokens per block, 1 ... `config.gamma` (the default).
            origin: where it came from, for messages.
            checkpoint: the directory it was loaded from, where its calibration may lie.

        Raises:
            DrafterError: gamma is out of range.
        """
        config = model.config
        self.gamma = config.gamma if gamma is None else gamma
        self.origin, self.checkpoint = origin or f"{config.kind} drafter", checkpoint
        if not isinstance(self.gamma, int) or isinstance(self.gamma, bool) or not 1 <= self.gamma <= config.gamma:
            raise DrafterError(
                f"gamma {gamma} for {self.origin}: it was trained for blocks of {config.gamma} draft tokens; "
                f"allowed are 1 to {config.gamma}"
            )
        self.model, self.config, self.name = model, config, config.kind
        self.sharpness: Tensor | None = None  # [gamma] float32; None: every position is drawn as it is
        self.copying: Tensor | None = None  # [longest match + 1] shares of copies by match length; None: no copies
        self.model_gamma = self.gamma
        self.has_confidence_head = config.enable_confidence_head
        self.feature_layers = config.target_layer_ids
        self.block_slots = config.block_size
        self.cache_layers = tuple(
            LayerSpec.attention(config.num_key_value_heads, config.head_dim, config.head_dim, self._cache_window(layer))
            for layer in range(config.num_hidden_layers)
        )

    @property
    def vocabulary(self) -> Tensor | None:  # type: ignore[override]
        return self.model.vocabulary  # which may move

    @property
    def identity(self) -> Mapping[str, Any]:
        return vars(self.config)

    def pack(self) -> None:
        self.model.pack()

    def confidence_source(self, device: torch.device | str, calibration: str | Path | None = None) -> ConfidenceSource:
        """The head, corrected by a calibration, with an estimator that watches it.

        Args:
            calibration: made for this gamma, or for whole blocks; None: the one of the checkpoint, where there is one. The
                drafter draws as it says from now on.
        """
        if calibration is None and self.checkpoint is not None and self.has_confidence_head:
            calibration = find_calibration(self.checkpoint)
        if calibration is None or not self.has_confidence_head:
            return super().confidence_source(device, calibration)
        fitted = self._load_calibration(calibration, device)
        self.draw_by(fitted)
        return HeadConfidence(fitted, LogisticEstimator(self.gamma, device))

    def draw_by(self, calibration: Calibration | None) -> None:
        """Draw as sharply, and copy as much, as a calibration of this gamma says; None: as the network says."""
        self.sharpness = None if calibration is None else calibration.sharpness
        self.copying = None if calibration is None else calibration.copying

    def _load_calibration(self, path: str | Path, device: torch.device | str) -> Calibration:
        """For this gamma: the file's own, or the first positions of a file for whole blocks."""
        try:
            return Calibration.load(path, self.gamma, device)
        except CalibrationError:
            if self.config.gamma == self.gamma:
                raise
        return Calibration.load(path, self.config.gamma, device).first(self.gamma)

    def bind(self, target: Target) -> None:
        """Check the fit and share the target's embedding and head.

        Raises:
            DrafterError: names both sides of every misfit.
        """
        problems = fit_problems(self.config, target.config)
        if problems:
            raise DrafterError(
                f"{self.origin} does not fit {getattr(target, 'name', 'the target')}: {'; '.join(problems)}. "
                "Use the target it was trained for, or train one for this target with 'surefoot train -m TARGET -o DIRECTORY'"
            )
        self.model.share(target)

    @torch.no_grad()
    def extend(self, features: Tensor, batch: FlatBatch, cache: PagedCache) -> None:
        slots = batch.cache_slots[cache.drafter_group]
        rows = self.model.context_key_values(features, batch.positions, self._position_limit(cache))
        for storage, key_value in zip(cache.drafter_kv, rows, strict=True):
            _store(storage, slots, key_value)

    @torch.no_grad()
    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        """Draft gamma tokens after each anchor; `signal` is the log-odds of the likeliest token in the softmax of
        the corrected logits: how far it stands out from all others together, whatever the request's temperature.

        With a calibration (`draw_by`), the draft distribution is mixed with copies and drawn as sharply as it says.
        `confidence_logits` are the head's own.
        """
        anchor = context.history[context.slots, context.lengths]
        depth = self.gamma if context.depth is None else min(context.depth, self.gamma)
        first, confidence_head = self.config.first_slot, self.model.confidence_head
        block = self.block_hidden(context, anchor, first + depth if self.config.shorter_blocks else None)
        # Weights are finite, but float16 overflows: where something became NaN, `BlockSampler.sound` ends the draft.
        hidden = block[:, first : first + depth]
        base = self.model.head_logits(hidden)
        drawn = self._draw_at_once(base, context, anchor, sampler) if isinstance(sampler, BlockwiseSampler) else None
        tokens, largest = drawn or self._draw_by_token(base.to(torch.float32), context, anchor, block, sampler)
        signal = torch.logit(largest, eps=CERTAIN)
        previous = torch.cat([anchor.unsqueeze(1), tokens[:, :-1]], 1)
        scores = None if confidence_head is None else self._scores(confidence_head, hidden, previous)
        lengths, missing = None, self.gamma - depth
        if missing:
            lengths = torch.full_like(anchor, depth)
            tokens, signal = F.pad(tokens, (0, missing)), F.pad(signal, (0, missing))
            scores = None if scores is None else F.pad(scores, (0, missing))
        return Draft(tokens=tokens, lengths=lengths, confidence_logits=scores, signal=signal)

    def _draw_at_once(
        self, base: Tensor, context: DraftContext, anchor: Tensor, sampler: BlockwiseSampler
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens and largest probabilities, [R, gamma] each, in one native call; None where that cannot be."""
        markov, correction = self.model.markov_head, None
        if markov is not None:
            correction = markov.table_and_product
            if correction is None or not native.usable(correction[0]):
                return None
        draw = sampler.block_draw() if native.usable(base) else None
        if draw is None:
            return None
        sharpness = None if draw.temperature is None else self.sharpness
        depth = base.shape[1]
        if draw.uniforms is not None:
            draw = replace(draw, uniforms=draw.uniforms[:, :depth].contiguous())
        sharpness = None if sharpness is None else sharpness[:depth]
        shares, copying = self.copying, None
        if shares is not None:
            copying = (context.history, context.slots, context.lengths, shares, self.model.columns)
        ids, largest, probs = draft_block(
            base, anchor, correction, self.vocabulary, **vars(draw), sharpness=sharpness, copying=copying
        )
        return sampler.take(ids, probs), largest

    def _draw_by_token(
        self, base: Tensor, context: DraftContext, anchor: Tensor, block: Tensor, sampler: DraftSampler
    ) -> tuple[Tensor, Tensor]:
        """Tokens and largest probabilities, [R, gamma] each, position by position."""
        first, markov, sharpness = self.config.first_slot, self.model.markov_head, self.sharpness
        shares = self.copying
        copier = None if shares is None else Copier(context, base.shape[1], len(shares) - 1)
        previous, state = anchor, anchor.new_empty(0)
        if markov is not None:
            start = markov.embed(anchor)
            state = markov.initial_state(start)
            if first:  # a recurrent state is trained through the anchor's slot as well
                _, state = markov.step(start, block[:, 0], state)
        tokens, largest = [], []
        for k in range(base.shape[1]):
            logits = base[:, k]
            if markov is not None:
                latent, state = markov.step(markov.embed(previous), block[:, first + k], state)
                logits = logits + markov.bias(latent)
            if copier is not None and shares is not None:
                copy, match = copier.copies()
                logits = raise_copies(logits, _softmax(logits), self.model.column(copy), shares[match])
            largest.append(_softmax(logits).amax(-1))
            previous = sampler.draw(k + 1, logits) if sharpness is None else sampler.draw(k + 1, logits, sharpness[k])
            tokens.append(previous)
            if copier is not None:
                copier.append(previous)
        return torch.stack(tokens, 1), torch.stack(largest, 1)

    def _scores(self, head: ConfidenceHead, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits of c_k, [R, gamma], from h_k and x_{k-1}."""
        markov, embedded = self.model.markov_head, None
        if markov is not None and self.config.confidence_head_with_markov:
            embedded = markov.embed(previous)
        if isinstance(head.proj, PackedLinear):
            return head(hidden, embedded)
        # torch's products may round a row differently beside another number of rows: gamma must not matter.
        return torch.stack(
            [head(hidden[:, k], None if embedded is None else embedded[:, k]) for k in range(hidden.shape[1])], 1
        )

    def block_hidden(self, context: DraftContext, anchor: Tensor, size: int | None = None) -> Tensor:
        """Hidden states of the first `size` slots of all blocks (default: all that it was trained with), [R, size, d]."""
        cache, size = context.cache, size or self.config.block_size
        assert cache is not None
        table = cache.block_tables[cache.drafter_group]
        capacity = table.shape[1] * cache.block_size
        positions = self.model.block_positions(context.lengths, size)  # [R, size]
        row_slot = context.slots.unsqueeze(1).expand_as(positions).flatten()
        # Slots of the block that a full-length request has no room for go to the scratch block, which nobody reads.
        inside = (positions < capacity).flatten()
        flat = positions.flatten()
        write = torch.where(inside, cache.cache_slots(cache.drafter_group, row_slot, flat.clamp(max=capacity - 1)), 0)
        ends = (context.lengths + size).clamp(max=capacity)
        kv_lens = ends.unsqueeze(1).expand_as(positions).flatten()

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key_cache, value_cache = cache.drafter_kv[index]
            _store((key_cache, value_cache), write, (key, value))

            def run(query: Tensor, row_slot: Tensor, kv_lens: Tensor, window: int | None) -> Tensor:
                return paged_attention(
                    query.to(key_cache.dtype),
                    key_cache,
                    value_cache,
                    table,
                    row_slot,
                    kv_lens,
                    block_size=cache.block_size,
                    scaling=self.config.scaling,
                    window=window,
                ).to(query.dtype)

            window = self.config.window(index)
            if window is None or self.config.sliding_window_non_causal:
                return run(query, row_slot, kv_lens, None if window is None else window + size)
            # Causal inside the block: slot j ends at itself, and its window starts where every other slot's does.
            slots = query.unflatten(0, (-1, size))
            causal = [
                run(slots[:, j], context.slots, (context.lengths + j + 1).clamp(max=capacity), window + j + 1)
                for j in range(size)
            ]
            return torch.stack(causal, 1).flatten(0, 1)

        tokens = self.model.block_tokens(anchor, size).flatten()
        return self.model.backbone(tokens, flat, attend, self._position_limit(cache)).unflatten(0, (-1, size))

    def _position_limit(self, cache: PagedCache) -> int:
        """Above every position that a row or a slot of a block can have."""
        return cache.block_tables[cache.drafter_group].shape[1] * cache.block_size + self.config.block_size

    def _cache_window(self, layer: int) -> int | None:
        window = self.config.window(layer)
        return None if window is None else window + self.block_slots


def _store(storage: tuple[Tensor, ...], slots: Tensor, key_value: tuple[Tensor, Tensor]) -> None:
    for kept, new in zip(storage, key_value, strict=True):
        kept.index_copy_(0, slots, new.to(kept.dtype))


def _softmax(logits: Tensor) -> Tensor:
    """[R, V] float32 -> [R, V]."""
    return softmax_rows(logits) if native.usable(logits) else logits.softmax(-1)
