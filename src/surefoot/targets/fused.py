"""Decoder-layer modules with their small operations and parallel products fused. Put in place by `optimise`.

Each is built from the transformers module it replaces and computes what that module computes, on flat rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from surefoot.kernels import native
from surefoot.kernels.elementwise import Activation, gated_activation, rms_norm, rotary
from surefoot.kernels.linear import PackedLinear
from surefoot.kernels.row_linear import RowLinear
from surefoot.targets.attention import STEP_ARGUMENT, FlatCache, PagedStep


def fused_product(linears: Sequence[nn.Linear], quantize: str | None = None) -> PackedLinear | RowLinear:
    """One product for layers of the same input, whose rows do not depend on one another's number."""
    if linears[0].weight.device.type == "cpu":
        return PackedLinear.from_linears(linears, quantize)
    return RowLinear.from_linear(linears[0]) if len(linears) == 1 else RowLinear.from_linears(linears)


class FusedAttention(nn.Module):
    """Self-attention with one q·k·v product and rotary embedding in place of its separate parts."""

    def __init__(self, attention: Any, quantize: str | None) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.sliding_window = getattr(attention, "sliding_window", None)
        self.qkv_proj = fused_product([attention.q_proj, attention.k_proj, attention.v_proj], quantize)
        self.o_proj = fused_product([attention.o_proj], quantize)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        position_embeddings: tuple[Tensor, Tensor],  # cos, sin: [1, T, R]
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        step: FlatCache = options[STEP_ARGUMENT]
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        parts = self.qkv_proj.split(self.qkv_proj(hidden_states[0]))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # [T, H, D]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (
            rows.transpose(0, 1)[None] for rows in (rotary(query, cos, sin), rotary(key, cos, sin), value)
        )  # [1, H, T, D], the layout of transformers' cache interface
        key, value = step.update(key, value, self.layer_idx)
        arguments = {
            "attention_mask": attention_mask, "scaling": self.scaling, "sliding_window": self.sliding_window
        }  # fmt: skip
        output = step.attend(self, query, key, value, arguments)
        return self.o_proj(output.flatten(1))[None], None


class FusedFeedForward(nn.Module):
    """down(act(gate(x)) * up(x)) with one gate·up product."""

    def __init__(self, feed_forward: Any, activation: Activation, quantize: str | None) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_up_proj = fused_product([feed_forward.gate_proj, feed_forward.up_proj], quantize)
        self.down_proj = fused_product([feed_forward.down_proj], quantize)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_up_proj(x), self.activation))


class FusedNorm(nn.Module):
    """Root-mean-square normalisation in one pass."""

    def __init__(self, norm: Any, unit_offset: bool) -> None:
        super().__init__()
        self.weight, self.unit_offset = norm.weight, unit_offset
        self.eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


class FusedLayer(nn.Module):
    """A decoder layer of fused and packed parts: norm, attention, norm, feed-forward; in Gemma 3 a norm after each too.

    In a pass over the paged cache it is a native call, or part of one (`in_one_call`). For any other cache, and while
    `torch.compile` traces it, the parts run one by one; the bits are the same.
    """

    # Everything a layer has, under transformers' names.
    self_attn: FusedAttention
    mlp: FusedFeedForward
    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    pre_feedforward_layernorm: FusedNorm
    post_feedforward_layernorm: FusedNorm

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, child in layer.named_children():
            setattr(self, name, child)
        self.four_norms = hasattr(layer, "pre_feedforward_layernorm")
        attention, feed_forward, norm = layer.self_attn, layer.mlp, layer.input_layernorm
        self.shape = (
            attention.o_proj.in_features // attention.head_dim,  # query heads
            norm.eps,
            norm.unit_offset,
            feed_forward.activation == "gelu_tanh",
        )
        self._handle: Any = None
        self.index, self.scaling = attention.layer_idx, attention.scaling

    @property
    def handle(self) -> Any:
        """The layer's norms and products as the native call takes them (`layer.cpp`), made once."""
        if self._handle is None:
            norms = [None if norm is None else norm.weight for norm in self._norms(self)]
            products = [product.product for product in self._products(self)]
            heads, eps, unit_offset, gelu = self.shape
            self._handle = torch.ops.surefoot.decoder_layer(
                norms, products, heads, self.scaling, eps, unit_offset, gelu
            )
        return self._handle

    def __getstate__(self) -> dict[str, Any]:  # a copy makes a handle of its own
        return {**self.__dict__, "_handle": None}

    @classmethod
    def fits(cls, layer: Any) -> bool:
        """Whether every part of a decoder layer is what the native call computes."""
        if not isinstance(layer.self_attn, FusedAttention) or not isinstance(layer.mlp, FusedFeedForward):
            return False
        packed = [p.kernel for p in cls._products(layer) if isinstance(p, PackedLinear)]
        if len(packed) < 4 or any(kernel is None or kernel.namespace != "surefoot" for kernel in packed):
            return False
        norms = [norm for norm in cls._norms(layer) if norm is not None]
        if not all(isinstance(norm, FusedNorm) for norm in norms):
            return False
        return len({(norm.eps, norm.unit_offset, norm.weight.dtype) for norm in norms}) == 1

    @staticmethod
    def _norms(layer: Any) -> list[Any]:
        """Of input, queries, keys, attention's result, the feed-forward's input and result; None where there is none."""
        attention, second = layer.self_attn, layer.post_attention_layernorm
        feed_forward: list[Any] = [None, second, None]
        if hasattr(layer, "pre_feedforward_layernorm"):
            feed_forward = [second, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm]
        return [layer.input_layernorm, attention.q_norm, attention.k_norm, *feed_forward]

    @staticmethod
    def _products(layer: Any) -> list[Any]:
        attention, feed_forward = layer.self_attn, layer.mlp
        return [attention.qkv_proj, attention.o_proj, feed_forward.gate_up_proj, feed_forward.down_proj]

    def is_native(self, dtype: torch.dtype, step: Any, rotation: tuple[Tensor, Tensor]) -> bool:
        """Whether `in_one_call` can run a pass over rows of `dtype`."""
        one_dtype = dtype in native.DTYPES and rotation[0].dtype == self.input_layernorm.weight.dtype == dtype
        return one_dtype and isinstance(step, PagedStep) and step.stores(dtype) and not torch.compiler.is_compiling()

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:  # [1, T, hidden]
        step: Any = options.get(STEP_ARGUMENT)
        rotation = options["position_embeddings"]
        if self.is_native(hidden_states.dtype, step, rotation):
            return in_one_call([self], [rotation], hidden_states, step)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        if self.four_norms:
            hidden_states = hidden_states + self.post_attention_layernorm(attended)
            fed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
            return hidden_states + self.post_feedforward_layernorm(fed)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def in_one_call(
    layers: Sequence[FusedLayer], rotations: Sequence[tuple[Tensor, Tensor]], hidden: Tensor, step: PagedStep
) -> Tensor:
    """Consecutive layers of one shape over `hidden` [1, T, hidden], each with its cos and sin [1, T, R]: [1, T, hidden].

    Their keys and values are written into the cache of `step`. Raises RuntimeError for a cache of another dtype, or a slot
    that is not there.
    """
    batch, cache = step.batch, step.cache
    stored = [cache.target_kv[layer.index] for layer in layers]
    groups = [cache.target_group[layer.index] for layer in layers]
    rows = torch.ops.surefoot.decoder_layers.default(
        hidden[0],
        [layer.handle for layer in layers],
        [cos[0] for cos, _ in rotations],
        [sin[0] for _, sin in rotations],
        [key for key, _ in stored],
        [value for _, value in stored],
        [batch.cache_slots[group] for group in groups],
        [batch.block_tables[group] for group in groups],
        batch.row_slot,
        batch.kv_lens,
        cache.block_size,
        [cache.target_layers[layer.index].window or 0 for layer in layers],
    )
    return rows[None]


