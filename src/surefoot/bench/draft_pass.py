"""`python -m surefoot.bench.draft_pass`: what a draft pass costs on this CPU, and which part of it.

A drafter of random weights with the shape of a shipped one runs for 1 and for 16 requests: once with every product packed
by itself and every token asked for, once as the engine serves it (`DSparkModel.pack`, the block drawn in one call). The
arms take turns; best and median are printed, the floor being the bytes that one pass has to read. `surefoot profile`
measures the same pass as D(R) inside a real engine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import BlockDraw, DraftContext
from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.model import DSparkModel
from surefoot.kernels import native
from surefoot.kernels.formats import INT8
from surefoot.kernels.linear import PackedLinear
from surefoot.kernels.sampling import argmax_rows, sample_rows, softmax_rows

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-coder-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": True,
        "qk_norm": False,
        "num_target_layers": 24,
        "target_layer_ids": (1, 11, 22),
    },
    "gemma3-270m": {
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sandwich_norms": True,
        "hidden_act": "gelu_pytorch_tanh",
        "num_target_layers": 18,
        "target_layer_ids": (1, 8, 16),
    },
}
CONTEXT, ACCEPTED = 300, 2  # cached positions of every request; rows a step adds to the context, besides the anchor


class TokenSampler:
    """Asked for every token, as `BlockSampler` is by a drafter that cannot hand it a block."""

    def __init__(self, how: BlockDraw, vocabulary: Tensor | None) -> None:
        self.how, self.vocabulary = how, vocabulary

    def temperatures(self) -> Tensor | None:
        return self.how.temperature

    def draw(self, k: int, logits: Tensor, sharpness: Tensor | None = None) -> Tensor:
        if self.how.temperature is None or self.how.uniforms is None:
            return self._target_ids(argmax_rows(logits))
        temperature = self.how.temperature if sharpness is None else self.how.temperature / sharpness
        return self._target_ids(sample_rows(softmax_rows(logits, temperature), self.how.uniforms[:, k - 1]))

    def only(self, rows: Tensor) -> None:
        raise NotImplementedError("all requests draft here")

    def _target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.vocabulary is None else self.vocabulary[ids]


class BlockSampler(TokenSampler):
    """Hands over whole blocks."""

    def block_draw(self) -> BlockDraw:
        return self.how

    def take(self, draft_ids: Tensor, probs: Tensor | None) -> Tensor:
        return self._target_ids(draft_ids)


def random_drafter(shape: dict[str, Any], *, draft_vocabulary: int, rank: int, int8: bool) -> DSparkDrafter:
    """Two layers, gamma 7, bfloat16 or stored as int8; bound to a target that is nothing but an embedding."""
    config = DSparkConfig(
        **shape,
        num_hidden_layers=2,
        block_size=7,
        mask_token_id=4,
        feature_norm=True,
        draft_vocab_size=draft_vocabulary,
        markov_rank=rank,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    vocabulary = torch.randperm(config.vocab_size)[:draft_vocabulary].sort().values
    model = DSparkModel(config, vocabulary=vocabulary).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in name:
            parameter.normal_(0, 1 / math.sqrt(parameter.shape[1]))
            if int8:
                model.stored[name] = INT8.quantize(parameter)
                parameter.copy_(model.stored[name].dequantize())
    embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=torch.bfloat16).requires_grad_(False)
    target = SimpleNamespace(
        name="an embedding",
        embed_tokens=embedding,
        lm_head=None,
        config=SimpleNamespace(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_hidden_layers=config.num_target_layers,
            tie_word_embeddings=True,
        ),
    )
    drafter = DSparkDrafter(model.to(torch.bfloat16).eval())
    drafter.bind(target)  # type: ignore[arg-type]
    return drafter


def pack_one_by_one(model: DSparkModel) -> None:
    """Every product packed, none fused."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))


