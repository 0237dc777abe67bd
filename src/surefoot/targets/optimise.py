"""The one place where a loaded transformers model is changed for speed.

Every step is a few lines, can be left out, and must not change what the model computes (quantisation aside, which has
to be asked for). What a step does not recognise it leaves alone: an unknown architecture runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import native, row_linear, triton_support
from surefoot.targets.experts import EXECUTORS, install
from surefoot.targets.fused import (
    FusedAttention,
    FusedDecoder,
    FusedFeedForward,
    FusedLayer,
    FusedNorm,
    activation_of,
    fused_product,
)

# The families whose attention is "project, maybe normalise per head, rotate by halves, attend, project".
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma3")
_ATTENTION = tuple(f"{family}Attention" for family in _FAMILIES)
_LAYERS = tuple(f"{family}DecoderLayer" for family in _FAMILIES)
# Causal models that call their decoder with token ids and read its last hidden state alone.
_CAUSAL = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")
_FEED_FORWARD = tuple(f"{family}MLP" for family in _FAMILIES)
_NORMS = {f"{family}RMSNorm": family == "Gemma3" for family in _FAMILIES}  # name -> scaled by 1 + weight?
# Projections that every model calls as modules; a router, or anything else whose weight is read directly, is not here.
_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "dense"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2"),
)


def _children(model: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every (parent, name, child) of the model, listed before anything is replaced."""
    yield from [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def _fuse_norms(model: Any, quantize: str | None) -> bool:
    found = [item for item in _children(model) if type(item[2]).__name__ in _NORMS]
    for parent, name, norm in found:
        setattr(parent, name, FusedNorm(norm, unit_offset=_NORMS[type(norm).__name__]))
    return bool(found)


def _fuse_attention(model: Any, quantize: str | None) -> bool:
    """One q·k·v product per layer, and rotary embedding in one pass."""
    found = [item for item in _children(model) if type(item[2]).__name__ in _ATTENTION]
    for parent, name, attention in found:
        setattr(parent, name, FusedAttention(attention, quantize))
    return bool(found)


def _fuse_feed_forward(model: Any, quantize: str | None) -> bool:
    """One gate·up product per layer, and the gated activation in one pass."""
    found = [
        (parent, name, child, activation)
        for parent, name, child in _children(model)
        if type(child).__name__ in _FEED_FORWARD and (activation := activation_of(child.act_fn))
    ]
    for parent, name, feed_forward, activation in found:
        setattr(parent, name, FusedFeedForward(feed_forward, activation, quantize))
    return bool(found)


def _fuse_layers(model: Any, quantize: str | None) -> bool:
    """One native call per decoder layer whose parts were all fused before."""
    found = [item for item in _children(model) if type(item[2]).__name__ in _LAYERS and FusedLayer.fits(item[2])]
    for parent, name, layer in found:
        setattr(parent, name, FusedLayer(layer))
    return bool(found)


def _fuse_decoder(model: Any, quantize: str | None) -> bool:
    """The loop over layers that were all fused before, without what transformers does around one."""
    if type(model).__name__ not in _CAUSAL or not FusedDecoder.fits(model.model):
        return False
    model.model = FusedDecoder(model.model)
    return True


def _pack_projections(model: Any, quantize: str | None) -> bool:
    """Attention and feed-forward projections that were not fused become thin products over packed weights."""
    found = [item for item in _children(model) if item[1] in _PROJECTIONS and type(item[2]) is nn.Linear]
    for parent, name, linear in found:
        setattr(parent, name, fused_product([linear], quantize))
    return bool(found)


def _unmap_rest(model: Any, quantize: str | None) -> bool:
    """Copy what was not packed out of the mapped checkpoint file, whose pages would stay resident beside the copies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return True


def _pack_head(model: Any, quantize: str | None) -> bool:
    """The LM head as a packed product; a tied embedding keeps its own tensor for look-ups."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    model.set_output_embeddings(fused_product([head], quantize))
    return True


STEPS: dict[str, Callable[[Any, str | None], bool]] = {
    "fused-norms": _fuse_norms,
    "fused-attention": _fuse_attention,
    "fused-feed-forward": _fuse_feed_forward,
    "fused-layers": _fuse_layers,
    "fused-decoder": _fuse_decoder,
    "packed-projections": _pack_projections,
    "unmapped-rest": _unmap_rest,
    "packed-head": _pack_head,
}
DEFAULT = tuple(STEPS)
_CPU_ONLY = ("fused-layers", "fused-decoder", "unmapped-rest")


def optimise(
    model: Any, *, steps: Collection[str] = DEFAULT, quantize: str | None = None, experts: str | None = None
) -> list[str]:
    """Apply the steps to a transformers model, in place.

    Args:
        model: a causal LM on the CPU, or in 16 bits on CUDA, where products and norms become Triton's (`RowLinear`);
            without native kernels or Triton, nothing is changed.
        steps: names from `STEPS`; they run in the order of `STEPS`.
        quantize: name of the format that packed weights are stored in (`kernels/formats.py`): exact with respect to the
            quantised weights from then on. None: as they are.
        experts: name of the executor of a mixture's experts (`targets/experts.py`), on the CPU. None: transformers' own.

    Returns:
        The steps that changed something; "experts" among them where an executor was put in.

    Raises:
        ConfigurationError: a step, or an executor, that does not exist.
    """
    if experts is not None and experts not in EXECUTORS:
        raise ConfigurationError(
            f"experts {experts!r}: allowed are {', '.join(EXECUTORS)}; leave it out for transformers'"
        )
    if unknown := sorted(set(steps) - set(STEPS)):
        raise ConfigurationError(f"optimisation step '{unknown[0]}': allowed are {', '.join(STEPS)}")
    if model.device.type == "cuda":
        fits = quantize is None and model.dtype in row_linear.DTYPES and triton_support.works()
        steps = set(steps) - set(_CPU_ONLY) if fits else ()
    elif model.device.type != "cpu" or not native.available():
        return []
    applied = [name for name, step in STEPS.items() if name in steps and step(model, quantize)]
    if experts is not None and model.device.type == "cpu" and install(model, experts, quantize):
        applied.append("experts")
    return applied
