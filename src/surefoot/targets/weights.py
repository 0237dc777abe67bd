"""Weights -> a transformers model in which every tensor of the checkpoint is accounted for.

transformers initialises a missing weight at random and drops a tensor it does not know. Both give fluent, wrong text, so
both are looked at here. Float8 weights are multiplied by their scales while they are read.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from surefoot.errors import ModelError
from surefoot.targets.checkpoint import FLOAT8_WEIGHTS, TRUST, TensorHeader, first_line, tensor_headers
from surefoot.targets.probe import architecture_name

log = logging.getLogger(__name__)

_BLOCK = 128  # of block-scaled float8 checkpoints whose configuration states no block size
_SCALE_ENDINGS = ("_scale", "_scale_inv")
_PACKED = ("uint8", "int8", "int32")
_METHODS_OF_TRANSFORMERS = (
    "gptq",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "mxfp4",
    "torchao",
    "hqq",
    "quanto",
    "aqlm",
)
_SCALE_LIKE = re.compile(
    r"(scale|scales|scale_inv|zeros|zero_point|absmax|qweight|qzeros|g_idx|quant_map|packed|nested)(_\d+)?$"
)
# Tensors that a target does not need, whatever its architecture. Heads and encoders are such only outside the layers.
_HARMLESS = (
    (re.compile(r"(input|output|activation)_scale$"), "scales of quantised activations; surefoot does not quantise them"),
    (re.compile(r"(^|\.)[kqv](_proj\.output)?_scale$|kv_scale$"), "scales of a quantised cache; surefoot's is not"),
    (re.compile(r"inv_freq$|rotary_emb\."), "rotary frequencies, computed from the configuration"),
    (re.compile(r"(^|\.)(attn|attention)\.((masked_)?bias|causal_mask)$"), "causal masks stored as buffers"),
    (re.compile(r"^([a-z_]+\.){0,2}(mtp|nextn|multi_token)"), "heads that predict several tokens"),
    (re.compile(r"^([a-z_]+\.){0,2}(visual|vision\w*|image\w*|audio\w*|m\w*_projector|embed_vision)\."), "other media"),
    (re.compile(r"(position_ids|num_batches_tracked|\.version)$"), "buffers without weights"),
)  # fmt: skip
# model_type -> why its activations leave float16's range (65,504); the field's engines refuse or warn for the same ones.
_OVERFLOWS_FLOAT16 = {
    "gemma2": "embeddings are scaled by sqrt(hidden size) and the residual stream grows past 65,504",
    "gemma3": "embeddings are scaled by sqrt(hidden size) and the residual stream grows past 65,504",
    "gemma3_text": "embeddings are scaled by sqrt(hidden size) and the residual stream grows past 65,504",
    "gemma3n_text": "embeddings are scaled by sqrt(hidden size) and the residual stream grows past 65,504",
    "glm4": "its four norms per layer let the residual stream grow past 65,504",
    "plamo2": "its residual stream grows past 65,504",
}


def read_model(
    directory: Path, config: Any, name: str, *, dtype: torch.dtype | str, attention: str | None, trust_remote_code: bool
) -> Any:
    """The model in `directory` with all of its weights.

    Args:
        directory: a checkpoint that `check_checkpoint` accepted.
        config: its configuration.
        name: what the user calls the target, for messages.
        dtype: of the weights; "auto" keeps the checkpoint's.
        attention: the attention implementation; None is transformers' own choice.
        trust_remote_code: run Python code that the checkpoint brings.

    Raises:
        ModelError: weights that are missing, left over, unscaled, not finite, or that transformers cannot read.
    """
    headers = tensor_headers(directory, name)
    refuse_packed(headers, config, name)
    float8 = any(_is_float8_weight(tensor, header) for tensor, header in headers.items())
    options: dict[str, Any] = {
        "attn_implementation": attention, "output_loading_info": True, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    try:
        with _silenced():
            if float8:
                model, info = _read_float8(directory, config, headers, name, dtype, options)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(
                    str(directory), config=config, dtype=dtype, **options
                )
    except ModelError:
        raise
    except Exception as error:  # whatever a damaged file, or an architecture's own code, makes of it
        raise ModelError(f"target '{name}' cannot be loaded: {build_failure(config, error)}") from error
    check_keys(model, info, name, directory)
    check_finite(model, name)
    warn_of_float16(model, name)
    return model


def build_failure(config: Any, error: BaseException) -> str:
    """Why transformers could not make a model, with its architecture and what to do."""
    architecture = architecture_name(config)
    if "trust_remote_code" in str(error):
        return f"{architecture} needs Python code of the checkpoint: {TRUST}"
    if isinstance(error, KeyError) and error.args and str(error.args[0]).startswith("surefoot"):
        # A table of the architecture's own attention classes, in which ours cannot be found.
        return f"{architecture} does not use transformers' AttentionInterface; choose another model"
    if "weights_only" in str(error).lower() or "unpickl" in type(error).__name__.lower():
        return (
            f"its weights are a pickle that holds more than tensors ({first_line(error)}), which surefoot never runs; "
            "choose a checkpoint with .safetensors"
        )
    return f"transformers cannot build {architecture} ({first_line(error)}); choose another model"


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Without transformers' bars and its report on keys, which `check_keys` judges in their place."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


# -- float8 ----------------------------------------------------------------------------------------------------------------


def dequantise_float8(
    headers: Mapping[str, TensorHeader], name: str, dtype: torch.dtype, block: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, float8 weights multiplied by their scales.

    `X.weight` is scaled by `X.weight_scale` or `X.weight_scale_inv` (both are factors, in spite of the second name), in
    float32: one scale per tensor, per output channel, or per block.

    Args:
        headers: all tensors of the checkpoint.
        dtype: of the result's floating tensors.
        block: rows and columns that share a scale, where the checkpoint's configuration says so.

    Raises:
        ModelError: a float8 weight without a scale, or one whose scale does not fit; 4-bit weights beside them.
    """
    from safetensors import safe_open

    scales: dict[str, str] = {}  # weight -> its scale
    for tensor, header in headers.items():
        if _is_float8_weight(tensor, header):
            found = [tensor + ending for ending in _SCALE_ENDINGS if tensor + ending in headers]
            if not found:
                raise ModelError(
                    f"target '{name}': {tensor} is {header.dtype} without a scale (no {tensor}_scale or {tensor}_scale_inv in "
                    "the checkpoint), so its values are unknown; download the checkpoint again or choose the unquantised one"
                )
            scales[tensor] = found[0]
    used = set(scales.values())
    state: dict[str, Tensor] = {}
    files = {file: safe_open(file, framework="pt") for file in {header.file for header in headers.values()}}
    for tensor, header in headers.items():
        if tensor in used:
            continue
        value: Tensor = files[header.file].get_tensor(tensor)
        if tensor in scales:
            scale = files[headers[scales[tensor]].file].get_tensor(scales[tensor])
            value = _scaled(value, scale, block, f"target '{name}': {scales[tensor]}")
        state[tensor] = value.to(dtype) if value.is_floating_point() and tensor not in used else value
    return state


