"""Configuration files of the checkpoint layouts, to and from `DSparkConfig` (docs/formats.md).

DeepSpec writes the target's configuration with the draft fields on top. SpecForge nests the draft fields under
`dflash_config`. speculators nests the draft layers under `transformer_layer_config` and counts feature layers as *inputs*:
id i is what enters decoder layer i, hence the output of layer i - 1 (0: the embedding). What none of them can say stands
under `surefoot` in a DeepSpec file whose architecture then carries our name, so that no other loader reads it wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import ValidationError

from surefoot.drafters.config import DSparkConfig
from surefoot.errors import DrafterError

Layout = Literal["deepspec", "speculators"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
"""Layouts that can be written; SpecForge's is only read."""
Shapes = Mapping[str, tuple[int, ...]]

_QWEN3, _GEMMA4, _OURS = "Qwen3DSparkModel", "Gemma4DSparkModel", "SurefootDSparkModel"
_SPECFORGE = {"DSparkDraftModel": "dspark", "DFlashDraftModel": "dflash"}
_SPECULATORS = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}

# Fields whose value the Qwen3 architecture implies, and which our own architecture states under `surefoot`.
_IMPLIED = (
    "qk_norm",
    "value_norm",
    "attention_k_eq_v",
    "attention_scaling",
    "sandwich_norms",
    "layer_scalar",
    "embedding_scale",
    "final_logit_softcapping",
    "target_hidden_size",
    "feature_norm",
    "draft_vocab_size",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "weight_storage",
    "shorter_blocks",
)
_DEFAULTS = {name: DSparkConfig.model_fields[name].default for name in _IMPLIED}
_HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_BACKBONE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "sliding_window",
    "max_position_embeddings",
)


