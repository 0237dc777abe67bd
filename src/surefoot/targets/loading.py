"""`load_target`: a name becomes a target. `describe_target`: what it would be, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefoot.cache.paged import LayerSpec
from surefoot.errors import ConfigurationError, ModelError
from surefoot.targets.attention import ATTENTION_NAME
from surefoot.targets.checkpoint import TRUST, first_line
from surefoot.targets.conversion import describe_gguf
from surefoot.targets.probe import architecture_name, check_config, probe, text_config
from surefoot.targets.rope_scaling import apply_rope_scaling
from surefoot.targets.sources import locate, prepare, weights_of
from surefoot.targets.target import Target, freeze_rope
from surefoot.targets.weights import build_failure, read_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


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
    weights: str  # what they are made of: `bfloat16 safetensors`, `Q4_K_M GGUF, de-quantised to bfloat16`, ...
    num_parameters: int
    num_bytes: int  # of the weights in `dtype`, a tied head counted once
    kv_bytes_per_token: int  # 0 when not servable
    tied_embeddings: bool
    chat_template: bool
    servable: bool
    reason: str | None  # why not


def load_target(
    name: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Target:
    """Find, read and wrap a target.

    Args:
        name: an alias, a directory, a `.gguf` file or a Hugging Face id.
        dtype: of the weights; None or "auto" keeps the checkpoint's.
        device: where the weights go.
        trust_remote_code: run Python code that the checkpoint brings; without it, such a checkpoint is refused.
        quiet: no progress bar on stderr.

    Raises:
        ModelError: unknown name, unreadable files, or an architecture surefoot cannot serve.
        ConfigurationError: a dtype or device that does not exist.
    """
    chosen, place = _dtype(dtype), _device(device)
    source = locate(name)
    directory = prepare(source, quiet=quiet, with_code=trust_remote_code)
    config = _read_config(directory, name, trust_remote_code)
    check_config(config)
    tokenizer = _read_tokenizer(directory, name, trust_remote_code)  # before seconds go into the weights
    model = read_model(
        directory, config, name, dtype=chosen, attention=ATTENTION_NAME, trust_remote_code=trust_remote_code
    )
    return Target(model.to(place), tokenizer, name=name, weights=weights_of(source, directory))


def load_untouched(
    name: str, *, dtype: torch.dtype | str | None = None, trust_remote_code: bool = False, quiet: bool = False
) -> Any:
    """The same model as transformers makes it, on the CPU: what `load_target`'s is compared with. Raises as that does."""
    chosen = _dtype(dtype)
    directory = prepare(locate(name), quiet=quiet, with_code=trust_remote_code)
    config = _read_config(directory, name, trust_remote_code)
    check_config(config)
    return read_model(directory, config, name, dtype=chosen, attention=None, trust_remote_code=trust_remote_code).eval()


def describe_target(name: str, *, trust_remote_code: bool = False, quiet: bool = False) -> TargetDescription:
    """Architecture, sizes and servability of a target, without loading its weights (a hub id is downloaded, though).

    Raises:
        ModelError: unknown name or unreadable files. An architecture that cannot be served is no error here.
    """
    source = locate(name)
    gguf: Path | None = None
    if source.kind == "gguf":  # the header tells everything; no need to de-quantise
        assert source.path is not None
        directory, gguf = source.path.parent, source.path
    else:
        directory = prepare(source, quiet=quiet, with_code=trust_remote_code)
    config = _read_config(directory, name, trust_remote_code, gguf)
    text = text_config(config)
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    dtype = stored if isinstance(stored, torch.dtype) and stored.itemsize > 1 else torch.bfloat16
    tokenizer = None
    limit: int | None = None
    reason: str | None = None
    layers: tuple[LayerSpec, ...] = ()
    num_parameters = 0
    try:
        check_config(config)
        tokenizer = _read_tokenizer(directory, name, trust_remote_code, gguf)
        with torch.device("meta"):  # bfloat16 whatever the checkpoint's: some expert kernels know no other on meta
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
            )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        limit = freeze_rope(model)
        layers = probe(model.eval()).layers
    except ModelError as error:
        reason = str(error)
    except Exception as error:  # whatever an architecture's own code makes of its configuration
        reason = build_failure(config, error)
    stated = getattr(text, "max_position_embeddings", None) or 0
    try:
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
            weights=f"{describe_gguf(gguf)}, de-quantised to bfloat16" if gguf else weights_of(source, directory),
            num_parameters=num_parameters,
            num_bytes=num_parameters * dtype.itemsize,
            kv_bytes_per_token=round(dtype.itemsize * sum(spec.entry_size / spec.stride for spec in layers)),
            tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
            chat_template=bool(getattr(tokenizer, "chat_template", None)),
            servable=reason is None,
            reason=reason,
        )
    except (AttributeError, TypeError) as error:  # a configuration without sizes, or with sizes that are no numbers
        raise ModelError(reason or f"target '{name}': {build_failure(config, error)}") from error


def _read_config(directory: Path, name: str, trust_remote_code: bool = False, gguf: Path | None = None) -> Any:
    extra = {} if gguf is None else {"gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code, **extra)
        text_config(config)
    except Exception as error:  # wrong types in the file end as any exception
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"target '{name}' needs Python code that lies in its checkpoint: {TRUST}, or choose another model"
            ) from error
        raise ModelError(
            f"target '{name}': transformers does not know this configuration ({first_line(error)}); update "
            "transformers or choose another model"
        ) from error
    if gguf is not None:
        apply_rope_scaling(config, gguf, name)
    return config


def _read_tokenizer(directory: Path, name: str, trust_remote_code: bool = False, gguf: Path | None = None) -> Any:
    """The tokenizer, or None for a checkpoint that brings none (transformers would invent an empty one).

    Raises:
        ModelError: there is one, and it cannot be read.
    """
    present = [file for file in _VOCABULARY_FILES if (directory / file).is_file()]
    if gguf is None and not present:
        return None
    extra = {} if gguf is None else {"gguf_file": gguf.name}
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code, **extra)
    except Exception as error:  # the tokenizers library raises bare exceptions for damaged files
        what = gguf.name if gguf else present[0]
        if "trust_remote_code" in str(error):
            reason = f"needs Python code that lies in the checkpoint: {TRUST}"
        elif isinstance(error, ImportError):
            reason = f"needs a package that is not installed ({first_line(error)})"
        else:
            reason = f"cannot be read ({first_line(error)}): copy or download it again"
        raise ModelError(
            f"target '{name}': its tokenizer ({what}) {reason}, or remove it to give token ids only"
        ) from error


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
