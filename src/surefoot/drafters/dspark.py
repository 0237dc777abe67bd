"""DSpark and DFlash: a block drafter that reads the target's hidden states (arXiv 2607.05147; design.md section 4).

`DSparkModel` is the network. Its `backbone` is one function for training and serving; they differ only in the attention
they give it: dense masks over known context (`forward`), or the paged cache (`DSparkDrafter`, the drafter the engine
talks to).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.cache.paged import LayerSpec, PagedCache
from surefoot.drafters.base import BlockwiseSampler, Draft, DraftContext, Drafter, DraftSampler
from surefoot.drafters.calibrations import find_calibration
from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.copying import Copier, raise_copies
from surefoot.drafters.heads import ConfidenceHead, MarkovHead
from surefoot.errors import CalibrationError, DrafterError
from surefoot.kernels import native
from surefoot.kernels.attention import paged_attention
from surefoot.kernels.elementwise import Activation, gated_activation, rms_norm
from surefoot.kernels.elementwise import rotary as rotate_rows
from surefoot.kernels.linear import PackedLinear
from surefoot.kernels.sampling import softmax_rows
from surefoot.kernels.sequential import draft_block
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.estimator import ConfidenceSource, HeadConfidence, LogisticEstimator

if TYPE_CHECKING:
    from surefoot.kernels.packing import FlatBatch
    from surefoot.targets.target import Target

Rotation = tuple[Tensor, Tensor]  # cos and sin, [..., rotary_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, block's q, k, v [..., H, D]) -> [..., Hq, D]

CERTAIN = 1e-6
"""Probabilities nearer to 0 or 1 than this count as this near, so that log-odds stay finite."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
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
    holder = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    with torch.device("cpu"):
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](holder, torch.device("cpu"))
    return inv_freq, float(scale)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the leading rotary_dim of every head: x [..., H, D] by cos, sin [..., rotary_dim]."""
    if x.dim() == 3 and not torch.is_grad_enabled():
        return rotate_rows(x, *rotation)
    cos, sin = (t.unsqueeze(-2) for t in rotation)
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    low, high = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


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

    def fuse(self, stored: set[nn.Module]) -> None:
        self.qkv_proj = _packed([self.q_proj, *self.key_value_layers], stored)
        del self.q_proj, self.k_proj, self.v_proj


class GatedMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = _ACTIVATIONS[config.hidden_act]
        self.fused_activation = _FUSED_ACTIVATIONS.get(config.hidden_act)
        self.gate_up_proj: PackedLinear | None = None  # both, once packed

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is not None and self.fused_activation is not None:
            return self.down_proj(gated_activation(self.gate_up_proj(x), self.fused_activation))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))

    def fuse(self, stored: set[nn.Module]) -> None:
        if self.fused_activation is not None:
            self.gate_up_proj = _packed([self.gate_proj, self.up_proj], stored)
            del self.gate_proj, self.up_proj


class DraftLayer(nn.Module):
    """One decoder layer over the block's slots.

    `post_attention_layernorm` stands in front of the MLP in the Qwen3 family and behind the attention in Gemma's, where
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


