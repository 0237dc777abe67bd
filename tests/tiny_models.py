"""Small random targets for tests: real transformers architectures, a few thousand parameters, made on the spot."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from surefoot.targets.target import Target

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt_oss")
"""Full attention; normed queries and keys; sliding and full layers with soft scaling; sliding windows with sinks."""

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(architecture: str, vocab_size: int) -> Any:
    common = {**_COMMON, "vocab_size": vocab_size}
    sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    if architecture == "llama":
        return transformers.LlamaConfig(**common)
    if architecture == "qwen3":
        return transformers.Qwen3Config(**common)
    if architecture == "gemma3":
        return transformers.Gemma3TextConfig(**common, **sliding, query_pre_attn_scalar=8)
    if architecture == "gpt_oss":
        return transformers.GptOssConfig(**common, **sliding, num_local_experts=2, num_experts_per_tok=1)
    raise ValueError(architecture)


@cache
def tiny_target(
    architecture: str = "llama", vocab_size: int = 64, seed: int = 0, sharpness: float = 8.0, dtype: str = "float32"
) -> Target:
    """A target with random weights; `sharpness` scales the logits so that greedy and sampled texts are not pure noise."""
    torch.manual_seed(seed)
    config = _config(architecture, vocab_size)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    return Target(model, None, name=f"tiny-{architecture}")
