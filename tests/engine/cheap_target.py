"""A target of a dozen torch calls per pass, for tests of the engine that need many thousands of them.

It is a real causal model on the paged cache: a sliding and a full attention layer over learned-by-chance weights. A row's
logits depend on every token it should see, at its place, so a misplaced, stale or foreign cache entry changes the text.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import LayerSpec, PagedCache
from surefoot.kernels.attention import paged_attention
from surefoot.targets.target import TargetOutput

HEADS, HEAD_DIM = 2, 8
HIDDEN = HEADS * HEAD_DIM


class CheapTarget:
    """Stands where a `Target` stands."""

    tokenizer = None
    dtype = torch.float32
    device = torch.device("cpu")
    hidden_size = HIDDEN
    max_model_len = 4096
    eos_token_ids: frozenset[int] = frozenset()
    states = ()

    def __init__(self, vocab_size: int = 16, windows: tuple[int | None, ...] = (6, None), seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.name, self.vocab_size, self.num_layers = f"cheap-{windows}", vocab_size, len(windows)
        self.weights = "float32 in memory"
        self.config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=vocab_size, num_hidden_layers=len(windows))
        self.layers = tuple(LayerSpec.attention(HEADS, HEAD_DIM, HEAD_DIM, window) for window in windows)
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN, _weight=random(vocab_size, HIDDEN) * 4)
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)
        self.lm_head.weight = nn.Parameter(random(vocab_size, HIDDEN) * 6)
        self._projections = [random(3 * HIDDEN, HIDDEN) * 2 for _ in windows]
        self._frequencies = torch.logspace(0, -2, HIDDEN // 2)

    @torch.no_grad()
    def forward(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        angles = batch.positions.unsqueeze(1) * self._frequencies
        hidden = self.embed_tokens(batch.token_ids) + torch.cat([angles.cos(), angles.sin()], 1)
        features = {-1: hidden}
        for layer, (spec, projection) in enumerate(zip(self.layers, self._projections, strict=True)):
            # A product of one row each: its bits do not depend on how many rows there are.
            rows = (hidden.unsqueeze(1) * projection).sum(-1).unflatten(-1, (3, HEADS, HEAD_DIM))
            group = cache.target_group[layer]
            for storage, new in zip(cache.target_kv[layer], (rows[:, 1], rows[:, 2]), strict=True):
                storage.index_copy_(0, batch.cache_slots[group], new)
            mixed = paged_attention(
                rows[:, 0].contiguous(),
                *cache.target_kv[layer],
                batch.block_tables[group],
                batch.row_slot,
                batch.kv_lens,
                block_size=cache.block_size,
                scaling=HEAD_DIM**-0.5,
                window=spec.window,
            )
            hidden = F.rms_norm(hidden + mixed.flatten(1), (HIDDEN,))
            features[layer] = hidden
        logits = (hidden[batch.logit_rows].unsqueeze(1) * self.lm_head.weight).sum(-1)
        return TargetOutput(logits, torch.cat([features[i] for i in feature_layers], 1) if feature_layers else None)
