"""The shape of a block drafter. Field descriptions are the documentation of the configuration file."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from surefoot.drafters.heads import HeadType
from surefoot.kernels import formats

LayerType = Literal["full_attention", "sliding_attention"]


class DSparkConfig(BaseModel):
    """A DSpark or DFlash drafter; the defaults are what the DeepSpec layout implies for the Qwen3 family."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Backbone: the DeepSpec layout's own names.
    vocab_size: int = Field(gt=0, description="Vocabulary size of the target; token ids in and out are the target's.")
    hidden_size: int = Field(gt=0, description="Width d of the drafter.")
    intermediate_size: int = Field(gt=0, description="Width of the gated MLP.")
    num_hidden_layers: int = Field(gt=0, le=1024, description="Draft layers.")
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = 1e-6
    hidden_act: str = Field("silu", description="Activation of the gated MLP, by its transformers name.")
    attention_bias: bool = Field(False, description="Biases in the four attention projections.")
    layer_types: tuple[LayerType, ...] = Field((), description="Attention of each draft layer; empty: all full.")
    sliding_window: int | None = Field(
        None, gt=0, description="Context positions before the anchor that a sliding layer sees."
    )
    sliding_window_non_causal: bool = Field(
        True, description="Attention inside the block is bidirectional in sliding layers too (full layers always are)."
    )
    rope_parameters: dict[str, Any] = Field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0},
        description="Rotary embedding, flat or by layer type, as transformers writes it.",
    )
    max_position_embeddings: int = Field(32_768, description="Read by rotary scalings such as yarn and llama3.")

    # Block.
    block_size: int = Field(gt=0, description="Slots of the block: the anchor and block_size - 1 mask tokens.")
    mask_token_id: int = Field(ge=0, description="Token in every slot after the anchor.")
    target_layer_ids: tuple[int, ...] = Field(
        min_length=1,
        description="Decoder layers of the target whose outputs are the context features; -1 is the embedding output.",
    )
    num_target_layers: int | None = Field(None, description="Depth of the target it was trained for, where known.")
    sample_from_anchor: bool = Field(
        True,
        description="The anchor's slot predicts x_1 and gamma is block_size; otherwise it predicts nothing, slot k "
        "predicts x_k and gamma is block_size - 1.",
    )

    # Heads.
    markov_rank: int = Field(0, ge=0, description="Rank r of the sequential head; 0: no such head.")
    markov_head_type: HeadType = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = Field(
        False, description="The confidence head reads W1[x_{k-1}] after the hidden state."
    )

    # What families other than Qwen3 do differently.
    qk_norm: bool = Field(True, description="RMSNorm on queries and keys, per head.")
    value_norm: bool = Field(False, description="RMSNorm without a weight on values (Gemma 4).")
    attention_k_eq_v: bool = Field(False, description="Values are the key projection before its norm (Gemma 4).")
    attention_scaling: float | None = Field(None, description="Softmax scaling; None: head_dim ** -0.5.")
    sandwich_norms: bool = Field(
        False, description="Norms also after attention and around the MLP, before the residual sum (Gemma)."
    )
    layer_scalar: bool = Field(False, description="Each layer's output is multiplied by a stored scalar (Gemma 4).")
    embedding_scale: float = Field(1.0, description="Factor on the embedding rows (Gemma: sqrt of their width).")
    final_logit_softcapping: float | None = Field(
        None, gt=0, description="c tanh(logit / c) on the base logits, before the sequential head's correction."
    )

    # What no published layout can say; stored under `surefoot` in the configuration file.
    target_hidden_size: int | None = Field(
        None,
        gt=0,
        description="Width of the target where it differs from hidden_size. A narrower drafter reads the target's "
        "embedding through `embed_proj` [d, d_target] and reaches the target's head through `head_proj` [d_target, d].",
    )
    feature_norm: bool = Field(
        False,
        description="Each of the m target features is RMS-normalised with a stored weight, `feature_norm.weight` "
        "[m, d_target], before `fc` (raw activations reach 1e4 in some targets).",
    )
    draft_vocab_size: int | None = Field(
        None,
        gt=0,
        description="Tokens the drafter can propose; `d2t` [draft_vocab_size] holds target id minus draft id. "
        "None: all of the target's.",
    )
    shorter_blocks: bool = Field(
        False,
        strict=True,
        description="A block may run without its last slots where fewer tokens are wanted. Attention inside a block is "
        "bidirectional, so that this is a claim about the weights: true for those trained here, which lose nothing by it.",
    )
    weight_storage: str = Field(
        "native",
        description="Format of the stored matrices, `kernels/formats.py`. int8: values with one float32 scale a row, "
        "`<name>_scale` (symmetric, largest magnitude 127), served as they are and widened where that cannot be.",
    )

    @field_validator("weight_storage")
    @classmethod
    def _known_storage(cls, name: str) -> str:
        if name not in ("native", *formats.names()):
            raise ValueError(f"allowed are {', '.join(('native', *formats.names()))}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _fill_layer_types(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("layer_types"):
            values = {**values, "layer_types": ("full_attention",) * int(values.get("num_hidden_layers", 0))}
        return values

    @model_validator(mode="after")
    def _check(self) -> DSparkConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for num_hidden_layers {self.num_hidden_layers}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is not set")
        for layer_type in set(self.layer_types):
            theta = self.rope(layer_type).get("rope_theta")
            if theta is None:
                raise ValueError(f"rope_parameters have no rope_theta for {layer_type} layers")
            if not isinstance(theta, (int, float)) or not theta > 0:
                raise ValueError(f"rope_parameters need a rope_theta above 0 for {layer_type} layers, got {theta!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        ids = self.target_layer_ids
        if ids[0] < -1 or any(a >= b for a, b in pairwise(ids)):
            raise ValueError(f"target_layer_ids {list(ids)} must increase strictly from -1 (embedding) or more")
        if self.num_target_layers is not None and ids[-1] >= self.num_target_layers:
            raise ValueError(f"target_layer_ids {list(ids)} reach beyond num_target_layers {self.num_target_layers}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside vocab_size {self.vocab_size}")
        if self.gamma < 1:
            raise ValueError(f"block_size {self.block_size} leaves no draft token when sample_from_anchor is false")
        if self.confidence_head_with_markov and self.enable_confidence_head and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs markov_rank > 0")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        return self

    @property
    def kind(self) -> str:
        """ "dspark", or "dflash" without both heads."""
        return "dspark" if self.markov_rank or self.enable_confidence_head else "dflash"

    @property
    def gamma(self) -> int:
        """Draft tokens a full block gives."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """The block slot that predicts x_1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def target_width(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def narrow(self) -> bool:
        """The drafter's width is not its target's."""
        return self.target_width != self.hidden_size

    @property
    def feature_size(self) -> int:
        return len(self.target_layer_ids) * self.target_width

    @property
    def vocabulary_size(self) -> int:
        """Columns of the draft logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.attention_scaling is None else self.attention_scaling

    def window(self, layer: int) -> int | None:
        """Context positions before the anchor that `layer` sees; None: all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def rope(self, layer_type: str) -> dict[str, Any]:
        """Rotary parameters of one layer type."""
        nested = self.rope_parameters.get(layer_type)
        return nested if isinstance(nested, dict) else self.rope_parameters


def fit_problems(config: DSparkConfig, target_config: Any) -> list[str]:
    """Why a drafter cannot serve a target; empty when it fits. Every entry names both sides.

    Args:
        target_config: the target's transformers configuration (of the language model, or of the whole).
    """
    if hasattr(target_config, "get_text_config"):
        target_config = target_config.get_text_config()
    problems = []
    if config.target_width != target_config.hidden_size:
        problems.append(f"drafter reads hidden size {config.target_width}, target has {target_config.hidden_size}")
    if config.vocab_size != target_config.vocab_size:
        problems.append(f"drafter's vocabulary has {config.vocab_size} tokens, target's {target_config.vocab_size}")
    depth = target_config.num_hidden_layers
    if config.target_layer_ids[-1] >= depth:
        problems.append(
            f"drafter reads target layers {list(config.target_layer_ids)}, target has layers 0 to {depth - 1}"
        )
    elif config.num_target_layers not in (None, depth):
        problems.append(f"drafter was trained for {config.num_target_layers} target layers, target has {depth}")
    return problems