class DSparkModel(nn.Module):
    """The network: context projection, draft layers, embedding and head (own or the target's), and the two small heads.

    Parameter names are the tensor names of the DeepSpec layout. Embedding and head are frozen and belong to the target;
    a model may hold copies (`own_vocabulary`) or read the target's (`share`).
    """

    vocabulary: Tensor | None

    def __init__(
        self, config: DSparkConfig, *, vocabulary: Tensor | None = None, own_vocabulary: tuple[str, ...] = ()
    ) -> None:
        """
        Args:
            vocabulary: [draft_vocab_size] int64, draft id -> target id; needed where the configuration reduces it.
            own_vocabulary: which of "embed_tokens" and "lm_head" the model holds itself.
        """
        super().__init__()
        self.config = config
        if config.hidden_act not in _ACTIVATIONS:
            raise DrafterError(
                f"hidden_act {config.hidden_act!r} of the drafter is not supported; "
                f"allowed are {', '.join(_ACTIVATIONS)}"
            )
        width, target_width, eps = config.hidden_size, config.target_width, config.rms_norm_eps
        if (vocabulary is None) != (config.draft_vocab_size is None):
            raise DrafterError(
                f"draft_vocab_size {config.draft_vocab_size} with {'no' if vocabulary is None else 'a'} vocabulary: "
                "a reduced draft vocabulary needs both"
            )
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, target_width) if "embed_tokens" in own_vocabulary else None
        self.lm_head = (
            nn.Linear(target_width, config.vocabulary_size, bias=False) if "lm_head" in own_vocabulary else None
        )
        for module in (self.embed_tokens, self.lm_head):
            if module is not None:
                module.requires_grad_(False)
        self.embed_proj = nn.Linear(target_width, width, bias=False) if config.narrow else None
        self.head_proj = nn.Linear(width, target_width, bias=False) if config.narrow else None
        self.feature_norm = (
            RMSNorm(len(config.target_layer_ids), target_width, eps=eps) if config.feature_norm else None
        )
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layers: list[DraftLayer] = nn.ModuleList(  # type: ignore[assignment]
            DraftLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps=eps)
        self.rotary = nn.ModuleDict({kind: Rotary(config, kind) for kind in sorted(set(config.layer_types))})
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(
                config.vocab_size, config.vocabulary_size, config.markov_rank, width, config.markov_head_type
            )
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(width, rank)
        # In a tuple, so that the target does not become a submodule: its weights are not ours to move, save or train.
        self._target: tuple[Target, ...] = ()
        self._borrowed: set[str] = set()
        self.int8: dict[str, tuple[Tensor, Tensor]] = {}  # matrices as stored: values [N, K] int8, scale [N] float32
        self._columns: Tensor | None = None
        self.context_proj: PackedLinear | None = None  # key and value projections of all layers, once packed

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations; projections may be packed or quantised, norms never are."""
        return self.hidden_norm.weight.dtype  # type: ignore[union-attr]

    # Embedding and head

    @torch.no_grad()
    def share(self, target: Target) -> None:
        """Read embedding and head from `target` where the model holds none, or holds an exact copy (which is dropped).

        A reduced vocabulary gets the target's rows of its words as a head of its own.
        """
        self._target = (target,)
        if self.embed_tokens is not None and _same(self.embed_tokens.weight, target.embed_tokens.weight):
            self.embed_tokens = None
        if self.vocabulary is None:
            matrix = _head_matrix(target)
            if self.lm_head is not None and matrix is not None and _same(self.lm_head.weight, matrix):
                self.lm_head = None
        elif self.lm_head is None or "lm_head" in self._borrowed:
            rows = head_rows(target, self.vocabulary)
            self.lm_head = nn.utils.skip_init(
                nn.Linear, rows.shape[1], rows.shape[0], bias=False, device=rows.device, dtype=rows.dtype
            )
            self.lm_head.weight = nn.Parameter(rows, requires_grad=False)
            self._borrowed.add("lm_head")

    @torch.no_grad()
    def pack(self) -> bool:
        """Make every product a packed one for serving on the CPU, those of the same input one product.

        Matrices that were stored as int8 are read as int8. Afterwards the model can be neither trained nor saved.

        Returns:
            Whether it was done: only on a CPU with native kernels.
        """
        if any(parameter.device.type != "cpu" for parameter in self.parameters()) or not native.available():
            return False
        stored = self._restore_int8()
        attentions = [layer.self_attn for layer in self.layers if layer.self_attn.qkv_proj is None]
        if all(type(part) is nn.Linear for each in attentions for part in each.key_value_layers) and attentions:
            self.context_proj = _packed([part for each in attentions for part in each.key_value_layers], stored)
            for layer in self.layers:
                layer.self_attn.fuse(stored)
                layer.mlp.fuse(stored)
        for parent in list(self.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, _packed([child], stored))
        return True

    def _restore_int8(self) -> set[nn.Module]:
        """Give layers that were stored as int8, and not changed since, their exact weights (float32), and name them."""
        stored: set[nn.Module] = set()
        modules = dict(self.named_modules())
        for name, (values, scale) in self.int8.items():
            layer, exact = modules.get(name.removesuffix(".weight")), values * scale.unsqueeze(1)
            if type(layer) is nn.Linear and torch.equal(layer.weight, exact.to(layer.weight.dtype)):
                layer.weight = nn.Parameter(exact, requires_grad=False)
                stored.add(layer)
        self.int8 = {}
        return stored

    def own_tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint: the state without what belongs to the target."""
        return {name: t for name, t in self.state_dict().items() if name.split(".")[0] not in self._borrowed}

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target ids [...] -> inputs of the first draft layer [..., d]."""
        table = self.embed_tokens if self.embed_tokens is not None else self._lender("embed_tokens").embed_tokens
        rows = F.embedding(token_ids, table.weight).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            rows = rows * self.config.embedding_scale
        return rows if self.embed_proj is None else self.embed_proj(rows)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., d] as the target's head takes them, [..., d_target]."""
        return hidden if self.head_proj is None else self.head_proj(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Base draft logits U, before the sequential head: [..., d] -> [..., V_draft] float32."""
        return self.head_logits(hidden).to(torch.float32)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """`logits` as the head gives them, in its own dtype where nothing follows it."""
        head = self.lm_head if self.lm_head is not None else self._lender("lm_head").lm_head
        inputs, weight = self.head_input(hidden), head.weight
        if isinstance(weight, Tensor) and weight.is_floating_point():  # a quantised head takes any dtype
            inputs = inputs.to(weight.dtype)
        base, cap = head(inputs), self.config.final_logit_softcapping
        return base if cap is None else torch.tanh(base.to(torch.float32) / cap) * cap

    @property
    def columns(self) -> Tensor | None:
        """[V_target] int64, target id -> column of the draft logits, -1 where there is none; None: the identity."""
        if self.vocabulary is not None and self._columns is None:
            self._columns = self.vocabulary.new_full((self.config.vocab_size,), -1)
            self._columns[self.vocabulary] = torch.arange(len(self.vocabulary), device=self.vocabulary.device)
        return self._columns

    def column(self, token_ids: Tensor) -> Tensor:
        """The same for target ids of any shape; -1 for -1."""
        columns = self.columns
        return token_ids if columns is None else torch.where(token_ids < 0, -1, columns[token_ids.clamp(min=0)])

    def _lender(self, name: str) -> Target:
        if not self._target:
            raise DrafterError(f"the drafter has no {name} of its own: bind it to its target first")
        return self._target[0]

    # The network

    def context(self, features: Tensor) -> Tensor:
        """Target hidden states [..., m * d_target] -> injected context [..., d]."""
        features = features.to(self.dtype)
        if self.feature_norm is not None:
            features = self.feature_norm(features.unflatten(-1, (-1, self.config.target_width))).flatten(-2)
        return self.hidden_norm(self.fc(features))

    def context_key_values(self, features: Tensor, positions: Tensor, limit: int) -> list[tuple[Tensor, Tensor]]:
        """Key and value of every layer for context rows: [T, m * d_target], [T] below `limit` -> [T, Hkv, D] each."""
        context, rotations = self.context(features), self.rotations(positions, limit)
        turns = [(layer.self_attn, rotations[layer.layer_type]) for layer in self.layers]
        if self.context_proj is None:
            return [attention.key_value(context, rotation) for attention, rotation in turns]
        parts = iter(self.context_proj.split(self.context_proj(context)))
        separate = not self.config.attention_k_eq_v
        return [
            attention.finish(rotation, next(parts), next(parts) if separate else None) for attention, rotation in turns
        ]

    def rotations(self, positions: Tensor, limit: int | None = None) -> dict[str, Rotation]:
        """Rotations of absolute positions [...] by layer type; with a `limit` on them, looked up."""
        if limit is None:
            return {kind: rotary(positions, self.dtype) for kind, rotary in self.rotary.items()}
        return {kind: rotary.look_up(positions, self.dtype, limit) for kind, rotary in self.rotary.items()}  # type: ignore[operator]

    def backbone(self, block_tokens: Tensor, positions: Tensor, attend: Attend, limit: int | None = None) -> Tensor:
        """Hidden states [..., d] of block slots, given their tokens and absolute positions [...] (below `limit`)."""
        rotations = self.rotations(positions, limit)
        hidden = self.embed(block_tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotations[layer.layer_type], attend)
        return self.norm(hidden)

    def block_tokens(self, anchors: Tensor, size: int | None = None) -> Tensor:
        """Anchor tokens [...] -> inputs of their blocks [..., size]; as trained, `block_size` of them."""
        masks = self.config.mask_token_id
        return F.pad(anchors.unsqueeze(-1), (0, (size or self.config.block_size) - 1), value=masks)

    def block_positions(self, anchor_positions: Tensor, size: int | None = None) -> Tensor:
        """Positions of anchors [...] -> positions of their slots [..., size]; as trained, `block_size` of them."""
        slots = torch.arange(size or self.config.block_size, device=anchor_positions.device)
        return anchor_positions.unsqueeze(-1) + slots

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        anchors: Tensor,
        anchor_positions: Tensor,
        masks: Mapping[int | None, Tensor],
    ) -> Tensor:
        """Hidden states of many blocks over known contexts, with dense masks: the training-time twin of serving.

        Args:
            features: [N, C, m * d_target] target hidden states of N sequences.
            context_positions: [N, C] int64.
            anchors: [N, A] int64 anchor tokens.
            anchor_positions: [N, A] int64.
            masks: by window (`config.window`), [N, A * block_size, C + A * block_size] bool, see `block_mask`.

        Returns:
            [N, A, block_size, d].
        """
        context, rotations = self.context(features), self.rotations(context_positions)

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layer = self.layers[index]
            past = layer.self_attn.key_value(context, rotations[layer.layer_type])
            keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(past, (key, value), strict=True))
            mask = masks[self.config.window(index)].unsqueeze(1)
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, mask, scale=self.config.scaling, enable_gqa=True
            )
            return mixed.transpose(1, 2)

        tokens, positions = self.block_tokens(anchors).flatten(1), self.block_positions(anchor_positions).flatten(1)
        return self.backbone(tokens, positions, attend).unflatten(1, (anchors.shape[1], -1))


def block_mask(
    config: DSparkConfig,
    context_positions: Tensor,
    anchor_positions: Tensor,
    window: int | None = None,
    context_owner: Tensor | None = None,
    anchor_owner: Tensor | None = None,
) -> Tensor:
    """Who sees whom: a slot sees the context in front of its anchor, and its own block.

    Args:
        context_positions: [N, C] int64.
        anchor_positions: [N, A] int64.
        window: of the layers the mask is for (`config.window`): positions seen in front of the anchor.
        context_owner, anchor_owner: [N, C] and [N, A] document ids where a row packs several documents.

    Returns:
        [N, A * block_size, C + A * block_size] bool.
    """
    distance = anchor_positions.unsqueeze(2) - context_positions.unsqueeze(1)  # [N, A, C]
    seen = distance > 0
    if window is not None:
        seen &= distance <= window
    if context_owner is not None and anchor_owner is not None:
        seen &= anchor_owner.unsqueeze(2) == context_owner.unsqueeze(1)
    slots = torch.arange(anchor_positions.shape[1] * config.block_size, device=anchor_positions.device)
    block = slots // config.block_size
    own = block.unsqueeze(1) == block.unsqueeze(0)
    if window is not None and not config.sliding_window_non_causal:
        own &= slots.unsqueeze(1) >= slots.unsqueeze(0)
    return torch.cat([seen[:, block], own.expand(seen.shape[0], -1, -1)], 2)


class DSparkDrafter(Drafter):
    """`Drafter` over a `DSparkModel`: keeps the projected context in the paged cache and drafts one block per call.

    A draft step projects the rows just committed and the block, never the whole context again. The block runs at its
    trained length, because attention inside it is bidirectional and a shorter one is another model; fewer tokens (a smaller
    gamma, or `DraftContext.depth`) are only drawn from it, unless the configuration says that it bears `shorter_blocks`.
    Its keys and values pass through the `block_slots` cache slots from the anchor on, which `extend` overwrites once the
    target has run there.
    """

    def __init__(
        self, model: DSparkModel, gamma: int | None = None, *, origin: str = "", checkpoint: Path | None = None
    ) -> None:
        """
        Args:
            gamma: draft tokens per block, 1 ... `config.gamma` (the default).
            origin: where it came from, for messages.
            checkpoint: the directory it was loaded from, where its calibration may lie.

        Raises:
            DrafterError: gamma is out of range.
        """
        config = model.config
        self.gamma = config.gamma if gamma is None else gamma
        self.origin, self.checkpoint = origin or f"{config.kind} drafter", checkpoint
        if not 1 <= self.gamma <= config.gamma:
            raise DrafterError(
                f"gamma {gamma} for {self.origin}: it was trained for blocks of {config.gamma} draft tokens; "
                f"allowed are 1 to {config.gamma}"
            )
        self.model, self.config, self.name = model, config, config.kind
        self.calibration: Calibration | None = None  # of this gamma; replaced as a whole or updated in place
        self.model_gamma = self.gamma
        self.has_confidence_head = config.enable_confidence_head
        self.feature_layers = config.target_layer_ids
        self.block_slots = config.block_size
        self.cache_layers = tuple(
            LayerSpec.attention(config.num_key_value_heads, config.head_dim, config.head_dim, self._cache_window(layer))
            for layer in range(config.num_hidden_layers)
        )

    @property
    def vocabulary(self) -> Tensor | None:  # type: ignore[override]
        return self.model.vocabulary  # which may move

    @property
    def identity(self) -> Mapping[str, Any]:
        return vars(self.config)

    def pack(self) -> None:
        self.model.pack()

    def confidence_source(self, device: torch.device | str, calibration: str | Path | None = None) -> ConfidenceSource:
        """The head, corrected by a calibration, with an estimator that watches it.

        Args:
            calibration: made for this gamma, or for whole blocks; None: the one of the checkpoint, where there is one. The
                drafter draws as it says from now on.
        """
        if calibration is None and self.checkpoint is not None and self.has_confidence_head:
            calibration = find_calibration(self.checkpoint)
        if calibration is None or not self.has_confidence_head:
            return super().confidence_source(device, calibration)
        self.calibration = self._load_calibration(calibration, device)
        return HeadConfidence(Calibration.identity(self.gamma, device), LogisticEstimator(self.gamma, device))

    def _load_calibration(self, path: str | Path, device: torch.device | str) -> Calibration:
        """For this gamma: the file's own, or the first positions of a file for whole blocks."""
        try:
            return Calibration.load(path, self.gamma, device)
        except CalibrationError:
            if self.config.gamma == self.gamma:
                raise
        return Calibration.load(path, self.config.gamma, device).first(self.gamma)

    def bind(self, target: Target) -> None:
        """Check the fit and share the target's embedding and head.

        Raises:
            DrafterError: names both sides of every misfit.
        """
        from surefoot.drafters.checkpoint import fit_problems

        problems = fit_problems(self, target.config)
        if problems:
            raise DrafterError(
                f"{self.origin} does not fit {getattr(target, 'name', 'the target')}: {'; '.join(problems)}. "
                "Use the target it was trained for, or train one for this target with 'surefoot train'"
            )
        self.model.share(target)

    @torch.no_grad()
    def extend(self, features: Tensor, batch: FlatBatch, cache: PagedCache) -> None:
        slots = batch.cache_slots[cache.drafter_group]
        rows = self.model.context_key_values(features, batch.positions, self._position_limit(cache))
        for storage, key_value in zip(cache.drafter_kv, rows, strict=True):
            _store(storage, slots, key_value)

    @torch.no_grad()
    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        """Draft gamma tokens behind each anchor; `signal` is the log-odds of the likeliest token in the softmax of
        the corrected logits: how far it stands out from all others together, whatever the request's temperature.

        With a `calibration`, the logits are mixed with copies and positions drawn as sharply as it says, and confidences come
        out calibrated.
        """
        anchor = context.history[context.slots, context.lengths]
        depth = self.gamma if context.depth is None else min(context.depth, self.gamma)
        first, confidence_head = self.config.first_slot, self.model.confidence_head
        block = self.block_hidden(context, anchor, first + depth if self.config.shorter_blocks else None)
        hidden = block[:, first : first + depth]
        base = self.model.head_logits(hidden)
        drawn = self._draw_at_once(base, context, anchor, sampler) if isinstance(sampler, BlockwiseSampler) else None
        tokens, largest = drawn or self._draw_by_token(base.to(torch.float32), context, anchor, block, sampler)
        signal = torch.logit(largest, eps=CERTAIN)
        previous = torch.cat([anchor.unsqueeze(1), tokens[:, :-1]], 1)
        scores = None if confidence_head is None else self._scores(confidence_head, hidden, previous)
        lengths, missing = None, self.gamma - depth
        if missing:
            lengths = torch.full_like(anchor, depth)
            tokens, signal = F.pad(tokens, (0, missing)), F.pad(signal, (0, missing))
            scores = None if scores is None else F.pad(scores, (0, missing))
        if scores is not None and self.calibration is not None:
            scores = self.calibration.calibrated(scores, signal, sampler.temperatures())
        return Draft(tokens=tokens, lengths=lengths, confidence_logits=scores, signal=signal)

    def _draw_at_once(
        self, base: Tensor, context: DraftContext, anchor: Tensor, sampler: BlockwiseSampler
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens and largest probabilities, [R, gamma] each, in one native call; None where that cannot be."""
        markov, correction = self.model.markov_head, None
        if markov is not None:
            correction = markov.table_and_product
            if correction is None or not native.usable(correction[0]):
                return None
        draw = sampler.block_draw() if native.usable(base) else None
        if draw is None:
            return None
        sharpness = None if draw.temperature is None else self._sharpness
        depth = base.shape[1]
        if draw.uniforms is not None:
            draw = replace(draw, uniforms=draw.uniforms[:, :depth].contiguous())
        sharpness = None if sharpness is None else sharpness[:depth]
        shares, copying = self._copying, None
        if shares is not None:
            copying = (context.history, context.slots, context.lengths, shares, self.model.columns)
        ids, largest, probs = draft_block(
            base, anchor, correction, self.vocabulary, **vars(draw), sharpness=sharpness, copying=copying
        )
        return sampler.take(ids, probs), largest

    def _draw_by_token(
        self, base: Tensor, context: DraftContext, anchor: Tensor, block: Tensor, sampler: DraftSampler
    ) -> tuple[Tensor, Tensor]:
        """Tokens and largest probabilities, [R, gamma] each, position by position."""
        first, markov, sharpness = self.config.first_slot, self.model.markov_head, self._sharpness
        shares = self._copying
        copier = None if shares is None else Copier(context, base.shape[1], len(shares) - 1)
        previous, state = anchor, anchor.new_empty(0)
        if markov is not None:
            start = markov.embed(anchor)
            state = markov.initial_state(start)
            if first:  # a recurrent state is trained through the anchor's slot as well
                _, state = markov.step(start, block[:, 0], state)
        tokens, largest = [], []
        for k in range(base.shape[1]):
            logits = base[:, k]
            if markov is not None:
                latent, state = markov.step(markov.embed(previous), block[:, first + k], state)
                logits = logits + markov.bias(latent)
            if copier is not None and shares is not None:
                copy, match = copier.copies()
                logits = raise_copies(logits, _softmax(logits), self.model.column(copy), shares[match])
            largest.append(_softmax(logits).amax(-1))
            previous = sampler.draw(k + 1, logits) if sharpness is None else sampler.draw(k + 1, logits, sharpness[k])
            tokens.append(previous)
            if copier is not None:
                copier.append(previous)
        return torch.stack(tokens, 1), torch.stack(largest, 1)

    @property
    def _sharpness(self) -> Tensor | None:
        """[gamma], or None where every position is drawn as it is."""
        return None if self.calibration is None else self.calibration.sharpness

    @property
    def _copying(self) -> Tensor | None:
        """[LONGEST + 1] shares of copies by match length, or None."""
        return None if self.calibration is None else self.calibration.copying

    def _scores(self, head: ConfidenceHead, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits of c_k, [R, gamma], from h_k and x_{k-1}."""
        markov, embedded = self.model.markov_head, None
        if markov is not None and self.config.confidence_head_with_markov:
            embedded = markov.embed(previous)
        if isinstance(head.proj, PackedLinear):
            return head(hidden, embedded)
        # torch's products may round a row differently beside another number of rows: gamma must not matter.
        return torch.stack(
            [head(hidden[:, k], None if embedded is None else embedded[:, k]) for k in range(hidden.shape[1])], 1
        )

    def block_hidden(self, context: DraftContext, anchor: Tensor, size: int | None = None) -> Tensor:
        """Hidden states of the first `size` slots of all blocks (default: all that it was trained with), [R, size, d]."""
        cache, size = context.cache, size or self.config.block_size
        assert cache is not None
        table = cache.block_tables[cache.drafter_group]
        capacity = table.shape[1] * cache.block_size
        positions = self.model.block_positions(context.lengths, size)  # [R, size]
        row_slot = context.slots.unsqueeze(1).expand_as(positions).flatten()
        # Slots of the block that a full-length request has no room for are drafted into the void, the scratch block.
        inside = (positions < capacity).flatten()
        flat = positions.flatten()
        write = torch.where(inside, cache.cache_slots(cache.drafter_group, row_slot, flat.clamp(max=capacity - 1)), 0)
        ends = (context.lengths + size).clamp(max=capacity)
        kv_lens = ends.unsqueeze(1).expand_as(positions).flatten()

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key_cache, value_cache = cache.drafter_kv[index]
            _store((key_cache, value_cache), write, (key, value))

            def run(query: Tensor, row_slot: Tensor, kv_lens: Tensor, window: int | None) -> Tensor:
                return paged_attention(
                    query.to(key_cache.dtype),
                    key_cache,
                    value_cache,
                    table,
                    row_slot,
                    kv_lens,
                    block_size=cache.block_size,
                    scaling=self.config.scaling,
                    window=window,
                ).to(query.dtype)

            window = self.config.window(index)
            if window is None or self.config.sliding_window_non_causal:
                return run(query, row_slot, kv_lens, None if window is None else window + size)
            # Causal inside the block: slot j ends at itself, and its window starts where every other slot's does.
            slots = query.unflatten(0, (-1, size))
            causal = [
                run(slots[:, j], context.slots, (context.lengths + j + 1).clamp(max=capacity), window + j + 1)
                for j in range(size)
            ]
            return torch.stack(causal, 1).flatten(0, 1)

        tokens = self.model.block_tokens(anchor, size).flatten()
        return self.model.backbone(tokens, flat, attend, self._position_limit(cache)).unflatten(0, (-1, size))

    def _position_limit(self, cache: PagedCache) -> int:
        """Above every position that a row or a slot of a block can have."""
        return cache.block_tables[cache.drafter_group].shape[1] * cache.block_size + self.config.block_size

    def _cache_window(self, layer: int) -> int | None:
        window = self.config.window(layer)
        return None if window is None else window + self.block_slots


def _store(storage: tuple[Tensor, ...], slots: Tensor, key_value: tuple[Tensor, Tensor]) -> None:
    for kept, new in zip(storage, key_value, strict=True):
        kept.index_copy_(0, slots, new.to(kept.dtype))


def _softmax(logits: Tensor) -> Tensor:
    """[R, V] float32 -> [R, V]."""
    return softmax_rows(logits) if native.usable(logits) else logits.softmax(-1)


def _packed(layers: list[nn.Linear], int8: set[nn.Module]) -> PackedLinear:
    """Layers of the same input as one packed product, as int8 where all of them are among `int8`. Nothing is taken away."""
    biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return PackedLinear(
        [layer.weight for layer in layers],
        torch.cat([bias.float() for bias in biases]) if any(layer.bias is not None for layer in layers) else None,
        quantize="int8" if int8.issuperset(layers) else None,
    )


def _head_matrix(target: Target) -> Tensor | None:
    """The target's head as a matrix [V, d_target]; None where it was packed for serving and is not the embedding."""
    if isinstance(target.lm_head, nn.Linear):
        return target.lm_head.weight
    return target.embed_tokens.weight if getattr(target.config, "tie_word_embeddings", False) else None


def head_rows(target: Target, words: Tensor) -> Tensor:
    """Rows `words` of the target's head matrix, [len(words), d_target]."""
    matrix = _head_matrix(target)
    if matrix is not None:
        return matrix[words]
    # A packed matrix gives its rows away through products with unit vectors: exact, and seconds for a large head.
    table = target.embed_tokens.weight
    units = torch.eye(table.shape[1], dtype=table.dtype, device=table.device)
    return torch.cat([target.lm_head(some)[:, words] for some in units.split(64)]).T.contiguous()


def _same(copy: Tensor, original: Tensor) -> bool:
    return copy.shape == original.shape and copy.dtype == original.dtype and torch.equal(copy, original)