def _read_float8(
    directory: Path,
    config: Any,
    headers: Mapping[str, TensorHeader],
    name: str,
    dtype: torch.dtype | str,
    options: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Model and loading report of a float8 checkpoint, whatever its configuration says about quantisation."""
    block = _block_size(getattr(config, "quantization_config", None))
    chosen = _unquantised_dtype(config, dtype)
    state = dequantise_float8(headers, name, chosen, block)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are not quantised any more
    with torch.device("meta"):
        trusted = options["trust_remote_code"]
        architecture: Any = type(
            AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=chosen, trust_remote_code=trusted)
        )
    options = {key: value for key, value in options.items() if key != "trust_remote_code"}
    model, info = architecture.from_pretrained(None, config=config, state_dict=state, dtype=chosen, **options)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, info


def _scaled(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, what: str) -> Tensor:
    """`weight` [..., out, in] times `scale`: [] or [1], [out] or [out, 1], anything that broadcasts, or one per block."""
    value, factor = weight.float(), scale.float()
    if factor.numel() == 1:
        return value * factor.reshape(())
    if factor.dim() == 1 and value.dim() == 2 and len(factor) == value.shape[0]:
        return value * factor[:, None]
    if factor.dim() == value.dim():
        if all(have in (1, want) for have, want in zip(factor.shape, value.shape, strict=True)):
            return value * factor
        rows, columns = block or (_BLOCK, _BLOCK)
        blocks = (-(-value.shape[-2] // rows), -(-value.shape[-1] // columns))
        if factor.shape[-2:] == blocks and factor.shape[:-2] == value.shape[:-2]:
            factor = factor.repeat_interleave(rows, -2)[..., : value.shape[-2], :]
            return value * factor.repeat_interleave(columns, -1)[..., : value.shape[-1]]
    raise ModelError(
        f"{what} has shape {list(scale.shape)}, which fits no scaling of a weight of shape {list(weight.shape)} (per tensor, "
        "per output channel, or per block); choose the unquantised checkpoint"
    )


def _block_size(quantization: Any) -> tuple[int, int] | None:
    stated = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if isinstance(stated, (list, tuple)) and len(stated) == 2 and all(isinstance(n, int) and n > 0 for n in stated):
        return stated[0], stated[1]
    return None


def _unquantised_dtype(config: Any, dtype: torch.dtype | str) -> torch.dtype:
    """What float8 weights become: what was asked for, else the configuration's dtype, else bfloat16."""
    stated = getattr(config, "dtype", None) if isinstance(dtype, str) else dtype
    fits = isinstance(stated, torch.dtype) and stated in (torch.float16, torch.bfloat16, torch.float32)
    return stated if fits and stated is not None else torch.bfloat16


def _is_float8_weight(tensor: str, header: TensorHeader) -> bool:
    """Whether a tensor needs a scale: float8, and no scale itself (4-bit formats store scales in float8)."""
    return header.dtype in FLOAT8_WEIGHTS and not _SCALE_LIKE.search(tensor)


def refuse_packed(headers: Mapping[str, TensorHeader], config: Any, name: str) -> None:
    """Refuse weights packed into integers, by name, unless transformers has a reader for the method that is stated."""
    stated = getattr(config, "quantization_config", None)
    method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
    if str(getattr(method, "value", method)) in _METHODS_OF_TRANSFORMERS:
        return
    for tensor, header in headers.items():
        scaled = any(tensor + ending in headers for ending in _SCALE_ENDINGS)
        if header.dtype in _PACKED and (scaled or tensor.endswith(("qweight", "packed"))):
            raise ModelError(
                f"target '{name}': {tensor} is packed into {header.dtype} by a quantisation that surefoot does not read "
                f"({method or 'not stated'}); choose the unquantised checkpoint, or one in float8"
            )


# -- what is missing, what is left over --------------------------------------------------------------------------------------


def check_keys(model: nn.Module, info: Mapping[str, Any], name: str, directory: Path) -> None:
    """Refuse missing weights, and left-over tensors that belong to what the model computes.

    A left-over tensor is harmless where it is of a known kind (`_HARMLESS`) or of a layer after the last one that the
    configuration counts as a head for further tokens. It is refused where it looks like a scale, and where it would belong
    to a decoder layer or to a module that has weights of its own. Anything else is another head, which is said once.
    """
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random weights
        raise ModelError(
            f"target '{name}': {len(missing)} weights are missing from {directory} (first: {missing[0]}); copy or "
            "download it again"
        )
    config: Any = model.config
    extra = list(_unexplained(info["unexpected_keys"], config))
    for tensor in extra:
        if _SCALE_LIKE.search(tensor):
            raise ModelError(
                f"target '{name}': {directory} holds {tensor}, the scale of a quantisation that surefoot does not read; "
                "choose the unquantised checkpoint, or one in float8"
            )
    modules = dict(model.named_modules())
    for tensor in extra:
        if _belongs_to_model(tensor, modules):
            raise ModelError(
                f"target '{name}': {type(model).__name__} has no place for {tensor}, which {directory} holds, and would "
                "compute something else without it; update transformers or choose another model"
            )
    if extra:
        log.warning(
            "target '%s': %d tensors of heads that serving does not need are left out (first: %s)",
            name,
            len(extra),
            extra[0],
        )


def _unexplained(unexpected: Iterable[str], config: Any) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    first = text.num_hidden_layers
    further = range(first, first + (getattr(text, "num_nextn_predict_layers", None) or 0))
    for tensor in sorted(unexpected):
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", tensor)
        if layer is not None and int(layer[1]) in further:
            continue
        if not any(pattern.search(tensor) for pattern, _ in _HARMLESS):
            yield tensor


def _belongs_to_model(tensor: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether `tensor` lies in a list of layers, or beside weights that the model has."""
    parts = tensor.split(".")[:-1]
    if any(isinstance(modules.get(".".join(parts[:depth])), nn.ModuleList) for depth in range(1, len(parts) + 1)):
        return True
    parent = modules.get(".".join(parts))
    return parent is not None and bool(parts) and any(True for _ in parent.parameters(recurse=False))


# -- values ----------------------------------------------------------------------------------------------------------------


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse NaN and infinity among the weights, by name.

    One sum per tensor, which reads it at memory speed and is not finite if any element is not; only then are the elements
    looked at (a float16 sum may overflow by itself).
    """
    for tensor, weight in model.named_parameters():
        if weight.device.type == "meta" or not weight.is_floating_point() or weight.dtype.itemsize < 2:
            continue
        if bool(weight.sum().isfinite()) or bool(weight.isfinite().all()):
            continue
        raise ModelError(
            f"target '{name}': {tensor} holds {int((~weight.isfinite()).sum())} values that are not finite in "
            f"{str(weight.dtype).removeprefix('torch.')}; download the checkpoint again"
            + (", or load it with --dtype bfloat16, if they overflowed" if weight.dtype == torch.float16 else "")
        )


def warn_of_float16(model: nn.Module, name: str) -> None:
    """Say that a model of this family is known to overflow in float16."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    reason = _OVERFLOWS_FLOAT16.get(str(getattr(text, "model_type", "")))
    if reason is not None and getattr(model, "dtype", None) == torch.float16:
        log.warning(
            "target '%s': %s overflows in float16 (%s): its text will be wrong or end early; load it with --dtype bfloat16",
            name, text.model_type, reason,
        )  # fmt: skip
