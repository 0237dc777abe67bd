"""A small world around a drafter: histories, a paged cache with scattered blocks, and a target that only lends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import Draft, DraftContext

DEEPSPEC = Path(__file__).parents[3] / "shared" / "reference" / "deepspec"


class RecordingSampler:
    """Greedy draws that keep the logits they saw; `forced` overrides what is drawn."""

    def __init__(self, vocabulary: Tensor | None = None, forced: dict[int, Tensor] | None = None) -> None:
        self.vocabulary, self.forced, self.logits = vocabulary, forced or {}, []

    def draw(self, k: int, logits: Tensor) -> Tensor:
        assert k == len(self.logits) + 1
        assert logits.dtype == torch.float32
        self.logits.append(logits.clone())
        index = logits.argmax(-1)
        token = index if self.vocabulary is None else self.vocabulary[index]
        return self.forced.get(k, token)


class Scene:
    """The device state of `max_num_seqs` slots and the drafter's cache, its blocks in random order."""

    def __init__(self, drafter, *, slots=4, max_model_len=96, block_size=4, dtype=torch.float32, seed=0) -> None:
        self.drafter = drafter
        blocks = -(-max_model_len // block_size)
        self.cache = PagedCache(
            (),
            drafter.cache_layers,
            num_blocks=slots * blocks + 1,
            block_size=block_size,
            max_num_seqs=slots,
            max_model_len=max_model_len,
            dtype=dtype,
        )
        order = torch.randperm(slots * blocks, generator=torch.Generator().manual_seed(seed)) + 1
        self.cache.block_tables[self.cache.drafter_group].copy_(order.view(slots, blocks))
        for storage in self.cache.drafter_kv:  # whatever was there before must not matter
            for tensor in storage:
                tensor.fill_(7.0)
        self.history = torch.zeros(slots, max_model_len + 16, dtype=torch.int64)
        self.lengths = torch.zeros(slots, dtype=torch.int64)

    def extend(self, rows: list[tuple[int, Tensor]], padding: int = 0) -> None:
        """Run the features [n, F] of several slots' next rows through `extend` as one flat batch, and commit them."""
        slot = torch.cat([torch.full((len(f),), s) for s, f in rows] + [torch.zeros(padding, dtype=torch.int64)])
        position = torch.cat(
            [self.lengths[s] + torch.arange(len(f)) for s, f in rows] + [torch.zeros(padding, dtype=torch.int64)]
        )
        features = torch.cat([f for _, f in rows])
        features = torch.cat([features, torch.full((padding, features.shape[1]), 1e3)])
        real = torch.arange(len(slot)) < len(slot) - padding
        batch = FlatBatch.of_rows(self.cache, torch.zeros_like(position), position, slot, position[:0], real)
        self.drafter.extend(features, batch, self.cache)
        for s, f in rows:
            self.lengths[s] += len(f)

    def context(self, slots: list[int], depth: int | None = None) -> DraftContext:
        index = torch.tensor(slots)
        return DraftContext(index, self.lengths[index], self.history, self.cache, int(self.lengths.max()), depth)

    def propose(
        self, slots: list[int], sampler: RecordingSampler | None = None, depth: int | None = None
    ) -> tuple[Draft, RecordingSampler]:
        sampler = sampler or RecordingSampler(self.drafter.vocabulary)
        return self.drafter.propose(self.context(slots, depth), sampler), sampler


def lending_target(vocab_size: int, hidden_size: int, *, layers: int = 6, seed: int = 3):
    """What `bind` needs of a target."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)
    for module in (embedding, head):
        module.weight = nn.Parameter(torch.randn(vocab_size, hidden_size, generator=generator) * 0.2)
        module.requires_grad_(False)
    config = SimpleNamespace(hidden_size=hidden_size, vocab_size=vocab_size, num_hidden_layers=layers)
    return SimpleNamespace(name="tiny-target", embed_tokens=embedding, lm_head=head, config=config)


@pytest.fixture(scope="session")
def deepspec() -> Path:
    if not DEEPSPEC.is_dir():
        pytest.skip(f"GOLDEN CHECKPOINTS MISSING: {DEEPSPEC} does not exist, DeepSpec parity is NOT tested")
    return DEEPSPEC


@pytest.fixture(scope="session")
def worlds():
    """The helpers above, for tests that cannot import a conftest by name."""
    return SimpleNamespace(Scene=Scene, RecordingSampler=RecordingSampler, lending_target=lending_target)