class FusedDecoder(nn.Module):
    """Embedding, fused layers, final norm: a pass over the paged cache without what transformers does around its layers.

    Before every pass transformers looks for defaults, builds masks that are not needed here, and copies its list of layers.
    Here layers side by side are one native call; one that somebody listens to (for features) is called as a module. Any other
    pass goes to transformers.
    """

    # Everything a model of these families has, under transformers' names.
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: FusedNorm
    rotary_emb: nn.Module

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name, child in model.named_children():
            setattr(self, name, child)
        self.config = model.config
        self._stock = (model,)  # in a tuple: its parts are here already
        # What rotary embedding is asked for, by layer: Gemma 3's differs between types of layers.
        typed = type(model).__name__.startswith("Gemma3")
        self._rotations = [
            (kind,) if typed else () for kind in getattr(model.config, "layer_types", None) or self.layers
        ]

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether a transformers model is made of these parts, and its layers are fused and of one shape."""
        if {name for name, _ in model.named_children()} != set(cls.__annotations__):
            return False
        layers = list(model.layers)
        if len(layers) != model.config.num_hidden_layers or not all(isinstance(layer, FusedLayer) for layer in layers):
            return False
        return len({(layer.shape, layer.input_layernorm.weight.dtype) for layer in layers}) == 1

    def forward(
        self, input_ids: Tensor | None = None, position_ids: Tensor | None = None, **options: Any
    ) -> Any:  # [1, T] both
        step, given = options.get(STEP_ARGUMENT), input_ids is not None and position_ids is not None
        if not given or not isinstance(step, PagedStep) or torch.compiler.is_compiling():
            return self._stock[0](input_ids=input_ids, position_ids=position_ids, **options)
        hidden = self.embed_tokens(input_ids)
        rotations = {kind: self.rotary_emb(hidden, position_ids, *kind) for kind in dict.fromkeys(self._rotations)}
        layers: list[Any] = [(layer, rotations[kind]) for layer, kind in zip(self.layers, self._rotations, strict=True)]
        is_native = layers[0][0].is_native(hidden.dtype, step, layers[0][1])
        for together, some in groupby(layers, lambda item: is_native and not _is_watched(item[0])):
            if together:
                called, their_rotations = zip(*some, strict=True)
                hidden = in_one_call(called, their_rotations, hidden, step)
                continue
            for layer, rotation in some:
                hidden = layer(hidden, position_embeddings=rotation, position_ids=position_ids, **options)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def _is_watched(layer: nn.Module) -> bool:
    """Whether a layer has hooks, or a `forward` of its own (a compiled one): it is then called as a module."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def activation_of(function: Any) -> Activation | None:
    """Which fused activation computes what `function` computes (None: no one does)."""
    x = torch.linspace(-6, 6, 97)
    if torch.allclose(function(x), F.silu(x), atol=1e-6):
        return "silu"
    if torch.allclose(function(x), F.gelu(x, approximate="tanh"), atol=1e-6):
        return "gelu_tanh"
    return None