def read_config(raw: dict[str, Any], where: str, shapes: Shapes | None = None) -> tuple[DSparkConfig, str]:
    """The configuration a checkpoint's `config.json` holds, and the layout it is written in.

    Args:
        where: names the checkpoint in messages.
        shapes: of its tensors, by name; they tell what SpecForge's configuration may leave out.

    Raises:
        DrafterError: it is no block drafter, or a field is missing, of the wrong type, or contradicts another.
    """
    names = raw.get("architectures") or ["none"]
    architecture = names[0] if isinstance(names, list) else names
    kind = raw.get("speculators_model_type")
    try:
        if isinstance(kind, str) and kind in _SPECULATORS:
            return DSparkConfig(**_from_speculators(raw)), "speculators"
        if architecture in (_QWEN3, _GEMMA4, _OURS):
            return DSparkConfig(**_from_deepspec(raw, architecture)), "deepspec"
        if isinstance(architecture, str) and architecture in _SPECFORGE:
            return DSparkConfig(**_from_specforge(raw, _SPECFORGE[architecture], shapes or {})), "specforge"
    except KeyError as error:
        raise DrafterError(
            f"{where}: config.json lacks {error.args[0]!r}: get the checkpoint's complete configuration"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg']}" if field else first["msg"].removeprefix("Value error, ")
        raise DrafterError(f"{where}: config.json is not valid: {reason}: repair or replace the file") from None
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise DrafterError(
            f"{where}: config.json has a field of the wrong type ({error}): repair or replace the file"
        ) from None
    raise DrafterError(f"{where} is not a block drafter: {_what_it_is(str(kind or architecture))}. {_READABLE}")


_READABLE = (
    f"Readable are the architectures {_QWEN3}, {_GEMMA4}, {_OURS}, {' and '.join(_SPECFORGE)}, and the speculators types "
    f"{' and '.join(_SPECULATORS)}"
)


def _what_it_is(kind: str) -> str:
    """Why a checkpoint that calls itself `kind` is not read, as text."""
    known = {
        "eagle": "an EAGLE drafter ({}) drafts token by token with a model that this version does not serve",
        "medusa": "Medusa heads ({}) draft without a block, which this version does not serve",
        "domino": "a Domino drafter ({}) corrects its logits by a recurrent network that this version does not serve",
        "ForCausalLM": "{} is a language model of its own; as a target it is given with --model",
        "none": "its config.json names no architecture",
    }
    fitting = (text for name, text in known.items() if name.lower() in kind.lower())
    return next(fitting, "it says {!r}, which this version does not know").format(kind)


def write_config(config: DSparkConfig, layout: Layout, dtype: str) -> dict[str, Any]:
    """`config.json` of a drafter.

    Raises:
        DrafterError: the layout cannot say what this drafter is.
    """
    return _to_deepspec(config, dtype) if layout == "deepspec" else _to_speculators(config, dtype)


def _rope_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in the form of transformers 5, also from the two fields older files have."""
    if raw.get("rope_parameters"):
        return raw["rope_parameters"]
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {"rope_theta": raw.get("rope_theta", 10_000.0), "rope_type": kind, **scaling}


def _backbone_of(raw: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"vocab_size": raw["vocab_size"], "rope_parameters": _rope_of(raw)}
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        fields[name] = raw[name]
    fields["num_key_value_heads"] = raw.get("num_key_value_heads") or raw["num_attention_heads"]
    fields["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    fields["hidden_act"] = raw.get("hidden_act") or raw.get("hidden_activation") or "silu"
    for name in ("rms_norm_eps", "attention_bias", "max_position_embeddings"):
        if raw.get(name) is not None:
            fields[name] = raw[name]
    fields["layer_types"] = tuple(raw.get("layer_types") or ())
    if "sliding_attention" in fields["layer_types"]:
        fields["sliding_window"] = raw.get("sliding_window")
    return fields


def _heads_of(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in _HEAD_FIELDS if raw.get(name) is not None}


def _from_deepspec(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    fields = {
        **_backbone_of(raw),
        **_heads_of(raw),
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": tuple(raw["target_layer_ids"]),
        "num_target_layers": raw.get("num_target_layers"),
    }
    if architecture == _GEMMA4:
        shared = bool(raw.get("attention_k_eq_v", False))
        fields |= _gemma4(fields["hidden_size"], shared)
        fields["head_dim"] = raw["global_head_dim"]
        if shared:
            fields["num_key_value_heads"] = raw["num_global_key_value_heads"]
        fields["final_logit_softcapping"] = raw.get("final_logit_softcapping")
    elif architecture == _OURS:
        own = raw.get("surefoot", {})
        unknown = sorted(set(own) - set(_IMPLIED))
        if unknown:
            raise DrafterError(
                f"config.json says {unknown[0]!r} under 'surefoot', which this version does not know: upgrade surefoot"
            )
        fields |= own
    return fields


def _from_specforge(raw: dict[str, Any], kind: str, shapes: Shapes) -> dict[str, Any]:
    nested = raw.get("dflash_config") or {}

    def stated(name: str, default: Any = None) -> Any:
        """A draft field, nested as SpecForge writes it now or on top as it did before."""
        value = nested.get(name)
        return raw.get(name, default) if value is None else value

    layers, target_layers = raw["num_hidden_layers"], stated("num_target_layers")
    modes = nested.get("attention_modes") or [nested.get("attention_mode", "gqa")]
    checked = [
        ("projector_type", stated("projector_type", kind), ("dspark", "dflash")),
        ("causal", bool(stated("causal", False)), (False,)),
        *(("attention_mode", str(mode).lower(), ("gqa", "mha")) for mode in modes),
    ]
    for name, value, readable in checked:
        if value not in readable:
            raise DrafterError(
                f"config.json says {name} {value!r} under dflash_config, which this version cannot serve; it can serve "
                f"{' and '.join(map(str, readable))}"
            )
    head = shapes.get("confidence_head.proj.weight")
    fields = {
        **_backbone_of(raw),
        "block_size": stated("block_size") or raw["block_size"],
        "mask_token_id": _required(stated("mask_token_id"), "dflash_config.mask_token_id"),
        "target_layer_ids": tuple(stated("target_layer_ids") or _spread_layers(target_layers, layers)),
        "num_target_layers": target_layers,
        # DFlash predicts the token of every mask slot, DSpark (and whoever shifts its labels) the token after every slot.
        "sample_from_anchor": stated("sample_from_anchor", bool(stated("shift_label", kind == "dspark"))),
    }
    if raw.get("draft_vocab_size") not in (None, fields["vocab_size"]):
        fields["draft_vocab_size"] = raw["draft_vocab_size"]
    if kind == "dspark":
        fields |= {
            "markov_rank": stated("markov_rank", 0),
            "markov_head_type": stated("markov_head_type", "vanilla"),
            "enable_confidence_head": stated("enable_confidence_head", stated("use_confidence_head", head is not None)),
            "confidence_head_with_markov": stated(
                "confidence_head_with_markov", head is None or head[-1] != fields["hidden_size"]
            ),
        }
    return fields


def _required(value: Any, name: str) -> Any:
    if value is None:
        raise KeyError(name)
    return value


def _spread_layers(target_layers: int | None, draft_layers: int) -> list[int]:
    """The feature layers of a drafter that names none: spread from layer 1 to three before the end, as SpecForge does."""
    depth = int(_required(target_layers, "num_target_layers"))
    if draft_layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _gemma4(hidden_size: int, shared_key_value: bool) -> dict[str, Any]:
    """What the Gemma-4 architecture implies."""
    return {
        "value_norm": True,
        "attention_k_eq_v": shared_key_value,
        "attention_scaling": 1.0,
        "sandwich_norms": True,
        "layer_scalar": True,
        "embedding_scale": math.sqrt(hidden_size),
    }


def _common(config: DSparkConfig) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in _BACKBONE_FIELDS},
        "vocab_size": config.vocab_size,
        "layer_types": list(config.layer_types),
        "rope_parameters": config.rope_parameters,
        "tie_word_embeddings": False,
    }


def _to_deepspec(config: DSparkConfig, dtype: str) -> dict[str, Any]:
    raw = {
        **_common(config),
        **{name: getattr(config, name) for name in _HEAD_FIELDS},
        "dtype": dtype,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
    }
    if not config.markov_rank:
        del raw["markov_head_type"]
    values = {name: getattr(config, name) for name in _IMPLIED}
    stated = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    gemma = _DEFAULTS | _gemma4(config.hidden_size, config.attention_k_eq_v)
    gemma["final_logit_softcapping"] = config.final_logit_softcapping
    if not stated:
        return {"architectures": [_QWEN3], "model_type": "qwen3", **raw}
    if values == gemma:
        return {
            "architectures": [_GEMMA4],
            "model_type": "gemma4_text",
            **raw,
            "hidden_activation": config.hidden_act,
            "global_head_dim": config.head_dim,
            "num_global_key_value_heads": config.num_key_value_heads,
            "attention_k_eq_v": config.attention_k_eq_v,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    return {"architectures": [_OURS], "model_type": "qwen3", **raw, "surefoot": stated}


def _from_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    nested = raw["transformer_layer_config"]
    layer_ids = raw["aux_hidden_state_layer_ids"]
    for name, value in (("aux_hidden_state_layer_ids", layer_ids), ("mask_token_id", raw["mask_token_id"])):
        if value is None:
            raise KeyError(name)
    fields = _backbone_of(nested)
    # The package builds one rotary embedding, from the sliding variant where the parameters differ by layer type.
    fields["rope_parameters"] = fields["rope_parameters"].get("sliding_attention") or fields["rope_parameters"]
    dspark = raw["speculators_model_type"] == "dspark"
    fields |= {
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": tuple(i - 1 for i in layer_ids),
        "sample_from_anchor": raw.get("sample_from_anchor", dspark),
        "sliding_window_non_causal": bool(raw.get("sliding_window_non_causal", False)),
        "num_target_layers": raw.get("num_target_layers"),
    }
    if raw.get("draft_vocab_size", fields["vocab_size"]) != fields["vocab_size"]:
        fields["draft_vocab_size"] = raw["draft_vocab_size"]
    target_width = raw.get("target_hidden_size")
    if target_width not in (None, fields["hidden_size"]):
        raise DrafterError(
            f"target_hidden_size {target_width} with hidden_size {fields['hidden_size']}: the speculators layout has "
            "no projection between the two; save such a drafter in the deepspec layout"
        )
    if dspark:
        fields |= {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
        fields |= _heads_of(raw)
    return fields


def _to_speculators(config: DSparkConfig, dtype: str) -> dict[str, Any]:
    sayable = ("draft_vocab_size", "sample_from_anchor", "sliding_window_non_causal")
    unsayable = [n for n in _IMPLIED if n not in sayable and getattr(config, n) != _DEFAULTS[n]]
    if unsayable:
        raise DrafterError(
            f"the speculators layout cannot say {', '.join(unsayable)}: save this drafter in the deepspec layout"
        )
    heads = {name: getattr(config, name) for name in _HEAD_FIELDS} if config.kind == "dspark" else {}
    return {
        "architectures": [_SPECULATORS[config.kind]],
        "speculators_model_type": config.kind,
        "transformer_layer_config": {"model_type": "qwen3", **_common(config)},
        "block_size": config.block_size,
        "draft_vocab_size": config.vocabulary_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.sliding_window_non_causal,
        **heads,
        "dtype": dtype,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.gamma}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
