"""Token sequences on disk: continued prompts, or existing text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from surefoot.errors import ConfigurationError
from surefoot.paths import write_whole


@dataclass(frozen=True)
class Document:
    """One token sequence."""

    index: int  # of the prompt it continues, or of the piece of text
    start: int  # first position that may be an anchor; at least 1, because a drafter needs a context
    tokens: npt.NDArray[np.int64]  # [length]


class Corpus:
    """Documents sorted by index, whatever order they were written in."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self.documents = sorted(documents, key=lambda document: document.index)
        self.lengths = np.array([len(document.tokens) for document in self.documents], dtype=np.int64)

    @classmethod
    def load(cls, *paths: Path) -> Corpus:
        """Read shard files, and all shards of folders; documents of later paths get higher indices."""
        documents: list[Document] = []
        for path in paths:
            shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.exists() else []
            base = 1 + max((document.index for document in documents), default=-1)
            for shard in shards:
                documents += [Document(base + d.index, d.start, d.tokens) for d in read_shard(shard)]
        return cls(documents)

    def split(self, longest: int) -> Corpus:
        """The same text in documents of at most `longest` tokens; pieces without an anchor are dropped."""
        pieces: list[Document] = []
        for document in self.documents:
            for first in range(0, len(document.tokens), longest):
                tokens = document.tokens[first : first + longest]
                start = max(document.start - first, 1)
                if start < len(tokens):
                    pieces.append(Document(len(pieces), start, tokens))
        return Corpus(pieces)

    def require_documents(self, what: str) -> None:
        if not self.documents:
            raise ConfigurationError(
                f"no {what} to work on: run the earlier stages first, or leave --stage out; if the time was over before "
                "the first was written, give more --minutes"
            )

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """Number of occurrences of every token after the prompts, [vocab_size]."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for document in self.documents:
            total += np.bincount(document.tokens[document.start :], minlength=vocab_size)
        return total


def write_shard(path: Path, documents: Sequence[Document]) -> None:
    """Write documents as one safetensors file, atomically."""
    data = {
        "tokens": torch.from_numpy(np.concatenate([d.tokens for d in documents]).astype(np.int32)),
        "lengths": torch.tensor([len(d.tokens) for d in documents], dtype=torch.int32),
        "starts": torch.tensor([d.start for d in documents], dtype=torch.int32),
        "indices": torch.tensor([d.index for d in documents], dtype=torch.int64),
    }
    write_whole(path, lambda file: save_file(data, file))


def read_shard(path: Path) -> list[Document]:
    data = {name: tensor.numpy().astype(np.int64) for name, tensor in load_file(path).items()}
    parts = np.split(data["tokens"], data["lengths"].cumsum()[:-1])
    triples = zip(data["indices"], data["starts"], parts, strict=True)
    return [Document(int(index), int(start), tokens) for index, start, tokens in triples]
