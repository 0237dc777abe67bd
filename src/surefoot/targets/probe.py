"""Can surefoot serve this model? Asked of the model itself, not of a list of names.

Two tokens run through the model with a cache that only records. What each layer stores, which attention module belongs
to which layer, and whether a layer keeps anything surefoot does not know how to rewind all come out of that one pass.
It runs on the meta device as well, where it costs nothing and needs no weights.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from surefoot.cache.paged import LayerSpec
from surefoot.errors import ModelError
from surefoot.targets.attention import (
    ASKS_FOR_POSITIONS,
    ATTENTION_NAME,
    STEP_ARGUMENT,
    FlatCache,
    StepMissing,
    surefoot_attention,
)

_PROBE_NAME = "surefoot-probe"  # surefoot's attention, but with masks: they tell where the model has windows
_UNKNOWN_MASK = -1

_RECURRENT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "ssm")
_SERVABLE = ("full_attention", "sliding_attention", "attention")
_REMEDY = "choose a decoder-only model with ordinary attention layers (Llama, Qwen, Gemma, Mistral, GPT-OSS, ...)"


@dataclass(frozen=True)
class ModelShape:
    """What the probe learned about a servable model."""

    layers: tuple[LayerSpec, ...]
    decoder_layers: nn.ModuleList  # the modules whose outputs are the features
    cache_argument: str  # transformers 5.24 calls it `cache`, releases before it `past_key_values`
    keeps_rows: bool  # the model takes `logits_to_keep`


class _Recorder(FlatCache):
    """A cache that stores nothing and remembers shapes.

    Its own attributes are private: whatever else a model asks of transformers' `Cache` must not be found here.
    """

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._pending: tuple[int, Tensor, Tensor] | None = None
        self._specs: dict[int, LayerSpec] = {}
        self._modules: dict[int, nn.Module] = {}
        self._running: list[nn.Module] = []  # modules of decoder layers that are in their forward, outermost first

    def _watch(self, model: nn.Module) -> ExitStack:
        """Know from now on which modules inside the model's lists of layers are running; until the stack is closed."""
        hooks = ExitStack()
        listed = [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]
        for module in dict.fromkeys(part for layer in listed for part in layer.modules()):
            hooks.callback(module.register_forward_pre_hook(lambda part, _: self._running.append(part)).remove)
            hooks.callback(module.register_forward_hook(lambda *_: self._running.pop() and None).remove)
        return hooks

    def _refuse_questions(self, what: str) -> None:
        if self._running:
            asker = type(self._running[-1]).__name__
            raise _refusal(
                self._architecture, f"{asker} asks its cache for '{what}', which surefoot's answers per request"
            )

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        if not (self._running and type(self._running[-1]).__name__ in ASKS_FOR_POSITIONS):
            self._refuse_questions("get_seq_length")
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        self._refuse_questions("get_query_offset")
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        self._refuse_questions("get_mask_sizes")
        return super().get_mask_sizes(query_length, layer_idx)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise _refusal(
                self._architecture,
                f"layer {layer_idx} caches tensors of shape {tuple(key.shape)} and {tuple(value.shape)} instead of one "
                "key and one value per head and position",
            )
        self._pending = (layer_idx, key, value)
        return key, value

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        if self._pending is None:
            name = type(module).__name__
            raise _refusal(self._architecture, f"{name} reads the cache of another layer (shared keys and values)")
        layer, stored_key, stored_value = self._pending
        if stored_key.shape != key.shape or stored_value.shape != value.shape:
            raise _refusal(
                self._architecture, f"layer {layer} attends to other tensors than it caches (latent attention)"
            )
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise _refusal(self._architecture, f"layer {layer} attends in both directions")
        for argument in ("position_bias", "position_bias_mask", "indices", "topk_indices"):
            if options.get(argument) is not None:
                raise _refusal(self._architecture, f"layer {layer} attends with a '{argument}' of its own")
        mask, window = options["attention_mask"], options.get("sliding_window")
        if mask is not None:
            if mask.dtype != torch.int64 or mask.numel() != 1 or mask.item() == _UNKNOWN_MASK:
                raise _refusal(self._architecture, f"layer {layer} masks positions in a way surefoot does not know")
            window = mask.item() or None
        self._pending = None
        self._specs[layer] = LayerSpec.attention(key.shape[1], key.shape[-1], value.shape[-1], window)
        self._modules[layer] = module
        return query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])

    def __getattr__(self, name: str) -> Any:
        # Only reached for what FlatCache lacks: a layer that wants more from its cache than keys and values.
        if any(word in name for word in ("conv", "ssm", "recurrent", "previous_state")):
            raise _recurrent(self._architecture, f"'{name}' of its cache")
        raise AttributeError(f"surefoot's cache has no '{name}'")


def _refusal(architecture: str, reason: str) -> ModelError:
    return ModelError(f"{architecture} cannot be served: {reason}; {_REMEDY}")


