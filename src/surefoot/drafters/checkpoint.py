"""Drafter checkpoints on disk: load, save, describe, and say whether one fits a target."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surefoot.drafters.config import DSparkConfig
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.layouts import LAYOUTS, Layout, Shapes, read_config, write_config
from surefoot.drafters.locations import shipped_named
from surefoot.drafters.model import DSparkModel
from surefoot.errors import DrafterError
from surefoot.kernels import formats
from surefoot.kernels.formats import StoredWeight, WeightFormat

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_WRAPPERS = ("model.", "draft_model.", "logit_head.")  # SpecForge's versions put these before tensor names
_VOCABULARY_MAPS = ("d2t", "t2d")
_TARGETS_OWN = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies some speculators versions write; unused
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8,
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class DrafterDescription:
    """What a checkpoint is, read from its configuration and file headers alone."""

    path: str
    layout: str  # a `Layout`, or "specforge"
    config: DSparkConfig
    dtype: str
    parameters: int  # numbers stored, without row scales and vocabulary maps
    bytes: int  # size of the weight files
    shares: tuple[str, ...]  # of embed_tokens and lm_head: those the target has to lend

    @property
    def kind(self) -> str:
        return self.config.kind

    @property
    def gamma(self) -> int:
        return self.config.gamma

    @property
    def head(self) -> str:
        """The sequential head as text: `vanilla, rank 8`, or `none`."""
        return f"{self.config.markov_head_type}, rank {self.config.markov_rank}" if self.config.markov_rank else "none"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, one level deep."""
        config = self.config
        return {
            "path": self.path,
            "kind": self.kind,
            "layout": self.layout,
            "gamma": self.gamma,
            "block_size": config.block_size,
            "sample_from_anchor": config.sample_from_anchor,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "target_hidden_size": config.target_width,
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": list(config.target_layer_ids),
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.vocabulary_size,
            "head": self.head,
            "confidence_head": config.enable_confidence_head,
            "dtype": self.dtype,
            "weight_storage": config.weight_storage,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "shares": list(self.shares),
        }


