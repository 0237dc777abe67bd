"""The target: a causal language model of transformers, run on flat tokens over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.layers import LayerSpec, StateSpec
from surefoot.cache.paged import PagedCache
from surefoot.errors import ConfigurationError
from surefoot.targets.attention import STEP_ARGUMENT, PagedStep
from surefoot.targets.probe import probe, text_config

_UNSTATED_MODEL_LEN = 131_072  # models without positions of their own (NoPE, ALiBi) state no limit


@dataclass(frozen=True)
class TargetOutput:
    """What one target pass returns."""

    logits: Tensor  # [L, V] in the model's dtype, one row per `FlatBatch.logit_rows`
    features: Tensor | None  # [T, len(feature_layers) * hidden], None when no layer was asked for


class Target:
    """A causal language model whose every row knows its own request.

    Attributes:
        model, tokenizer: the transformers objects (`tokenizer` is None for a bare model).
        config: the language model's configuration.
        name: what the user calls it.
        weights: what its weights are made of, such as `Q4_K_M GGUF, de-quantised to bfloat16`.
        layers: what each attention layer stores per position.
        max_model_len: positions the model can address.
        eos_token_ids: every token that ends a text.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, name: str | None = None, weights: str | None = None
    ) -> None:
        """Take over `model`: it is put into eval mode, frozen, and its attention is replaced by surefoot's.

        Raises:
            ModelError: the architecture cannot be served; the message says why.
        """
        model.eval().requires_grad_(False)
        self._rope_limit = freeze_rope(model)
        self._shape = probe(model)
        self.model, self.tokenizer = model, tokenizer
        self.config = text_config(model.config)
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.weights = weights or f"{str(model.dtype).removeprefix('torch.')} in memory"
        self.layers: tuple[LayerSpec, ...] = self._shape.layers
        self.states: tuple[StateSpec, ...] = ()  # what its recurrent layers keep; the probe refuses all such models yet
        self.num_layers = len(self.layers)
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        stated = getattr(self.config, "max_position_embeddings", None) or _UNSTATED_MODEL_LEN
        self.max_model_len: int = min(stated, self._rope_limit or stated)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The input embedding module: ids -> [..., hidden], with the scaling that Gemma's own module applies."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        """The output head as a module: [..., hidden] -> [..., V], without final soft-capping or logit scaling.

        Call it; its `.weight` may be packed for the CPU (`targets.optimise`).
        """
        return self.model.get_output_embeddings()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The layers as modules, in order."""
        return self._shape.decoder_layers

    @torch.no_grad()
    def forward(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """Run T rows once: write their keys and values into `cache`, return logits of the rows that need them.

        Args:
            batch: the flat rows; its `cache_slots` and `block_tables` follow the groups of `cache`.
            cache: built from `self.layers`.
            feature_layers: decoder layers whose output becomes a feature, in the order wanted; -1 is the input of
                layer 0 (the embedding, scaled the way the model scales it).
        """
        step = PagedStep(batch, cache)
        rows = {"logits_to_keep": batch.logit_rows} if self._shape.keeps_rows else {}
        with self._capture(feature_layers) as captured:
            output = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=True,
                **{self._shape.cache_argument: step, STEP_ARGUMENT: step},
                **rows,
            )
        logits = output.logits[0] if rows else output.logits[0, batch.logit_rows]
        features = torch.cat([captured[i] for i in feature_layers], dim=-1) if feature_layers else None
        return TargetOutput(logits, features)

    @contextmanager
    def _capture(self, feature_layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Hidden states [T, hidden] of the chosen layers, filled in while the model runs."""
        captured: dict[int, Tensor] = {}

        def keep_output(layer: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                captured[layer] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        def keep_input(module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:
            captured[-1] = (inputs[0] if inputs else keywords["hidden_states"])[0]

        with ExitStack() as hooks:
            for layer in set(feature_layers):
                if not -1 <= layer < self.num_layers:
                    raise ConfigurationError(
                        f"feature layer {layer} of {self.name}: allowed are -1 (embedding) to {self.num_layers - 1}"
                    )
                if layer == -1:
                    first = self._shape.decoder_layers[0]
                    handle = first.register_forward_pre_hook(keep_input, with_kwargs=True)
                else:
                    handle = self._shape.decoder_layers[layer].register_forward_hook(keep_output(layer))
                hooks.callback(handle.remove)
            yield captured


def freeze_rope(model: Any) -> int | None:
    """Make rotary frequencies independent of what else is in the batch; returns the context length they hold for.

    transformers picks the frequencies of `dynamic` and `longrope` scaling from the largest position *in the batch*,
    which would let one request change another's rows. The frequencies of the original context length are kept for
    everyone, and that length becomes the model's limit (None: the model has no such scaling).
    """
    limits: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind is None or not ("dynamic" in kind or kind == "longrope"):
                continue
            rope = module.config.rope_parameters
            rope = rope if layer_type is None else rope[layer_type]
            limits.append(rope.get("original_max_position_embeddings") or module.config.max_position_embeddings)
            module.rope_type = "default" if layer_type is None else {**module.rope_type, layer_type: "default"}
    return min(limits, default=None)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every end token that generation config, model config or tokenizer names."""
    ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), text_config(model.config), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return frozenset(ids)
