"""The two small heads of DSpark: the sequential (Markov) head that corrects the block's logits left to right, and the
confidence head that scores each position before its token is drawn."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear

HeadType = Literal["vanilla", "gated", "rnn"]
HEAD_TYPES: tuple[str, ...] = get_args(HeadType)


class MarkovHead(nn.Module):
    """Low-rank correction B_k = W2 l_k of the draft logits, given the token before position k (docs/concepts.md).

    The latent l_k [r] is e = W1[x_{k-1}] (vanilla), sigma(W_g [h_k; e]) * e (gated), or tanh(o) of a recurrent cell
    that reads z = [s; e; h_k] and whose joint projection gives gate, candidate and output in this order (rnn). W1 is
    indexed by target ids, W2 yields draft ids.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int, kind: HeadType) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.02)  # the correction starts small next to the base logits
        self.markov_w2: nn.Linear | PackedLinear = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    @property
    def table_and_product(self) -> tuple[Tensor, PackedLinear] | None:
        """W1 and W2 where the correction is W2 W1[x_{k-1}] and W2 is packed for the native kernels; else None."""
        w2 = self.markov_w2
        if self.kind != "vanilla" or not isinstance(w2, PackedLinear) or w2.kernel != native.kernel():
            return None
        return self.markov_w1.weight, w2

    def embed(self, previous: Tensor) -> Tensor:
        """e = W1[x_{k-1}]: target ids [...] -> [..., r]."""
        return self.markov_w1(previous)

    def initial_state(self, embedded: Tensor) -> Tensor:
        """s_0 = 0, shaped like one position's `embedded` [R, r]; carried along unused by the heads without memory."""
        return torch.zeros_like(embedded)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One position: the latent and the next state.

        Args:
            embedded: [..., r], `embed` of the token before this position.
            hidden: [..., d], hidden state of this position.
            state: [..., r], from `initial_state` or the position before.
        """
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded, state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def latents(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """All positions of known blocks at once (teacher forcing): [N, K, r] and [N, K, d] -> [N, K, r].

        Kept apart from W2 so that a trainer can multiply [h; l] with [head | W2] in one chunked product.
        """
        state = self.initial_state(embedded[:, 0])
        if self.kind != "rnn":
            return self.step(embedded, hidden, state.unsqueeze(1))[0]
        latents = []
        for k in range(embedded.shape[1]):
            latent, state = self.step(embedded[:, k], hidden[:, k], state)
            latents.append(latent)
        return torch.stack(latents, 1)

    def bias(self, latent: Tensor) -> Tensor:
        """B_k: [..., r] -> [..., V_draft] float32."""
        return self.markov_w2(latent).to(torch.float32)


class ConfidenceHead(nn.Module):
    """Logit of c_k from the hidden state and, where trained so, the embedding of x_{k-1}. x_k is not an input."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        """
        Args:
            markov_rank: rank of the Markov embedding that is appended to the features, 0 for the hidden state alone.
        """
        super().__init__()
        self.proj: nn.Linear | PackedLinear = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., d] and [..., r] -> [...] float32."""
        features = hidden if embedded is None else torch.cat([hidden, embedded.to(hidden.dtype)], -1)
        return self.proj(features).squeeze(-1).to(torch.float32)
