"""Decoder-layer modules with their small operations and parallel products fused. Put in place by `optimise`.

Each is built from the transformers module it replaces and computes what that module computes, on flat rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.kernels import native
from surefoot.kernels.elementwise import Activation, gated_activation, rms_norm, rotary
from surefoot.kernels.linear import PackedLinear, Quantization
from surefoot.kernels.row_linear import RowLinear
from surefoot.targets.attention import STEP_ARGUMENT, FlatCache, PagedStep


def fused_product(linears: Sequence[nn.Linear], quantize: Quantization | None = None) -> PackedLinear | RowLinear:
    """One product for layers of the same input, whose rows do not depend on one another's number."""
    if linears[0].weight.device.type == "cpu":
        return PackedLinear.from_linears(linears, quantize)
    return RowLinear.from_linear(linears[0]) if len(linears) == 1 else RowLinear.from_linears(linears)


class FusedAttention(nn.Module):
    """Self-attention with one q·k·v product and rotary embedding in place of its separate parts."""

    def __init__(self, attention: Any, quantize: Quantization | None) -> None:
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

    def __init__(self, feed_forward: Any, activation: Activation, quantize: Quantization | None) -> None:
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
    """A decoder layer of fused and packed parts: norm, attention, norm, feed-forward; in Gemma 3 a norm behind each too.

    A pass over the paged cache is one native call. For any other cache, and while `torch.compile` traces it, the parts run
    one by one; the bits are the same.
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
        self._weights = [None if norm is None else norm.weight for norm in self._norms(layer)]
        for product in self._products(layer):
            self._weights += [product.weight, product.scale, product.bias]
        self._constants = (
            attention.o_proj.in_features // attention.head_dim,  # query heads
            feed_forward.down_proj.in_features,
            norm.eps,
            norm.unit_offset,
            feed_forward.activation == "gelu_tanh",
        )

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

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:  # [1, T, hidden]
        step, rotation, dtype = options.get(STEP_ARGUMENT), options["position_embeddings"], hidden_states.dtype
        one_dtype = dtype in native.DTYPES and rotation[0].dtype == self.input_layernorm.weight.dtype == dtype
        if one_dtype and not torch.compiler.is_compiling() and isinstance(step, PagedStep) and step.stores(dtype):
            return self._native(hidden_states[0], step, *rotation)[None]
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        if self.four_norms:
            hidden_states = hidden_states + self.post_attention_layernorm(attended)
            fed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
            return hidden_states + self.post_feedforward_layernorm(fed)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def _native(self, x: Tensor, step: PagedStep, cos: Tensor, sin: Tensor) -> Tensor:
        batch, cache, layer = step.batch, step.cache, self.self_attn.layer_idx
        group = cache.target_group[layer]
        return torch.ops.surefoot.decoder_layer(
            x,
            cos[0],
            sin[0],
            *cache.target_kv[layer],
            batch.cache_slots[group],
            batch.block_tables[group],
            batch.row_slot,
            batch.kv_lens,
            cache.block_size,
            self.self_attn.scaling,
            cache.target_layers[layer].window,
            *self._constants,
            self._weights,
        )


def activation_of(function: Any) -> Activation | None:
    """Which fused activation computes what `function` computes (None: no one does)."""
    x = torch.linspace(-6, 6, 97)
    if torch.allclose(function(x), F.silu(x), atol=1e-6):
        return "silu"
    if torch.allclose(function(x), F.gelu(x, approximate="tanh"), atol=1e-6):
        return "gelu_tanh"
    return None
