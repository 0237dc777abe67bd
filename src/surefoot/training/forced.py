"""Teacher-forced drafting: the acceptance probability of a drafter's blocks at every position of a known text.

The law of text written by speculative decoding does not depend on the drafter. The text can therefore be generated first
and the drafter evaluated on it: given the text, position k of a block whose earlier tokens were accepted is accepted with
probability min(1, q(x) / p(x)), x being the token of the text; text and acceptance have the same joint law as in the real
loop. One target pass over a text gives a block at every position, with acceptance probabilities instead of outcomes, for
any number of ways to draw. `TextBlocks.visits` is the probability that the loop drafts at a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import DraftContext
from surefoot.drafters.copying import Copier, fit_shares
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.kernels.sampling import softmax_rows
from surefoot.targets.target import Target
from surefoot.training.progress import StageProgress

Floats = npt.NDArray[np.float64]
SHARPNESS = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5)
_BLOCK = 16
_LARGEST = 2**26  # target probabilities held at a time: 0.25 GiB in float32


@dataclass(frozen=True)
class WrittenText:
    """A prompt and the target's continuation of it, sampled at `temperature`."""

    tokens: tuple[int, ...]
    start: int  # tokens of the prompt
    temperature: float


@dataclass(frozen=True)
class TextBlocks:
    """N blocks along texts, grouped by text and in order; position k is conditioned on the text's own x_<k."""

    text: npt.NDArray[np.int64]  # [N]
    temperature: Floats  # [N]
    logits: Floats  # [N, gamma] of the confidence head, uncalibrated
    signal: Floats  # [N, gamma]
    chance: Floats  # [N, gamma, S] that the text's token is drafted and accepted, by sharpness; 0 past the text
    overlap: Floats  # [N, gamma, S] sum of min(p, q): the same before the token is known; 0 past the text
    known: npt.NDArray[np.bool_]  # [N, gamma] whether the text reaches the position
    own: Floats  # [N, gamma] the draft probability of the text's token at temperature 1 and sharpness 1
    match: npt.NDArray[np.int64]  # [N, gamma] length of the match whose copy is in the draft vocabulary; 0: none
    copied: npt.NDArray[np.bool_]  # [N, gamma] whether the copy is the text's token
    sharpness: tuple[float, ...]  # [S]

    def visits(self, chance: Floats) -> Floats:
        """[N] probability that the loop drafts at a block, if positions are accepted with probability `chance` [N, gamma]."""
        gamma, found = chance.shape[1], np.zeros(len(self.text))
        for first, last in _runs(self.text):
            met = np.zeros(last - first + gamma + 1)
            met[0] = 1.0
            for row in range(first, last):
                at = row - first
                alive = found[row] = met[at]
                for k in range(gamma):
                    met[at + k + 1] += alive * (1 - chance[row, k])
                    alive *= chance[row, k]
                met[at + gamma + 1 if at + gamma + 1 < len(met) else -1] += alive
        return found

    def shares(self) -> list[float]:
        """Share of the draft distribution for copies, by match length, fitted on blocks drafted without copying."""
        return fit_shares(self.match[self.known], self.copied[self.known], self.own[self.known])

    def met(self, chance: Floats, generator: np.random.Generator) -> tuple[npt.NDArray[np.int64], ...]:
        """Simulate the loop once: indices of the blocks it drafts at, their accepted and their known positions, [M] each."""
        rows, accepted, known = [], [], self.known.sum(1)
        for first, last in _runs(self.text):
            row = first
            while row < last:
                rows.append(row)
                passed = generator.random(known[row]) < chance[row, : known[row]]
                accepted.append(int(passed.cumprod().sum()))
                row += accepted[-1] + 1
        return np.array(rows), np.array(accepted), known[rows]

    def reached(self, chance: Floats) -> Floats:
        """[N, gamma] probability that the loop drafts at a block and accepts all positions before k; 0 if unknown."""
        return self.visits(chance)[:, None] * _before(chance) * self.known


def choose_sharpness(blocks: TextBlocks) -> int:
    """Index into `blocks.sharpness` with the longest expected accepted length at temperatures above 0.

    One sharpness for all positions: one per position gains nothing on held-out texts. 1 if nothing was sampled.
    """
    sampled = blocks.temperature > 0
    if not sampled.any():
        return blocks.sharpness.index(1.0)

    def accepted_length(level: int) -> float:
        chance, overlap = blocks.chance[:, :, level], blocks.overlap[:, :, level]
        visits = blocks.visits(chance) * sampled * blocks.known.all(1)
        return float((visits[:, None] * _before(chance) * overlap).sum() / max(visits.sum(), 1e-9))

    return max(range(len(blocks.sharpness)), key=accepted_length)


