"""Documents, rows and anchors of every training step: a function of lengths, options and step number alone.

Every rank computes the whole plan. Therefore a run resumes bit for bit, and several ranks compute what one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.training.corpus import Corpus, Document
from surefoot.training.features import MAX_DOCUMENTS, PackedRow
from surefoot.training.options import TrainingOptions

Ints = npt.NDArray[np.int64]
_ORDER, _ANCHORS = range(2)  # purposes of the random streams


@dataclass(frozen=True)
class PlannedStep:
    """One optimiser step of the plan."""

    batch: int  # number of the batch, in reading order
    oldest: int  # batches before this one are no longer needed
    rows: list[list[int]]  # [batch_rows] document numbers


def pack_rows(lengths: Ints, order: Ints, row_tokens: int) -> list[list[int]]:
    """Fill rows with documents in the given order; a row is closed when the next document does not fit."""
    rows: list[list[int]] = []
    room = 0
    for number in order.tolist():
        if lengths[number] > room or len(rows[-1]) == MAX_DOCUMENTS:
            rows.append([])
            room = row_tokens
        rows[-1].append(number)
        room -= int(lengths[number])
    return rows


def batches(lengths: Ints, options: TrainingOptions) -> Iterator[list[list[int]]]:
    """Endless sequence of batches over documents of these lengths; every epoch packs them in another order."""
    epoch = 0
    while True:
        order = np.random.default_rng([options.seed, _ORDER, epoch]).permutation(len(lengths))
        rows = pack_rows(lengths, order, options.row_tokens)
        rows += [rows[i % len(rows)] for i in range(-len(rows) % options.batch_rows)]  # repeats fill the last batch
        for first in range(0, len(rows), options.batch_rows):
            yield rows[first : first + options.batch_rows]
        epoch += 1


def plan(lengths: Ints, options: TrainingOptions) -> Iterator[PlannedStep]:
    """Endless sequence of steps over a rolling buffer of `held_batches` batches, each trained on `reuse` times.

    After a batch is read, one step is taken on it and on one held batch of each evenly spaced age. The uses of a batch
    are thus far apart and consecutive steps see different text, while the target runs once per batch.
    """
    spacing = max(1, options.held_batches // options.reuse)
    reach = spacing * (options.reuse - 1)
    held: dict[int, list[list[int]]] = {}
    for newest, rows in enumerate(batches(lengths, options)):
        held[newest] = rows
        oldest = max(0, newest - reach)
        for batch in range(newest, oldest - 1, -spacing):
            yield PlannedStep(batch, oldest, held[batch])
        held.pop(newest - reach, None)


@dataclass(frozen=True)
class Anchors:
    """Anchors of one row; if the row has fewer candidates than requested, the remaining entries have weight 0.

    Position k of a block is trained on the target's distribution after x_{k-1}: row anchor + k - 1 of the document.
    """

    index: Ints  # [A] index of the anchor in the row
    weight: npt.NDArray[np.float32]  # [A, gamma]

    @property
    def count(self) -> int:
        return int((self.weight[:, 0] > 0).sum())


def pick_anchors(
    documents: Sequence[Document], count: int, gamma: int, decay: float, rng: np.random.Generator | None
) -> Anchors:
    """Draw `count` anchors of a row without replacement, in ascending order; without `rng` they are evenly spaced."""
    places, ends, offset = [], [], 0
    for document in documents:
        length = len(document.tokens)
        here = np.arange(max(document.start, 1), length)
        places.append(offset + here)
        ends.append(np.full(len(here), offset + length))
        offset += length
    place, end = np.concatenate(places), np.concatenate(ends)
    take = min(count, len(place))
    if rng is not None:
        chosen = np.sort(rng.choice(len(place), take, replace=False))
    else:
        chosen = np.linspace(0, len(place) - 1, take).astype(np.int64)
    index, weight = np.zeros(count, dtype=np.int64), np.zeros((count, gamma), dtype=np.float32)
    index[:take] = place[chosen]
    k = np.arange(gamma)
    weight[:take] = np.where(place[chosen][:, None] + k < end[chosen][:, None], np.exp(-k / decay), 0)
    return Anchors(index, weight)


def step_anchors(corpus: Corpus, step: PlannedStep, number: int, gamma: int, options: TrainingOptions) -> list[Anchors]:
    """Anchors of all rows of step `number`."""
    rng = np.random.default_rng([options.seed, _ANCHORS, number])
    documents = corpus.documents
    return [
        pick_anchors([documents[i] for i in row], options.row_anchors, gamma, options.position_decay, rng)
        for row in step.rows
    ]


@dataclass(frozen=True)
class Batch:
    """N rows with A anchors each, the input of `network.DraftLoss`. Padding has owner -1 and weight 0."""

    features: Tensor  # [N, C, m * d_target]
    positions: Tensor  # [N, C] int64
    owner: Tensor  # [N, C] int64
    anchors: Tensor  # [N, A] int64, target ids
    anchor_positions: Tensor  # [N, A] int64
    anchor_owner: Tensor  # [N, A] int64
    previous: Tensor  # [N, A, gamma] int64, x_{k-1} as an index into `TrainingVocabulary.seen`
    labels: Tensor  # [M, V_draft]
    label_rows: Tensor  # [N, A, gamma] int64, row of `labels` for x_k
    weight: Tensor  # [N, A, gamma] float32


def collate(
    rows: Sequence[PackedRow], starts: Sequence[Sequence[int]], anchors: Sequence[Anchors], compact: Tensor
) -> Batch:
    """Join rows and their anchors.

    Args:
        starts: per row, the first anchor position of every document.
        compact: [V] target id -> index into the tokens seen (`TrainingVocabulary.compact`).
    """
    device = rows[0].features.device
    length = max(row.tokens.shape[0] for row in rows)
    gamma = anchors[0].weight.shape[1]

    def padded(name: str, value: int = 0) -> Tensor:
        parts = [getattr(row, name) for row in rows]
        return torch.stack(
            [
                torch.nn.functional.pad(part, (*[0, 0] * (part.dim() - 1), 0, length - len(part)), value=value)
                for part in parts
            ]
        )

    index = torch.stack([torch.from_numpy(a.index) for a in anchors]).to(device)
    weight = torch.stack([torch.from_numpy(a.weight) for a in anchors]).to(device)
    tokens, positions, owner = padded("tokens"), padded("positions"), padded("owner", -1)
    block = index.unsqueeze(2) + torch.arange(gamma, device=device)
    block = torch.where(weight > 0, block, index.unsqueeze(2))  # slots past the end have weight 0
    label_rows = []
    base = 0
    for row, first, at in zip(rows, starts, block, strict=True):
        first_anchor = torch.tensor(first, device=device)[row.owner]
        order = (row.positions >= first_anchor).cumsum(0) - 1  # index among the rows that have a label
        label_rows.append(base + order[at].clamp(min=0))
        base += row.labels.shape[0]
    return Batch(
        features=padded("features"),
        positions=positions,
        owner=owner,
        anchors=tokens.gather(1, index),
        anchor_positions=positions.gather(1, index),
        anchor_owner=owner.gather(1, index),
        previous=compact.to(device)[tokens.gather(1, block.flatten(1))].view_as(block),
        labels=torch.cat([row.labels for row in rows]),
        label_rows=torch.stack(label_rows),
        weight=weight,
    )
