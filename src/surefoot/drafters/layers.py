"""The layers of a block drafter's network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.drafters.config import DSparkConfig
from surefoot.errors import DrafterError
from surefoot.kernels.elementwise import Activation, gated_activation, rms_norm
from surefoot.kernels.elementwise import rotary as rotate_rows
from surefoot.kernels.formats import StoredWeight
from surefoot.kernels.linear import PackedLinear, joined_bias

Rotation = tuple[Tensor, Tensor]  # cos and sin, [..., rotary_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, block's q, k, v [..., H, D]) -> [..., Hq, D]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
_FUSED_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, *shape: int, eps: float, scale: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(*shape)) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None and not torch.is_grad_enabled():
            if self.weight.dim() == 1:
                return rms_norm(x, self.weight, self.eps)
            return torch.stack([rms_norm(x[..., i, :], w, self.eps) for i, w in enumerate(self.weight)], -2)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide if self.weight is None else wide * self.weight.to(torch.float32)).to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding of one layer type, by absolute position."""

    inv_freq: Tensor

    def __init__(self, config: DSparkConfig, layer_type: str) -> None:
        super().__init__()
        inv_freq, self.scale = _frequencies(config, layer_type)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._table: Tensor | None = None  # [positions, 2, rotary_dim]

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions [...] int64 -> cos and sin [..., rotary_dim]."""
        angles = positions.unsqueeze(-1).to(torch.float32) * self.inv_freq.to(torch.float32)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def look_up(self, positions: Tensor, dtype: torch.dtype, limit: int) -> Rotation:
        """The same from a table of all positions below `limit`, made on first use: [T] int64 -> [T, rotary_dim] each."""
        table = self._table
        if table is None or len(table) < limit or table.dtype != dtype or table.device != positions.device:
            table = torch.stack(self(torch.arange(limit, device=positions.device), dtype), 1)
            self._table = table
        cos, sin = table[positions].unbind(1)
        return cos, sin


def _frequencies(config: DSparkConfig, layer_type: str) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] and the factor on cos and sin; scaled types are transformers' own."""
    rope = config.rope(layer_type)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        return 1.0 / (float(rope["rope_theta"]) ** exponent), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # 'dynamic' and 'longrope' change with the length of whatever else is in the batch: a request would not be its own.
    if kind in ("dynamic", "longrope") or kind not in ROPE_INIT_FUNCTIONS:
        allowed = sorted({"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"})
        raise DrafterError(f"rope_type {kind!r} of the drafter is not supported; allowed are {', '.join(allowed)}")
    try:
        holder = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(rope),
        )
        with torch.device("cpu"):
            inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](holder, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        raise DrafterError(
            f"rope_parameters {dict(rope)} of the drafter cannot be used ({type(problem).__name__}: {problem}): repair its "
            "config.json"
        ) from None
    return inv_freq, float(scale)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the leading rotary_dim of every head: x [..., H, D] by cos, sin [..., rotary_dim]."""
    if x.dim() == 3 and not torch.is_grad_enabled():
        return rotate_rows(x, *rotation)
    cos, sin = (t.unsqueeze(-2) for t in rotation)
    dim = cos.shape[-1]
    rotated, rest = x[..., :dim], x[..., dim:]
    low, high = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


class DraftAttention(nn.Module):
    """Projections of one layer; the attention itself is handed in."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        bias, eps = config.attention_bias, config.rms_norm_eps
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, eps=eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=eps) if config.qk_norm else nn.Identity()
        self.v_norm = RMSNorm(config.head_dim, eps=eps, scale=False) if config.value_norm else nn.Identity()
        self.qkv_proj: PackedLinear | None = None  # all three, once packed

    def query(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., d] -> [..., Hq, D]."""
        return self._rotated(self.q_proj(x), self.q_norm, rotation)

    def key_value(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[..., d] of context or block -> key and value [..., Hkv, D]."""
        return self.finish(rotation, *(layer(x) for layer in self.key_value_layers))

    def query_key_value(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[..., d] of the block -> query, key and value."""
        if self.qkv_proj is None:
            return self.query(x, rotation), *self.key_value(x, rotation)
        query, *key_value = self.qkv_proj.split(self.qkv_proj(x))
        return self._rotated(query, self.q_norm, rotation), *self.finish(rotation, *key_value)

    def finish(self, rotation: Rotation, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Projected key and value [..., Hkv * D] (one for both: `value` None) -> normalised and rotated [..., Hkv, D]."""
        return self._rotated(key, self.k_norm, rotation), self.v_norm(self._heads(key if value is None else value))

    @property
    def key_value_layers(self) -> tuple[nn.Linear, ...]:
        return (self.k_proj,) if self.v_proj is None else (self.k_proj, self.v_proj)

    def _rotated(self, x: Tensor, norm: nn.Module, rotation: Rotation) -> Tensor:
        return rotate(norm(self._heads(x)), rotation)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def fuse(self, stored: Mapping[nn.Module, StoredWeight]) -> None:
        self.qkv_proj = packed_product([self.q_proj, *self.key_value_layers], stored)
        del self.q_proj, self.k_proj, self.v_proj


class GatedMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fused_activation = _FUSED_ACTIVATIONS.get(config.hidden_act)
        self.gate_up_proj: PackedLinear | None = None  # both, once packed

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is not None and self.fused_activation is not None:
            return self.down_proj(gated_activation(self.gate_up_proj(x), self.fused_activation))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))

    def fuse(self, stored: Mapping[nn.Module, StoredWeight]) -> None:
        if self.fused_activation is not None:
            self.gate_up_proj = packed_product([self.gate_proj, self.up_proj], stored)
            del self.gate_proj, self.up_proj


class DraftLayer(nn.Module):
    """One decoder layer over the block's slots.

    `post_attention_layernorm` comes before the MLP in the Qwen3 family and after the attention in Gemma's, where
    `pre_feedforward_layernorm` takes its place.
    """

    def __init__(self, config: DSparkConfig, index: int) -> None:
        super().__init__()
        self.index, self.layer_type = index, config.layer_types[index]
        self.self_attn = DraftAttention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.sandwich = config.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        attention = self.self_attn
        normed = self.input_layernorm(hidden)
        mixed = attend(self.index, *attention.query_key_value(normed, rotation))
        mixed = attention.o_proj(mixed.flatten(-2))
        if not self.sandwich:
            hidden = hidden + mixed
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        else:
            hidden = hidden + self.post_attention_layernorm(mixed)
            hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden if self.layer_scalar is None else hidden * self.layer_scalar


def packed_product(layers: list[nn.Linear], stored: Mapping[nn.Module, StoredWeight]) -> PackedLinear:
    """Layers of the same input as one packed product, from their stored weights where there are. Nothing is taken away."""
    return PackedLinear([stored.get(layer, layer.weight) for layer in layers], joined_bias(layers))
