"""Stage *features*: the draft vocabulary, and the target's hidden states and distributions for packed rows.

Hidden states are never stored on disk: one target pass computes those of a row before its first use, and they stay in
memory until its last use. Labels are the target's own distributions, so every anchor gives a full training signal whatever
the origin of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.targets.target import Target
from surefoot.training.corpus import Corpus, Document

BLOCK = 16
MAX_DOCUMENTS = 64
"""Documents per packed row; each has a state slot of the target's cache."""
_SOFTMAX_ROWS = {"cpu": 64, "cuda": 2048}  # rows of float32 logits held at a time


@dataclass(frozen=True)
class TrainingVocabulary:
    """Draft vocabulary, and the tokens that occur in the training text."""

    draft: Tensor | None  # [V_draft] int64 ascending, draft id -> target id; None: the target's whole vocabulary
    seen: Tensor  # [n] int64 ascending, every token that can precede a drafted one

    def compact(self, vocab_size: int) -> Tensor:
        """[vocab_size] int64: target id -> index into `seen` (0 for tokens that do not occur)."""
        index = torch.zeros(vocab_size, dtype=torch.int64)
        index[self.seen] = torch.arange(self.seen.shape[0])
        return index


def choose_vocabulary(
    corpus: Corpus, held_out: Corpus, vocab_size: int, size: int, always: Sequence[int] = ()
) -> tuple[TrainingVocabulary, dict[str, Any]]:
    """The `size` most frequent emitted tokens as draft vocabulary, and counts for the record.

    Args:
        corpus: training text, whose counts decide.
        held_out: text on which the coverage of the vocabulary is measured.
        always: tokens included whatever their count, such as the end tokens.
    """
    emitted = corpus.counts(vocab_size)
    whole = np.zeros(vocab_size, dtype=np.int64)
    for document in (*corpus, *held_out):
        whole += np.bincount(document.tokens, minlength=vocab_size)
    if size >= vocab_size:
        vocabulary, covered = None, 1.0
    else:
        rank = emitted.copy()
        rank[list(always)] = emitted.sum() + 1
        # Tokens never emitted come last: those of the prompts, then small ids, which tokenizers merge first.
        order = np.lexsort((np.arange(vocab_size), -whole, -rank))
        chosen = np.sort(order[:size])
        vocabulary = torch.from_numpy(chosen)
        outside = held_out.counts(vocab_size)
        covered = float(outside[chosen].sum() / max(outside.sum(), 1))
    occurring = np.union1d(np.flatnonzero(whole), vocabulary.numpy() if vocabulary is not None else [])
    counts = {
        "tokens": corpus.num_tokens,
        "emitted": int(emitted.sum()),
        "distinct": int((emitted > 0).sum()),
        "words": vocab_size if vocabulary is None else size,
        "held_out_coverage": round(covered, 5),
    }
    return TrainingVocabulary(vocabulary, torch.from_numpy(occurring.astype(np.int64))), counts


