"""A target of real size and random weights, for timing where no checkpoint can be brought.

`python -m tests.cuda.random_target DIR` writes it: the sizes are those of Qwen2.5-Coder 0.5B, in bfloat16. Its
texts mean nothing, but a pass costs what a pass costs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from tests.tiny_tokenizers import byte_level_tokenizer

SIZES = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


@torch.no_grad()
def write(directory: Path, **sizes: int) -> None:
    """Save model and tokenizer; words the tokenizer lacks are never the likeliest."""
    torch.manual_seed(0)
    tokenizer = byte_level_tokenizer()
    config = transformers.Qwen2Config(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.get_output_embeddings().weight[len(tokenizer) :] = 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