class Scene:
    """One drafter and a number of requests in the middle of their decoding."""

    def __init__(self, drafter: DSparkDrafter, requests: int, sampler: type[TokenSampler]) -> None:
        self.drafter, self.sampler = drafter, sampler
        blocks = -(-(CONTEXT + 64) // 16)
        self.cache = PagedCache(
            (),
            drafter.cache_layers,
            num_blocks=requests * blocks + 1,
            block_size=16,
            max_num_seqs=requests,
            max_model_len=blocks * 16,
            dtype=torch.bfloat16,
        )
        self.cache.block_tables[0].copy_(torch.arange(1, requests * blocks + 1).view(requests, blocks))
        slots, history = torch.arange(requests), torch.randint(drafter.config.vocab_size, (requests, blocks * 16 + 16))
        lengths = torch.full((requests,), CONTEXT)
        self.context = DraftContext(slots, lengths, history, self.cache, CONTEXT)
        each = ACCEPTED + 1
        row_slot = slots.repeat_interleave(each)
        positions = CONTEXT - each + torch.arange(each).repeat(requests)
        self.batch = FlatBatch.of_rows(self.cache, positions, positions, row_slot, positions[:0])
        self.features = torch.randn(len(positions), drafter.config.feature_size).bfloat16()
        self.warm = BlockDraw(torch.ones(requests), torch.rand(requests, drafter.gamma, dtype=torch.float64))
        self.anchor = history[slots, lengths]
        self.hidden = drafter.block_hidden(self.context, self.anchor)

    def parts(self) -> dict[str, Callable[[], object]]:
        """What is timed; the first two are whole draft passes."""
        drafter, vocabulary = self.drafter, self.drafter.vocabulary
        return {
            "draft pass, temperature 0": lambda: drafter.propose(self.context, self.sampler(BlockDraw(), vocabulary)),
            "draft pass, temperature 1": lambda: drafter.propose(self.context, self.sampler(self.warm, vocabulary)),
            "  of it the block's layers": lambda: drafter.block_hidden(self.context, self.anchor),
            "  of it the head": lambda: drafter.model.head_logits(self.hidden),
            f"context of {ACCEPTED + 1} rows each": lambda: drafter.extend(self.features, self.batch, self.cache),
        }


def weight_bytes(model: DSparkModel) -> int:
    """Read by one pass: every product once, the sequential head's once a position (the cache holds it or does not)."""
    products = [module for module in model.modules() if isinstance(module, PackedLinear)]
    ours = [p for p in products if p is not model.context_proj and p is not model.fc]
    return sum(p.num_bytes for p in ours)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m surefoot.bench.draft_pass", description=__doc__)
    parser.add_argument("--model", choices=[*SHAPES], default="qwen2.5-coder-0.5b", help="whose drafter")
    parser.add_argument("--inner", type=int, default=None, help="width of the feed-forward (default: the target's)")
    parser.add_argument("--rank", type=int, default=128, help="of the sequential head")
    parser.add_argument("--draft-vocabulary", type=int, default=16384, help="tokens the drafter can propose")
    parser.add_argument("--int8", action="store_true", help="a drafter stored as int8 (the first arm widens it)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=30, help="rounds for one request; fewer for more")
    options = parser.parse_args()
    console = Console()
    if not native.available():
        parser.error("the native kernels are not available here: there is nothing to compare")
    shape = SHAPES[options.model] | ({"intermediate_size": options.inner} if options.inner else {})
    with torch.inference_mode():
        separate, served = (
            random_drafter(shape, draft_vocabulary=options.draft_vocabulary, rank=options.rank, int8=options.int8)
            for _ in range(2)
        )
        pack_one_by_one(separate.model)
        served.model.pack()
        console.print(f"{torch.get_num_threads()} threads; a pass reads {weight_bytes(served.model) / 1e6:.0f} MB")
        for requests in options.requests:
            arms = [Scene(separate, requests, TokenSampler).parts(), Scene(served, requests, BlockSampler).parts()]
            times: dict[str, list[list[float]]] = {name: [[], []] for name in arms[0]}
            for _ in range(max(5, options.repeats // math.ceil(math.sqrt(requests)))):
                for name in times:
                    for arm, samples in zip(arms, times[name], strict=True):
                        start = time.perf_counter()
                        arm[name]()
                        samples.append(1e3 * (time.perf_counter() - start))
            table = Table("ms, best / median", "one by one", "as served", title=f"{options.model}, {requests} requests")
            for name, both in times.items():
                table.add_row(name, *(f"{min(samples):.2f} / {statistics.median(samples):.2f}" for samples in both))
            console.print(table)


if __name__ == "__main__":
    main()
