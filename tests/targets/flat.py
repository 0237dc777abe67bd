"""Tiny random models and hand-made flat batches for the target tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.targets.target import Target

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2-window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=5, layer_types=_MIXED,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=5, layer_types=_MIXED
    ),
    "mistral-window": lambda: MistralConfig(**_SIZES, sliding_window=6),
    "phi3": lambda: Phi3Config(**_SIZES),
    "gpt-oss": lambda: GptOssConfig(
        **_SIZES, head_dim=16, sliding_window=5, layer_types=_MIXED, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "granite": lambda: GraniteConfig(
        **_SIZES, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "smollm3": lambda: SmolLM3Config(**_SIZES, no_rope_layers=[1, 0, 1]),
    "llama4": lambda: Llama4TextConfig(
        **_SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, layer_types=["full_attention"] * 3, no_rope_layers=[0, 1, 0], floor_scale=3,
        attn_scale=0.7,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=64, n_positions=128, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,
    ),
}  # fmt: skip


def random_model(kind: str, seed: int = 0) -> Any:
    """A tiny float32 model with random weights, every parameter (biases, norms, sinks too) away from its default."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif not parameter.isfinite().all() or parameter.abs().max() == 0:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def twins(kind: str) -> tuple[Any, Target]:
    """The stock model and a target over a copy of it."""
    stock = random_model(kind)
    return stock, Target(copy.deepcopy(stock), name=kind)


class FlatRunner:
    """Feeds token sequences to a target as flat batches over a cache with scattered blocks."""

    def __init__(self, target: Target, num_slots: int = 4, block_size: int = 4, max_len: int = 64) -> None:
        self.target = target
        blocks = num_slots * (-(-max_len // block_size)) + 1
        self.cache = PagedCache(
            target.layers, num_blocks=blocks, block_size=block_size, max_num_seqs=num_slots, max_model_len=max_len,
            dtype=target.dtype,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(7)
        for table in self.cache.block_tables:  # every block somewhere, none in order; block 0 stays scratch
            order = 1 + torch.randperm(blocks - 1, generator=generator)
            table.copy_(order.view(table.shape).to(torch.int32))

    def batch(
        self, pieces: Sequence[tuple[int, int, Sequence[int]]], padding: int = 0, rows: Tensor | None = None
    ) -> FlatBatch:
        """A batch of (state slot, first position, token ids) pieces, followed by `padding` rows."""
        ids = [t for _, _, tokens in pieces for t in tokens]
        slots = [s for s, _, tokens in pieces for _ in tokens]
        positions = [start + i for _, start, tokens in pieces for i in range(len(tokens))]
        row_slot, position = torch.tensor(slots + [0] * padding), torch.tensor(positions + [0] * padding)
        live = torch.arange(len(ids) + padding) < len(ids)
        tokens = torch.tensor(ids + [0] * padding)
        rows = torch.arange(len(ids)) if rows is None else rows
        return FlatBatch.of_rows(self.cache, tokens, position, row_slot, rows, live)