def load_drafter(
    path_or_id: str | Path,
    *,
    gamma: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> DSparkDrafter:
    """Load a DSpark or DFlash drafter; `bind` it to its target before use.

    Args:
        path_or_id: a local directory, the name of a shipped drafter, or the id of a Hugging Face repository.
        gamma: draft tokens per block, 1 up to what the checkpoint was trained for (the default). The block is computed
            at its trained length whatever gamma is: attention inside it is bidirectional.
        dtype: of the weights; None keeps the checkpoint's.

    Raises:
        DrafterError: cannot be found or read, or is not what its configuration says; the message has the remedy.
    """
    directory = resolve_checkpoint(path_or_id)
    raw, headers = _read_json(directory), _Headers(directory)
    config, _ = read_config(raw, str(directory), headers.shapes)
    stored = _stored_dtype(raw, headers)
    model = _blank(config, _vocabulary(config, headers, directory), headers.shapes)
    expected = _shapes(model.own_tensors())
    _check_tensors(expected, headers, directory)

    tensors = headers.load(set(expected))
    widened = {name: t.dequantize() if isinstance(t, StoredWeight) else t for name, t in tensors.items()}
    model.load_state_dict({name: t.to(dtype or stored) for name, t in widened.items()}, assign=True)
    model.stored = {name: t for name, t in tensors.items() if isinstance(t, StoredWeight)}
    return DSparkDrafter(model.to(device).eval(), gamma, origin=str(path_or_id), checkpoint=directory)


def save_drafter(drafter: DSparkDrafter, path: str | Path, layout: Layout = "deepspec") -> None:
    """Write a drafter's directory; an interrupted call leaves whatever stood there before.

    Embedding and head that the model borrows from its target are not written. Files of the old directory that are not
    part of a checkpoint (a card, a calibration) stay.

    Raises:
        DrafterError: the layout cannot say what this drafter is, or its modules were replaced for serving.
    """
    if layout not in LAYOUTS:
        raise DrafterError(f"layout {layout!r}: allowed are {', '.join(LAYOUTS)}")
    model, config = drafter.model, drafter.config
    raw = write_config(config, layout, str(model.dtype).removeprefix("torch."))
    tensors = _tensors_to_save(model, layout)
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        save_file(tensors, fresh / _WEIGHTS, metadata={"format": "pt"})
        (fresh / _CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
        fresh.chmod(0o755)  # mkdtemp and safetensors make them private
        (fresh / _WEIGHTS).chmod(0o644)
        _swap(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def describe_checkpoint(path: str | Path) -> DrafterDescription:
    """What is in a checkpoint, without loading its weights.

    Raises:
        DrafterError: cannot be found, is no block drafter, or its files are damaged.
    """
    directory = resolve_checkpoint(path)
    raw, headers = _read_json(directory), _Headers(directory)
    config, layout = read_config(raw, str(directory), headers.shapes)
    counted = [s for n, s in headers.shapes.items() if n not in _VOCABULARY_MAPS]
    return DrafterDescription(
        path=str(path),
        layout=layout,
        config=config,
        dtype=str(_stored_dtype(raw, headers)).removeprefix("torch."),
        parameters=sum(torch.Size(shape).numel() for shape in counted),
        bytes=sum(file.stat().st_size for file in headers.files),
        shares=tuple(name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in headers.shapes),
    )


class _Headers:
    """Names, shapes and dtypes of a checkpoint's tensors, and access to them.

    Raises:
        DrafterError: no weight files, or one that is truncated or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.files = _weight_files(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of matrices in a format of their own: N and K
        self.dtypes: dict[str, torch.dtype] = {}
        self.formats: dict[str, WeightFormat] = {}  # of those matrices
        self._home: dict[str, tuple[Path, str]] = {}  # file and the name in it
        for file in self.files:
            try:
                with safe_open(file, "pt") as handle:
                    for stored in sorted(handle.keys()):
                        tensor, name = handle.get_slice(stored), _unwrapped(stored)
                        self.shapes[name] = tuple(tensor.get_shape())
                        self.dtypes[name] = _DTYPES.get(tensor.get_dtype(), torch.uint8)
                        self._home[name] = file, stored
            except (SafetensorError, OSError) as error:
                raise DrafterError(
                    f"{file} is truncated or damaged ({error}): download or save the checkpoint again"
                ) from None

        for name in list(self.shapes):
            format = formats.stored_as(name, self.dtypes)
            if format is formats.DENSE or name not in self.shapes:
                continue
            self.formats[name] = format
            shapes = {suffix: self.shapes.pop(name + suffix) for suffix in format.suffixes}
            self.shapes[name] = format.shape(shapes)

    def load(self, names: set[str]) -> dict[str, Tensor | StoredWeight]:
        """Those of the tensors that are there, matrices in a format of their own as it stores them.

        Raises:
            DrafterError: one of them holds NaN or infinity.
        """
        wanted = {name + suffix for name in names for suffix in self._suffixes(name)}
        read: dict[str, Tensor] = {}
        for file in self.files:
            with safe_open(file, "pt") as handle:
                for name in wanted & set(self._home):
                    home, stored = self._home[name]
                    if home == file:
                        read[name] = handle.get_tensor(stored)
        for name, tensor in sorted(read.items()):
            if tensor.is_floating_point() and tensor.numel() and not all(e.isfinite() for e in tensor.aminmax()):
                raise DrafterError(
                    f"{self._home[name][0]}: tensor {name} holds NaN or infinity: the checkpoint is damaged, download or "
                    "save it again"
                )
        return {
            name: StoredWeight(self.formats[name], {suffix: read[name + suffix] for suffix in self._suffixes(name)})
            if name in self.formats
            else read[name]
            for name in names
            if name in read
        }

    def _suffixes(self, name: str) -> tuple[str, ...]:
        return self.formats[name].suffixes if name in self.formats else ("",)


def _unwrapped(name: str) -> str:
    """A tensor's name without the containers that some versions of SpecForge save it in."""
    while prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def resolve_checkpoint(path_or_id: str | Path) -> Path:
    """The local directory of a checkpoint: itself, the package's for the name of a shipped one, or downloaded for a hub id.

    Raises:
        DrafterError: there is none, or it cannot be fetched.
    """
    if shipped := shipped_named(str(path_or_id)):
        return shipped.path
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_id)
    looks_local = path.exists() or name.count("/") != 1 or name[0] in "./~"
    if looks_local:
        what = "is a file" if path.exists() else "does not exist"
        raise DrafterError(
            f"drafter {name!r} {what}: give a directory with config.json and safetensors, "
            "or a Hugging Face id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub raises its own, requests', httpx' and the operating system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DrafterError(
            f"drafter {name!r} is no local directory and could not be fetched from the Hugging Face hub ({reason}): "
            "check the name and the connection, or download it and give its directory"
        ) from None


def _read_json(directory: Path) -> dict[str, Any]:
    file = directory / _CONFIG
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise DrafterError(f"{directory} has no {_CONFIG}: give the directory of a drafter checkpoint") from None
    except (OSError, ValueError) as error:
        raise DrafterError(f"{file} cannot be read ({error}): download or save the checkpoint again") from None
    if not isinstance(raw, dict):
        raise DrafterError(f"{file} holds no JSON object: download or save the checkpoint again")
    return raw


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("weight_map names no files beside it")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
            raise DrafterError(
                f"{index} is damaged ({type(problem).__name__}: {problem}): download or save the checkpoint again"
            ) from None
        files = [directory / name for name in names]
    else:
        files = [directory / _WEIGHTS]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise DrafterError(f"{directory} lacks {', '.join(missing)}: download or save the checkpoint again")
    return files


def _stored_dtype(raw: dict[str, Any], headers: _Headers) -> torch.dtype:
    """Dtype of the weights: the stored one, or what a checkpoint in a format of its own is to be widened to."""
    dtype: Any = headers.dtypes.get("fc.weight", torch.float32)
    if "fc.weight" in headers.formats:
        dtype = getattr(torch, str(raw.get("dtype", "float32")).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


def _vocabulary(config: DSparkConfig, headers: _Headers, directory: Path) -> Tensor | None:
    """Draft id -> target id, from the offsets in `d2t`; checked against `t2d` where that is stored too."""
    if config.draft_vocab_size is None:
        return None
    if headers.shapes.get("d2t") != (config.draft_vocab_size,):
        raise DrafterError(
            f"{directory}: draft_vocab_size {config.draft_vocab_size} needs a tensor d2t of that length, "
            f"found {headers.shapes.get('d2t', 'none')}: download or save the checkpoint again"
        )
    maps = {name: t for name, t in headers.load(set(_VOCABULARY_MAPS)).items() if isinstance(t, Tensor)}
    vocabulary = torch.arange(config.draft_vocab_size, device="cpu") + maps["d2t"].to(torch.int64)
    inside = bool(((vocabulary >= 0) & (vocabulary < config.vocab_size)).all())
    if not inside or vocabulary.unique().numel() != config.draft_vocab_size:
        raise DrafterError(
            f"{directory}: d2t maps draft ids outside the {config.vocab_size} target tokens, or two to one: "
            "the checkpoint is damaged, download or save it again"
        )
    if "t2d" in maps:
        mask = maps["t2d"].to(torch.bool)
        if mask.shape != (config.vocab_size,) or not torch.equal(mask.nonzero().squeeze(1), vocabulary.sort().values):
            raise DrafterError(
                f"{directory}: t2d and d2t name different tokens: the checkpoint is damaged, download or save it again"
            )
    return vocabulary


def _blank(config: DSparkConfig, vocabulary: Tensor | None, stored: Container[str]) -> DSparkModel:
    """A model without storage, that holds embedding and head where `stored` has them."""
    own = tuple(name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in stored)
    with torch.device("meta"):
        try:
            return DSparkModel(config, vocabulary=vocabulary, own_vocabulary=own)
        except (RuntimeError, OverflowError) as problem:  # sizes that no tensor can have
            raise DrafterError(f"{_CONFIG} describes sizes that cannot be: {problem}: repair or replace it") from None


def _shapes(tensors: dict[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_tensors(expected: Shapes, headers: _Headers, directory: Path) -> None:
    ignored = {*_VOCABULARY_MAPS, *_TARGETS_OWN}
    missing = sorted(set(expected) - set(headers.shapes))
    extra = sorted(set(headers.shapes) - set(expected) - ignored)
    wrong = [n for n in sorted(set(expected) & set(headers.shapes)) if headers.shapes[n] != expected[n]]
    if not (missing or extra or wrong):
        return
    parts = []
    if missing:
        parts.append(f"lacks {_some(missing)}")
    if extra:
        parts.append(f"has {_some(extra)} its configuration does not ask for")
    if wrong:
        name = wrong[0]
        shape, wanted = list(headers.shapes[name]), list(expected[name])
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        parts.append(f"has {name} of shape {shape} where its configuration says {wanted}{more}")
    raise DrafterError(
        f"checkpoint {directory} {', '.join(parts)}: weights and {_CONFIG} do not belong together, "
        "download or save the checkpoint again"
    )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({', '.join(names[:3])}{', …' * (len(names) > 3)})"


def _tensors_to_save(model: DSparkModel, layout: Layout) -> dict[str, Tensor]:
    tensors = model.own_tensors()
    config = model.config
    if _shapes(tensors) != _shapes(_blank(config, model.vocabulary, tensors).own_tensors()):
        raise DrafterError("the drafter's modules were replaced for serving: save it before it is optimised")
    if layout == "speculators":
        tensors.pop("embed_tokens.weight", None)
        if config.draft_vocab_size is None:
            tensors.pop("lm_head.weight", None)
        elif model.lm_head is None:
            raise DrafterError("the speculators layout stores a reduced head: bind the drafter to its target first")
        else:
            tensors["lm_head.weight"] = model.lm_head.weight
    tensors = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
    if config.weight_storage != "native":
        tensors = _quantized(tensors, formats.find(config.weight_storage), model.unchanged())
    if model.vocabulary is not None:
        vocabulary = model.vocabulary.to("cpu")
        tensors["d2t"] = vocabulary - torch.arange(vocabulary.shape[0])
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _quantized(
    tensors: dict[str, Tensor], format: WeightFormat, unchanged: Mapping[str, StoredWeight]
) -> dict[str, Tensor]:
    """Matrices as a format stores them, those that were loaded and not changed as they lay there; the rest as it is."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or "norm" in name:
            stored[name] = tensor
        else:
            kept = unchanged.get(name)
            matrix = kept if kept is not None and kept.format is format else format.quantize(tensor)
            stored |= {name + suffix: part for suffix, part in matrix.tensors.items()}
    return stored


def _swap(fresh: Path, path: Path) -> None:
    """Put the finished directory `fresh` in the place of `path`."""
    if not path.exists():
        os.rename(fresh, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent)) / path.name
    os.rename(path, old)
    try:
        os.rename(fresh, path)
    except OSError:
        os.rename(old, path)
        raise
    for file in old.iterdir():
        if file.name not in (_CONFIG, _INDEX) and file.suffix != ".safetensors":
            os.rename(file, path / file.name)
    shutil.rmtree(old.parent)