def _before(chance: Floats) -> Floats:
    """Probability that all positions before k are accepted: [N, gamma] -> [N, gamma]."""
    padded: Floats = np.pad(chance, ((0, 0), (1, 0)), constant_values=1.0)
    return np.cumprod(padded, 1, dtype=np.float64)[:, :-1]


def _runs(text: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(text, prepend=-1, append=-1))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


class _Follower:
    """A sampler that draws the text's own tokens and records their acceptance probability under free drawing."""

    def __init__(
        self, tokens: Tensor, columns: Tensor, probs: Tensor, temperature: Tensor, sharpness: Sequence[float]
    ) -> None:
        """
        Args:
            tokens: [R, gamma] of the text.
            columns: [R, gamma] their draft ids; -1 outside the draft vocabulary.
            probs: [R, gamma, V_draft] of the target, over the draft vocabulary.
            temperature: [R].
        """
        self.tokens, self.probs, self.temperature, self.sharpness = tokens, probs, temperature, sharpness
        self.columns, self.inside = columns.clamp(min=0), columns >= 0
        self.own: list[Tensor] = []  # by position, [R]
        self.chance: list[Tensor] = []  # by position, [R, S]
        self.overlap: list[Tensor] = []

    def temperatures(self) -> Tensor:
        return self.temperature

    def only(self, rows: Tensor) -> None:
        raise AssertionError("all rows draft here")

    def draw(self, k: int, logits: Tensor, sharpness: Tensor | None = None) -> Tensor:
        p, column = self.probs[:, k - 1], self.columns[:, k - 1].unsqueeze(1)
        of_text = p.gather(1, column).squeeze(1).clamp(min=torch.finfo(torch.float32).tiny)
        chances, overlaps = [], []
        self.own.append(softmax_rows(logits).gather(1, column).squeeze(1) * self.inside[:, k - 1])
        for sharp in self.sharpness:
            q = softmax_rows(logits, self.temperature / sharp)
            overlaps.append(torch.minimum(p, q).sum(-1))
            chances.append((q.gather(1, column).squeeze(1) / of_text).clamp(max=1) * self.inside[:, k - 1])
        self.chance.append(torch.stack(chances, -1))
        self.overlap.append(torch.stack(overlaps, -1))
        return self.tokens[:, k - 1]


@torch.inference_mode()
def follow(
    target: Target,
    drafter: DSparkDrafter,
    texts: Sequence[WrittenText],
    progress: StageProgress,
    *,
    sharpness: Sequence[float] = SHARPNESS,
    span: tuple[float, float] = (0.0, 1.0),
) -> TextBlocks:
    """Draft a block at every emitted token of every text except the last token.

    Args:
        drafter: bound to `target`, with a confidence head. Its copying is applied; its own sharpness is not, each of
            `sharpness` is evaluated instead.
        texts: each with at least two emitted tokens.
        span: part of `progress` that this call covers.
    """
    longest = max(len(text.tokens) for text in texts)
    vocabulary = target.vocab_size if drafter.vocabulary is None else len(drafter.vocabulary)
    emitted = max(len(text.tokens) - text.start for text in texts)
    rows = max(1, min(16, _LARGEST // (vocabulary * (emitted + drafter.gamma)), len(texts)))
    reader = _Reader(target, drafter, rows, longest + drafter.block_slots, sharpness)
    found: list[dict[str, npt.NDArray[np.generic]]] = []
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens) - texts[i].start)
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        found += reader.read([texts[i] for i in group], group)
        share = min(first + rows, len(order)) / len(order)
        progress.update(span[0] + (span[1] - span[0]) * share, f"drafts of {min(first + rows, len(order))} texts")
    fields = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    return TextBlocks(**fields, sharpness=tuple(sharpness))


