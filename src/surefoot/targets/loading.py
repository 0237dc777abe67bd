"""`load_target`: a name becomes a target. `describe_target`: what it would be, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from surefoot.cache.paged import LayerSpec
from surefoot.errors import ConfigurationError, ModelError
from surefoot.targets.attention import ATTENTION_NAME
from surefoot.targets.probe import architecture_name, check_config, probe, text_config
from surefoot.targets.sources import locate, prepare
from surefoot.targets.target import Target, freeze_rope

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_READ_ERRORS = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class TargetDescription:
    """What a checkpoint is, and whether surefoot can serve it."""

    name: str
    source: str  # directory, file or hub id the name stands for
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_model_len: int
    windows: tuple[int | None, ...]  # per layer, None = full attention; empty when not servable
    dtype: str
    num_parameters: int
    num_bytes: int  # of the weights in `dtype`, a tied head counted once
    kv_bytes_per_token: int  # 0 when not servable
    tied_embeddings: bool
    chat_template: bool
    servable: bool
    reason: str | None  # why not


def load_target(
    name: str, *, dtype: torch.dtype | str | None = None, device: str | torch.device = "cpu", quiet: bool = False
) -> Target:
    """Find, read and wrap a target.

    Args:
        name: an alias, a directory, a `.gguf` file or a Hugging Face id.
        dtype: of the weights; None or "auto" keeps the checkpoint's.
        device: where the weights go.
        quiet: no progress bar on stderr.

    Raises:
        ModelError: unknown name, unreadable files, or an architecture surefoot cannot serve.
        ConfigurationError: a dtype or device that does not exist.
    """
    chosen, place = _dtype(dtype), _device(device)
    directory = prepare(locate(name), quiet=quiet)
    check_config(_read_config(directory, name))
    model = _read_model(directory, name, chosen)
    return Target(model.to(place), _read_tokenizer(directory), name=name)


def load_untouched(name: str, *, dtype: torch.dtype | str | None = None, quiet: bool = False) -> Any:
    """The same model as transformers makes it, on the CPU: what `load_target`'s is compared with. Raises as that does."""
    chosen = _dtype(dtype)
    directory = prepare(locate(name), quiet=quiet)
    check_config(_read_config(directory, name))
    return _read_model(directory, name, chosen, attention=None).eval()


def describe_target(name: str, *, quiet: bool = False) -> TargetDescription:
    """Architecture, sizes and servability of a target, without loading its weights (a hub id is downloaded, though).

    Raises:
        ModelError: unknown name or unreadable files. An architecture that cannot be served is no error here.
    """
    source = locate(name)
    if source.kind == "gguf":  # the header tells everything; no need to de-quantise
        assert source.path is not None
        directory, gguf = source.path.parent, source.path.name
    else:
        directory, gguf = prepare(source, quiet=quiet), None
    config = _read_config(directory, name, gguf)
    text, tokenizer = text_config(config), _read_tokenizer(directory, gguf)
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.bfloat16
    limit: int | None = None
    reason: str | None = None
    layers: tuple[LayerSpec, ...] = ()
    num_parameters = 0
    try:
        check_config(config)
        with torch.device("meta"):  # bfloat16 whatever the checkpoint's: some expert kernels know no other on meta
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        limit = freeze_rope(model)
        layers = probe(model.eval()).layers
    except ModelError as error:
        reason = str(error)
    except _READ_ERRORS as error:
        reason = _build_failure(architecture_name(config), error)
    bytes_each = torch.empty((), dtype=dtype, device="meta").element_size()
    stated = getattr(text, "max_position_embeddings", None) or 0
    return TargetDescription(
        name=name,
        source=str(source.repository or source.path or directory),
        architecture=architecture_name(config),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        vocab_size=text.vocab_size,
        max_model_len=min(stated, limit or stated),
        windows=tuple(spec.window for spec in layers),
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        num_bytes=num_parameters * bytes_each,
        kv_bytes_per_token=round(bytes_each * sum(spec.entry_size / spec.stride for spec in layers)),
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
        servable=reason is None,
        reason=reason,
    )


def _read_config(directory: Path, name: str, gguf: str | None = None) -> Any:
    extra = {} if gguf is None else {"gguf_file": gguf}
    try:
        return AutoConfig.from_pretrained(str(directory), **extra)
    except _READ_ERRORS as error:
        raise ModelError(
            f"target '{name}': transformers does not know this configuration ({_first_line(error)}); update "
            "transformers or choose another model"
        ) from error


def _read_tokenizer(directory: Path, gguf: str | None = None) -> Any:
    """The tokenizer, or None for a checkpoint that brings none (transformers would invent an empty one)."""
    if gguf is None and not any((directory / file).is_file() for file in _VOCABULARY_FILES):
        return None
    extra = {} if gguf is None else {"gguf_file": gguf}
    try:
        return AutoTokenizer.from_pretrained(str(directory), **extra)
    except _READ_ERRORS:
        return None


def _read_model(directory: Path, name: str, dtype: torch.dtype | str, attention: str | None = ATTENTION_NAME) -> Any:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except _READ_ERRORS as error:
        raise ModelError(f"target '{name}' cannot be loaded: {_build_failure(name, error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random weights
        raise ModelError(
            f"target '{name}': {len(missing)} weights are missing from {directory} (first: {missing[0]}); copy or "
            "download it again"
        )
    return model


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None or dtype == "auto":
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype '{dtype}': allowed are auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device '{device}' is unknown: give cpu, cuda or cuda:N") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device '{device}': PyTorch sees no CUDA device here; use device='cpu'")
    return place


def _build_failure(architecture: str, error: BaseException) -> str:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # a table of its own attention classes
        return f"{architecture} does not use transformers' AttentionInterface; choose another model"
    return f"transformers cannot build {architecture} ({_first_line(error)}); choose another model"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
