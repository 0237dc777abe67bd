"""The one place where a loaded transformers model is changed for speed.

Every step is a few lines, can be left out, and must not change what the model computes (quantisation aside, which has
to be asked for). What a step does not recognise it leaves alone: an unknown architecture runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear, Quantization

# Projections of decoder layers that every model calls as modules; a router or anything else whose weight a model reads
# directly is not among them.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "dense")
_FEED_FORWARD = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2")


def _pack_projections(model: Any, quantize: Quantization | None) -> bool:
    """Attention and feed-forward projections become thin products over packed weights."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in (*_ATTENTION, *_FEED_FORWARD) and type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear.from_linear(child, quantize))
    return bool(found)


def _pack_head(model: Any, quantize: Quantization | None) -> bool:
    """The LM head as a packed product; a tied embedding keeps its own tensor for look-ups."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    model.set_output_embeddings(PackedLinear.from_linear(head, quantize))
    return True


STEPS: dict[str, Callable[[Any, Quantization | None], bool]] = {
    "packed-projections": _pack_projections,
    "packed-head": _pack_head,
}
DEFAULT = tuple(STEPS)


def optimise(model: Any, *, steps: Collection[str] = DEFAULT, quantize: Quantization | None = None) -> list[str]:
    """Apply the steps to a transformers model, in place.

    Args:
        model: a causal LM on the CPU; on another device, or without native kernels, nothing is changed.
        steps: names from `STEPS`; they run in the order of `STEPS`.
        quantize: "int8" stores packed weights as int8 (exact with respect to the quantised weights from then on).

    Returns:
        The steps that changed something.

    Raises:
        ConfigurationError: a step that does not exist.
    """
    if unknown := sorted(set(steps) - set(STEPS)):
        raise ConfigurationError(f"optimisation step '{unknown[0]}': allowed are {', '.join(STEPS)}")
    if model.device.type != "cpu" or not native.available():
        return []
    return [name for name, step in STEPS.items() if name in steps and step(model, quantize)]