@dataclass(frozen=True)
class PackedRow:
    """One packed row of documents, with the target's features and labels."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    owner: Tensor  # [T] int64, index of the document in the row
    features: Tensor  # [T, m * d_target] in the target's dtype
    labels: (
        Tensor  # [M, V_draft] target probabilities of the draft vocabulary, for tokens from each document's start on
    )


class TargetReader:
    """Computes features and labels of rows by target passes over their packed documents."""

    def __init__(
        self,
        target: Target,
        feature_layers: tuple[int, ...],
        vocabulary: Tensor | None,
        row_tokens: int,
        label_dtype: torch.dtype = torch.float16,
        *,
        rows: int = 1,
    ) -> None:
        """
        Args:
            rows: maximum rows per pass. One is fastest on a CPU; a GPU needs thousands of tokens per pass.
            label_dtype: float16 has a relative error of 0.05 %, or an absolute one of 3e-8 for tiny probabilities.
        """
        self.target, self.feature_layers = target, feature_layers
        self.vocabulary = None if vocabulary is None else vocabulary.to(target.device)
        self.label_dtype, self.rows = label_dtype, rows
        self.cache = PagedCache(
            target.layers,
            num_blocks=1 + rows * (row_tokens // BLOCK + MAX_DOCUMENTS),
            block_size=BLOCK,
            max_num_seqs=rows * MAX_DOCUMENTS,
            max_model_len=row_tokens,
            dtype=target.dtype,
            device=target.device,
        )

    def read(self, rows: Sequence[Sequence[Document]]) -> list[PackedRow]:
        """Features and labels of rows, each given as its documents."""
        found: list[PackedRow] = []
        for first in range(0, len(rows), self.rows):
            part = rows[first : first + self.rows]
            whole = self._pass([document for row in part for document in row])
            found += _split(whole, part)
        return found

    @torch.no_grad()
    def _pass(self, documents: Sequence[Document]) -> PackedRow:
        device = self.target.device
        tokens, positions, owner = flat(documents)
        starts = torch.tensor([document.start for document in documents])
        row_tokens, row_positions, row_owner = (torch.from_numpy(t).to(device) for t in (tokens, positions, owner))
        labelled = (row_positions >= starts.to(device)[row_owner]).nonzero().squeeze(1)
        batch = self._pack(documents, row_tokens, row_positions, row_owner, labelled)
        output = self.target.forward(batch, self.cache, self.feature_layers)
        assert output.features is not None
        return PackedRow(row_tokens, row_positions, row_owner, output.features, self._probabilities(output.logits))

    def _probabilities(self, logits: Tensor) -> Tensor:
        """[M, V] logits -> [M, V_draft] probabilities; they sum to 1 minus the mass outside the draft vocabulary."""
        width = logits.shape[1] if self.vocabulary is None else self.vocabulary.shape[0]
        labels = torch.empty(logits.shape[0], width, dtype=self.label_dtype, device=logits.device)
        count = _SOFTMAX_ROWS.get(logits.device.type, _SOFTMAX_ROWS["cuda"])
        for first in range(0, logits.shape[0], count):
            wide = logits[first : first + count].to(torch.float32)
            normaliser = wide.logsumexp(1, keepdim=True)
            chosen = wide if self.vocabulary is None else wide[:, self.vocabulary]
            labels[first : first + count] = (chosen - normaliser).exp_()
        return labels

    def _pack(
        self, documents: Sequence[Document], tokens: Tensor, positions: Tensor, owner: Tensor, logit_rows: Tensor
    ) -> FlatBatch:
        cache, block = self.cache, 1
        for slot, document in enumerate(documents):  # consecutive blocks; block 0 is the scratch block
            count = -(-len(document.tokens) // BLOCK)
            for table in cache.block_tables:
                table[slot, :count] = torch.arange(block, block + count, dtype=torch.int32)
            block += count
        return FlatBatch.of_rows(cache, tokens, positions, owner, logit_rows)


def _split(whole: PackedRow, rows: Sequence[Sequence[Document]]) -> list[PackedRow]:
    """Split a pass over several rows into rows; owners count from 0 in each."""
    if len(rows) == 1:
        return [whole]
    found, token, label, owner = [], 0, 0, 0
    for row in rows:
        lengths = [len(document.tokens) for document in row]
        labels = sum(length - document.start for length, document in zip(lengths, row, strict=True))
        here = slice(token, token + sum(lengths))
        found.append(
            PackedRow(
                whole.tokens[here],
                whole.positions[here],
                whole.owner[here] - owner,
                whole.features[here].clone(),  # a copy, so that each row's memory can be freed
                whole.labels[label : label + labels].clone(),
            )
        )
        token, label, owner = here.stop, label + labels, owner + len(row)
    return found


Ints = npt.NDArray[np.int64]


def flat(documents: Sequence[Document]) -> tuple[Ints, Ints, Ints]:
    """Tokens, positions and owners [T] of concatenated documents."""
    lengths = [len(document.tokens) for document in documents]
    return (
        np.concatenate([document.tokens for document in documents]),
        np.concatenate([np.arange(length) for length in lengths]),
        np.repeat(np.arange(len(documents)), lengths),
    )