class _Reader:
    """Reads texts in the state slots of its own cache."""

    def __init__(
        self, target: Target, drafter: DSparkDrafter, rows: int, length: int, sharpness: Sequence[float]
    ) -> None:
        self.target, self.drafter, self.sharpness = target, drafter, sharpness
        per_row, device = -(-length // _BLOCK), target.device
        self.cache = PagedCache(
            target.layers, drafter.cache_layers, num_blocks=1 + rows * per_row, block_size=_BLOCK, max_num_seqs=rows,
            max_model_len=per_row * _BLOCK, dtype=target.dtype, device=device,
        )  # fmt: skip
        for table in self.cache.block_tables:  # fixed blocks per slot; block 0 is the scratch block
            table.copy_(1 + torch.arange(rows * per_row, dtype=torch.int32, device=device).view(rows, per_row))
        self.history = torch.zeros(rows, per_row * _BLOCK, dtype=torch.int64, device=device)

    def _rows(self, slots: Tensor, positions: Tensor, logit_rows: Tensor) -> FlatBatch:
        """Batch of rows in ascending order of slots."""
        return FlatBatch.of_rows(self.cache, self.history[slots, positions], positions, slots, logit_rows)

    def read(self, texts: list[WrittenText], numbers: list[int]) -> list[dict[str, npt.NDArray[np.generic]]]:
        """Blocks of each text, keyed by the fields of `TextBlocks`."""
        gamma, device, vocabulary = self.drafter.gamma, self.target.device, self.drafter.vocabulary
        blocks_of = [
            len(text.tokens) - text.start - 1 for text in texts
        ]  # from the first emitted token on, as in the loop
        features, probs = [], []
        self.history.zero_()
        for slot, text in enumerate(texts):
            count = len(text.tokens) - 1  # the last token is no anchor
            self.history[slot, : count + 1] = torch.tensor(text.tokens, device=device)
            positions = torch.arange(count, device=device)
            batch = self._rows(torch.full_like(positions, slot), positions, positions[text.start :])
            output = self.target.forward(batch, self.cache, self.drafter.feature_layers)
            assert output.features is not None
            self.drafter.extend(output.features, batch, self.cache)  # blocks overwrite the slots after their anchor
            features.append(output.features)
            temperature = torch.full((blocks_of[slot],), text.temperature, device=device)
            p = softmax_rows(output.logits, temperature)
            p = p if vocabulary is None else p[:, vocabulary]
            probs.append(torch.nn.functional.pad(p, (0, 0, 0, max(blocks_of) + gamma - blocks_of[slot])))
        starts = torch.tensor([text.start for text in texts], device=device)
        temperatures = torch.tensor([text.temperature for text in texts], device=device)
        kept: list[list[dict[str, Tensor]]] = [[] for _ in texts]
        stacked = torch.stack(probs)  # [R, blocks + gamma, V_draft]
        for step in range(max(blocks_of)):
            slots = torch.tensor([s for s, count in enumerate(blocks_of) if step < count], device=device)
            anchors = starts[slots] + step
            context = DraftContext(slots, anchors, self.history, self.cache, int(anchors.max()))
            ahead = anchors.unsqueeze(1) + torch.arange(1, gamma + 1, device=device)
            tokens = self.history[slots.unsqueeze(1), ahead]
            window = stacked[slots, step : step + gamma]
            columns = self.drafter.model.column(tokens)
            follower = _Follower(tokens, columns, window, temperatures[slots], self.sharpness)
            copier, match, copied = Copier(context, gamma), [], []
            for k in range(gamma):
                copy, length = copier.copies()
                match.append(torch.where(self.drafter.model.column(copy) >= 0, length, 0))
                copied.append(copy == tokens[:, k])
                copier.append(tokens[:, k])
            draft = self.drafter.propose(context, follower)
            assert draft.confidence_logits is not None
            assert draft.signal is not None
            rows = torch.stack([features[s][int(a)] for s, a in zip(slots.tolist(), anchors.tolist(), strict=True)])
            self.drafter.extend(rows, self._rows(slots, anchors, slots[:0]), self.cache)
            known = ahead < torch.tensor([len(text.tokens) for text in texts], device=device)[slots].unsqueeze(1)
            values = {
                "logits": draft.confidence_logits, "signal": draft.signal, "known": known,
                "chance": torch.stack(follower.chance, 1) * known.unsqueeze(-1),
                "overlap": torch.stack(follower.overlap, 1) * known.unsqueeze(-1),
                "own": torch.stack(follower.own, 1), "match": torch.stack(match, 1), "copied": torch.stack(copied, 1),
            }  # fmt: skip
            for row, slot in enumerate(slots.tolist()):
                kept[slot].append({name: value[row] for name, value in values.items()})
        found: list[dict[str, npt.NDArray[np.generic]]] = []
        for text, number, blocks in zip(texts, numbers, kept, strict=True):
            fields = {name: torch.stack([block[name] for block in blocks]).cpu() for name in blocks[0]}
            found.append(
                {
                    name: value.to(torch.float64).numpy() if value.is_floating_point() else value.numpy()
                    for name, value in fields.items()
                }
                | {"text": np.full(len(blocks), number), "temperature": np.full(len(blocks), text.temperature)}
            )
        return found
