"""Rotary scaling of a GGUF file, which transformers does not read, as transformers' own parameters.

A GGUF states a scaling in its metadata (`ARCH.rope.scaling.*`) or as a tensor of divisors for the frequencies:
`rope_freqs.weight` (Llama 3.1 and later), `rope_factors_short.weight` and `rope_factors_long.weight` (Phi-3).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.errors import ModelError

FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_REMEDY = "choose the checkpoint in Hugging Face layout"


def apply_rope_scaling(config: Any, gguf: Path, name: str) -> None:
    """Write the rotary base and scaling that `gguf` states into `config`, a transformers configuration made from it.

    Models with rotary parameters per kind of layer scale those with full attention alone, as the file's own readers do;
    a base for sliding layers is a key of its own.

    Raises:
        ModelError: a scaling that cannot be expressed.
    """
    import gguf as reader_library

    reader = reader_library.GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors if tensor.name in FREQUENCY_TENSORS}
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None)
    prefix = f"{fields.get('general.architecture')}.rope."
    stated = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    scaling = rope_parameters(stated, tensors, getattr(text, "max_position_embeddings", None), name)
    if not isinstance(parameters, dict):
        if scaling:
            raise ModelError(
                f"target '{name}' scales its rotary positions, which {type(config).__name__} has not; {_REMEDY}"
            )
        return
    full = parameters.get("full_attention", parameters)
    if "freq_base" in stated:
        full["rope_theta"] = float(stated["freq_base"])
    if "freq_base_swa" in stated and "sliding_attention" in parameters:
        parameters["sliding_attention"]["rope_theta"] = float(stated["freq_base_swa"])
    kind = full.get("rope_type", "default")
    if isinstance(kind, str) and kind not in _KINDS:  # frequencies of the architecture's own, such as Gemma 4's
        if scaling and not _only_switches_off(tensors.get("rope_freqs.weight")):
            raise ModelError(f"target '{name}' scales its rotary positions of type {kind!r}; {_REMEDY}")
        return
    kept = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if fields.get("general.architecture") == "gpt-oss":
        kept["truncate"] = False  # of YaRN's correction range: the architecture's definition, which no GGUF states
    full.clear()
    full.update({"rope_type": "default", **kept, **scaling})
    if "rope_scaling" in vars(text):
        text.rope_scaling = None  # transformers' GGUF reader may leave its own reading here; `rope_parameters` rules


def _only_switches_off(divisors: np.ndarray | None) -> bool:
    """Whether divisors leave every frequency as it is or switch it off, which a configuration states in its own way."""
    return divisors is not None and bool(((divisors == 1.0) | (divisors >= 1e29)).all())


def rope_parameters(
    stated: Mapping[str, Any], tensors: Mapping[str, np.ndarray], max_position_embeddings: int | None, name: str
) -> dict[str, Any]:
    """transformers' rotary parameters for what a GGUF states; empty where nothing is scaled.

    Args:
        stated: the metadata under `ARCH.rope.`, without that prefix.
        tensors: those of `FREQUENCY_TENSORS` that the file has, [rotary dimensions / 2] float32.
        max_position_embeddings: the context length.
        name: of the target, for messages.
    """
    original = int(stated.get("scaling.original_context_length") or max_position_embeddings or 0)
    kind = stated.get("scaling.type") or "linear"  # the format's default, where a factor is all it states
    factor = float(stated.get("scaling.factor") or stated.get("scale_linear") or 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelError(f"target '{name}': rotary scaling of type {kind!r} is not known to surefoot; {_REMEDY}")
    if "rope_factors_short.weight" in tensors or "rope_factors_long.weight" in tensors:
        short = tensors.get("rope_factors_short.weight")
        long = tensors.get("rope_factors_long.weight")
        if short is None or long is None:
            raise ModelError(f"target '{name}' has rope_factors for one context length only; {_REMEDY}")
        parameters = _divisors(short, long, original)
        if (scale := stated.get("scaling.attn_factor")) is not None:
            parameters["attention_factor"] = float(scale)
        else:
            parameters["factor"] = (max_position_embeddings or original) / original
        return parameters
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None:
        if kind == "yarn" or (kind == "linear" and factor != 1.0):
            raise ModelError(f"target '{name}' has rope_freqs and {kind} scaling at once; {_REMEDY}")
        # Divisors that hold at every length: transformers' longrope with one list for both of its lengths.
        return {
            **_divisors(divisors, divisors, max_position_embeddings or original),
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    if kind == "longrope":
        raise ModelError(f"target '{name}' states longrope scaling without rope_factors; {_REMEDY}")
    if kind == "none" or factor == 1.0:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in (("beta_fast", "scaling.yarn_beta_fast"), ("beta_slow", "scaling.yarn_beta_slow")):
        if theirs in stated:
            yarn[ours] = float(stated[theirs])
    attention = float(stated.get("scaling.yarn_attn_factor") or stated.get("scaling.attn_factor") or 1.0)
    if attention != 1.0:
        yarn["attention_factor"] = attention * (1.0 + 0.1 * float(np.log(factor)))
    if (
        stated.get("scaling.yarn_log_multiplier")
        or stated.get("scaling.alpha")
        or stated.get("scaling.yarn_ext_factor") not in (None, 1.0)
    ):
        raise ModelError(
            f"target '{name}': its YaRN scaling has a log multiplier or mixing factor of its own; {_REMEDY}"
        )
    return yarn


def _divisors(short: np.ndarray, long: np.ndarray, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [float(value) for value in short.ravel()],
        "long_factor": [float(value) for value in long.ravel()],
        "original_max_position_embeddings": original,
    }
