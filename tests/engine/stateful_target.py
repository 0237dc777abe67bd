"""A target that keeps what attention does not: a recurrent state, and one entry for every three positions.

Its logits depend on every token and on its place, so a state or an entry that is stale, foreign or not rewound changes the text.
`logits_of` computes the same from the tokens alone, without any cache.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.layers import LayerSpec, StateSpec
from surefoot.cache.paged import PagedCache
from surefoot.targets.target import TargetOutput

HIDDEN, STRIDE = 6, 3
RAW, COMPRESSED = 0, 1  # layers


class StatefulTarget:
    """Stands where a `Target` stands."""

    tokenizer = None
    dtype = torch.float32
    device = torch.device("cpu")
    hidden_size = HIDDEN
    max_model_len = 4096
    eos_token_ids: frozenset[int] = frozenset()
    num_layers = 2
    layers = (LayerSpec(((HIDDEN,),), window=STRIDE), LayerSpec(((HIDDEN,),), stride=STRIDE))

    def __init__(self, vocab_size: int = 6, seed: int = 0, recurrent: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name, self.vocab_size = "stateful", vocab_size
        self.states = (StateSpec((HIDDEN,)),) if recurrent else ()
        self.config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=vocab_size, num_hidden_layers=2)
        self.embed_tokens = nn.Embedding(
            vocab_size, HIDDEN, _weight=torch.randn(vocab_size, HIDDEN, generator=generator)
        )
        self._head = torch.randn(vocab_size, HIDDEN, generator=generator) * 3

    @torch.no_grad()
    def forward(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        embedded, real = self.embed_tokens(batch.token_ids), batch.kv_lens > 0
        raw, compressed = cache.target_group[RAW], cache.target_group[COMPRESSED]
        cache.target_kv[RAW][0].index_copy_(0, batch.cache_slots[raw], embedded)
        slots, positions = batch.row_slot.tolist(), batch.positions.tolist()
        for row, position in enumerate(positions):
            if position % STRIDE == STRIDE - 1 and real[row]:  # the last token of its window
                entry = self._entry([self._raw(cache, slots[row], position - back) for back in range(STRIDE)])
                cache.target_kv[COMPRESSED][0][batch.cache_slots[compressed][row]] = entry
        states = torch.zeros_like(embedded)
        running: dict[int, Tensor] = {}
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if not real[row]:
                continue
            if self.states:
                assert cache.states is not None
                before = running.get(slot)
                if before is None:
                    before = cache.states.committed(0, torch.tensor([slot]))[0]
                states[row] = running[slot] = self._advance(before, embedded[row])
            tail = [self._raw(cache, slot, at) for at in range(position - position % STRIDE, position + 1)]
            entries = [self._stored(cache, slot, index) for index in range((position + 1) // STRIDE)]
            embedded[row] = self._mix(entries, tail)
        if self.states:
            assert cache.states is not None
            cache.states.write(0, batch.row_slot, batch.positions, real, states)
        rows = (embedded + states)[batch.logit_rows]
        return TargetOutput((rows.unsqueeze(1) * self._head).sum(-1), None)

    def logits_of(self, tokens: list[int]) -> Tensor:
        """[V] logits after `tokens`, from the tokens alone."""
        embedded = list(self.embed_tokens.weight[tokens])
        state = torch.zeros(HIDDEN)
        for value in embedded if self.states else ():
            state = self._advance(state, value)
        whole = len(tokens) // STRIDE * STRIDE
        entries = [self._entry(embedded[at : at + STRIDE][::-1]) for at in range(0, whole, STRIDE)]
        # Where the last window is complete its positions are no tail any more, but its last token still is.
        tail = embedded[(len(tokens) - 1) // STRIDE * STRIDE :]
        return ((self._mix(entries, tail) + state) * self._head).sum(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits_of(tokens).argmax()))
        return tokens[len(prompt) :]

    @staticmethod
    def _advance(state: Tensor, value: Tensor) -> Tensor:
        return 0.7 * state + torch.tanh(value.roll(1))

    @staticmethod
    def _entry(newest_first: list[Tensor]) -> Tensor:
        return torch.tanh(sum((value * (back + 1) for back, value in enumerate(newest_first)), torch.zeros(HIDDEN)))

    @staticmethod
    def _mix(entries: list[Tensor], tail: list[Tensor]) -> Tensor:
        mixed = torch.zeros(HIDDEN)
        for index, entry in enumerate(entries):
            mixed = mixed + entry.roll(index) * 0.9 ** (len(entries) - index)
        for index, value in enumerate(tail):
            mixed = mixed + value.roll(-index)
        return mixed

    @staticmethod
    def _raw(cache: PagedCache, slot: int, position: int) -> Tensor:
        at = cache.cache_slots(cache.target_group[RAW], torch.tensor([slot]), torch.tensor([position]))
        return cache.target_kv[RAW][0][at][0]

    @staticmethod
    def _stored(cache: PagedCache, slot: int, entry: int) -> Tensor:
        at = cache.cache_slots(cache.target_group[COMPRESSED], torch.tensor([slot]), torch.tensor([entry * STRIDE]))
        return cache.target_kv[COMPRESSED][0][at][0]
