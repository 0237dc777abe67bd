"""The network of DSpark and DFlash: a block drafter that reads the target's hidden states (arXiv 2607.05147).

`DSparkModel.backbone` is one function for training and serving; they differ only in the attention they give it: dense masks
over known context (`training/network.py`), or the paged cache (`dspark.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.heads import ConfidenceHead, MarkovHead
from surefoot.drafters.layers import ACTIVATIONS, Attend, DraftLayer, RMSNorm, Rotary, Rotation, packed_product
from surefoot.errors import DrafterError
from surefoot.kernels import native
from surefoot.kernels.formats import StoredWeight
from surefoot.kernels.linear import PackedLinear

if TYPE_CHECKING:
    from surefoot.targets.target import Target


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
        if config.hidden_act not in ACTIVATIONS:
            raise DrafterError(
                f"hidden_act {config.hidden_act!r} of the drafter is not supported; "
                f"allowed are {', '.join(ACTIVATIONS)}"
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
        self.stored: dict[
            str, StoredWeight
        ] = {}  # by name, matrices that the checkpoint holds in a format of their own
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

        A reduced vocabulary gets the target's rows of its tokens as a head of its own.
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

        Matrices that were stored in a format of their own are served from the stored values. Afterwards the model can be
        neither trained nor saved.

        Returns:
            Whether it was done: only on a CPU with native kernels.
        """
        if any(parameter.device.type != "cpu" for parameter in self.parameters()) or not native.available():
            return False
        modules: dict[str, nn.Module] = dict(self.named_modules())
        stored = {modules[name.removesuffix(".weight")]: weight for name, weight in self.unchanged().items()}
        self.stored = {}
        attentions = [layer.self_attn for layer in self.layers if layer.self_attn.qkv_proj is None]
        if all(type(part) is nn.Linear for each in attentions for part in each.key_value_layers) and attentions:
            self.context_proj = packed_product([part for each in attentions for part in each.key_value_layers], stored)
            for layer in self.layers:
                layer.self_attn.fuse(stored)
                layer.mlp.fuse(stored)
        for parent in list(self.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, packed_product([child], stored))
        return True

    def unchanged(self) -> dict[str, StoredWeight]:
        """The stored matrices whose weights have not been changed since they were loaded, by name."""
        own = self.state_dict()

        def same(name: str, stored: StoredWeight) -> bool:
            weight = own.get(name)
            return weight is not None and torch.equal(weight.cpu(), stored.dequantize().to(weight.dtype))

        return {name: stored for name, stored in self.stored.items() if same(name, stored)}

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


def _head_matrix(target: Target) -> Tensor | None:
    """The target's head as a matrix [V, d_target]; None where it was packed for serving and is not the embedding."""
    if isinstance(target.lm_head, nn.Linear):
        return target.lm_head.weight
    return target.embed_tokens.weight if getattr(target.config, "tie_word_embeddings", False) else None


def head_rows(target: Target, token_ids: Tensor) -> Tensor:
    """Rows `token_ids` of the target's head matrix, [len(token_ids), d_target]."""
    matrix = _head_matrix(target)
    if matrix is not None:
        return matrix[token_ids]
    # The rows of a packed matrix are its products with unit vectors: exact, and seconds for a large head.
    table = target.embed_tokens.weight
    units = torch.eye(table.shape[1], dtype=table.dtype, device=table.device)
    return torch.cat([target.lm_head(some)[:, token_ids] for some in units.split(64)]).T.contiguous()


def _same(copy: Tensor, original: Tensor) -> bool:
    return copy.shape == original.shape and copy.dtype == original.dtype and torch.equal(copy, original)