def _recurrent(architecture: str, evidence: str) -> ModelError:
    return _refusal(architecture, f"it keeps a recurrent state that surefoot cannot rewind yet ({evidence})")


def _window_of_mask(*, mask_function: Any, local_size: int | None = None, **unused: Any) -> Tensor:
    """In the place of a mask, what kind of mask the model asked for: its window, 0 for none, or `_UNKNOWN_MASK`.

    Args:
        mask_function: (batch, head, query position, key position) -> may it be seen?
        local_size: the window the mask is said to have; checked on positions around it.
    """
    zero, far = torch.tensor(0), local_size or 8
    kind = local_size or 0
    for query in (0, far - 1, far, 3 * far + 1):
        key = torch.arange(query + 3)
        expected = (key <= query) & (key > query - (local_size or query + 1))
        if not torch.equal(mask_function(zero, zero, torch.tensor(query), key).expand_as(key), expected):
            kind = _UNKNOWN_MASK
    return torch.full((1, 1, 1, 1), kind, dtype=torch.int64, device="cpu")


AttentionInterface.register(_PROBE_NAME, surefoot_attention)
AttentionMaskInterface.register(_PROBE_NAME, _window_of_mask)


def text_config(config: Any) -> Any:
    """The language model's part of a transformers configuration (the whole of it for a text-only model)."""
    return config.get_text_config(decoder=True)


def architecture_name(config: Any, model: nn.Module | None = None) -> str:
    if model is not None:
        return type(model).__name__
    stated = getattr(config, "architectures", None)
    return str(stated[0]) if isinstance(stated, (list, tuple)) and stated else type(config).__name__


def check_config(config: Any, architecture: str | None = None) -> None:
    """Refuse from the configuration alone what no probe is needed for. Raises `ModelError`."""
    architecture, text = architecture or architecture_name(config), text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(architecture, "it is an encoder-decoder model, surefoot serves decoder-only models")
    for attribute in ("layer_types", "layers_block_type"):
        for kind in dict.fromkeys(getattr(text, attribute, None) or ()):
            if kind in _SERVABLE:
                continue
            if kind in _RECURRENT:
                raise _recurrent(architecture, f"layers of type '{kind}'")
            raise _refusal(architecture, f"surefoot has no attention for layers of type '{kind}'")
    if getattr(text, "use_bidirectional_attention", False):
        raise _refusal(architecture, "it attends in both directions")


@torch.no_grad()
def probe(model: Any) -> ModelShape:
    """Run two tokens through `model` and read off what it stores. Leaves it with surefoot's attention.

    Raises:
        ModelError: the model cannot be served; the message names the architecture and the reason.
    """
    config: Any = model.config
    architecture, text = architecture_name(config, model), text_config(config)
    check_config(config, architecture)
    if getattr(model, "_is_stateful", False):
        raise _recurrent(architecture, "transformers marks it as stateful")
    parameters = inspect.signature(model.forward).parameters
    cache_argument = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    if cache_argument is None or "position_ids" not in parameters:
        raise _refusal(architecture, "its forward takes no cache or no position ids")

    recorder = _Recorder(architecture)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    arguments = {cache_argument: recorder, STEP_ARGUMENT: recorder, "use_cache": True}
    try:
        model.set_attn_implementation(_PROBE_NAME)
        with recorder._watch(model):
            model(input_ids=ids, position_ids=torch.arange(2, device=ids.device)[None], **arguments)
    except StepMissing as error:
        raise _refusal(architecture, str(error)) from error
    except ModelError:
        raise
    except (AttributeError, KeyError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = f"a trial pass over two tokens failed ({type(error).__name__}: {(str(error) or '-').splitlines()[0]})"
        raise _refusal(architecture, reason) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)

    missing = [layer for layer in range(text.num_hidden_layers) if layer not in recorder._specs]
    if missing:
        listed = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        raise _refusal(architecture, f"layer {listed} did not go through transformers' AttentionInterface")
    longest = getattr(text, "max_position_embeddings", None)
    return ModelShape(
        layers=tuple(_without_idle_window(recorder._specs[layer], longest) for layer in sorted(recorder._specs)),
        decoder_layers=_decoder_layers(model, recorder._modules),
        cache_argument=cache_argument,
        keeps_rows="logits_to_keep" in parameters,
    )


def _without_idle_window(spec: LayerSpec, longest: int | None) -> LayerSpec:
    """A window no shorter than the model's context hides nothing; without it the layer needs no cache group of its own."""
    if spec.window is None or longest is None or spec.window < longest:
        return spec
    return replace(spec, window=None)


def _decoder_layers(model: nn.Module, attention: dict[int, nn.Module]) -> nn.ModuleList:
    """The module list whose i-th entry contains the attention of layer i."""
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == len(attention)
            and all(any(part is attention[i] for part in layer.modules()) for i, layer in enumerate(module))
        ):
            return module
    raise _refusal(type(model).__name__, "its decoder layers are not one list whose outputs could be captured")
