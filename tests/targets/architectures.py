"""Every causal architecture of transformers that a tiny random configuration can be made of: served exactly, or refused.

`python -m tests.targets.architectures [MODEL_TYPE ...]` prints a table with one line per architecture. Each is run greedily by
transformers itself (the whole text anew for every token, no cache), by surefoot without a drafter, and with prompt lookup.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from surefoot import LLM, SamplingParams
from surefoot.errors import ModelError
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target

Outcome = Literal["equal", "refused", "DIFFERS", "FAILED", "not built"]

_NEW_TOKENS = 24
_LARGEST = 4_000_000  # parameters: what ignores our sizes is not tiny, and is left out
# transformers' configurations agree on few names, and ignore those that they do not have.
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 6, "attention_dropout": 0.0,
    # older names of the same
    "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 48, "d_model": 32, "num_layers": 3,
    "num_heads": 4, "ffn_dim": 48, "decoder_layers": 3, "decoder_attention_heads": 4, "attention_heads": 4,
    "decoder_ffn_dim": 48, "max_seq_len": 128, "n_layers": 3, "n_heads": 4, "ffn_hidden_size": 48, "word_embed_proj_dim": 32,
    "rotary_dim": 4, "attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 6,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_topk": 2, "moe_num_experts": 4, "moe_k": 2, "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "first_k_dense_replace": 1, "num_shared_experts": 1,
    # latent and linear attention, states
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "query_pre_attn_scalar": 8, "state_size": 4, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_ssm": 64, "mamba_n_groups": 1, "lru_width": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What became of one architecture."""

    model_type: str
    architecture: str
    outcome: Outcome
    detail: str = ""


def tiny(model_type: str) -> Any:
    """A random float32 model, in which every parameter is away from its default. Raises whatever its code raises."""
    config = _configuration(CONFIG_MAPPING[model_type])
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ValueError("a composite of several models")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    if (size := sum(parameter.numel() for parameter in model.parameters())) > _LARGEST:
        raise ValueError(f"{size:,} parameters in spite of tiny sizes")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all() or parameter.abs().max() == 0 or parameter.abs().max() > 1e3:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def _configuration(config_class: Any) -> Any:
    """With as many of our sizes as it takes: some are computed from others, and some must agree."""
    sizes = dict(_SIZES)
    for _ in range(8):
        try:
            return config_class(**sizes)
        except Exception as error:
            computed = re.search(r"property '(\w+)' of", str(error))
            if computed is not None and computed[1] in sizes:
                del sizes[computed[1]]
            elif sizes.get("num_key_value_heads") == 2:
                sizes["num_key_value_heads"] = 4
            else:
                raise
    raise ValueError("no configuration")


def prompts(vocab_size: int) -> list[list[int]]:
    """Short texts that repeat themselves, so that prompt lookup has something to find."""
    generator = torch.Generator().manual_seed(5)
    phrase = torch.randint(3, vocab_size, (7,), generator=generator).tolist()
    other = torch.randint(3, vocab_size, (11,), generator=generator).tolist()
    return [phrase * 3, other + other[:4]]


@torch.no_grad()
def reference(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> str | None:
    """None if `answer` is what greedy decoding of the stock model says, else where it leaves it.

    One pass over prompt and answer: every answered token is compared with the stock model's choice after the tokens before
    it. Choices whose logits agree to 1e-3 of the row's largest are ties, which two orders of summation may resolve differently.
    """
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    for index, (row, token) in enumerate(zip(logits, answer, strict=True)):
        gap = float(row.max() - row[token])
        if not gap <= 1e-3 * max(1.0, float(row.abs().max())):
            return f"answered token {index} is {token}, the stock model's is {int(row.argmax())} by {gap:.3g}"
    return None


def examine(model_type: str) -> Row:
    """Serve one architecture and compare, or say why it is not served."""
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    try:
        model = tiny(model_type)
    except Exception as error:
        return Row(model_type, name, "not built", (str(error).strip().splitlines() or [type(error).__name__])[0][:90])
    name = type(model).__name__
    try:
        target = Target(copy.deepcopy(model), name=model_type)
    except ModelError as refusal:
        tidy = "\n" not in str(refusal) and name in str(refusal)
        return Row(model_type, name, "refused" if tidy else "FAILED", str(refusal))
    except Exception as error:
        return Row(model_type, name, "FAILED", f"{type(error).__name__}: {error}")
    try:
        optimise(target.model)
        asked = prompts(target.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
        answers = []
        for drafter in ("none", "prompt-lookup"):
            llm = LLM(target, drafter=drafter, cost_table="none", max_num_seqs=2, cache_bytes=1 << 24, seed=0)
            answers.append([output.token_ids for output in llm.generate(asked, params, progress=False)])
            llm.close()
        for prompt, alone, drafted in zip(asked, *answers, strict=True):
            if alone != drafted:
                return Row(model_type, name, "DIFFERS", "with and without prompt lookup")
            if len(alone) != _NEW_TOKENS:
                return Row(model_type, name, "FAILED", f"{len(alone)} tokens instead of {_NEW_TOKENS}")
            if (difference := reference(model, prompt, alone)) is not None:
                return Row(model_type, name, "DIFFERS", difference)
    except Exception as error:
        return Row(model_type, name, "FAILED", f"{type(error).__name__}: {error}")
    return Row(model_type, name, "equal")


def examine_all(names: Sequence[str] = ()) -> Iterator[Row]:
    """One row per causal architecture of transformers, or per name given."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        for model_type in names or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)):
            yield examine(model_type)
    finally:
        logging.disable(logging.NOTSET)


def line(row: Row) -> str:
    return f"{row.model_type:28} {row.architecture:34} {row.outcome:10} {row.detail}".rstrip()


if __name__ == "__main__":
    for found in examine_all(sys.argv[1:]):
        print(line(found), flush=True)
