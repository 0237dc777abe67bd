"""The files of a checkpoint, judged from their headers: complete, readable, of a target, and what format the weights have."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import ModelError

PROVENANCE_FILE = "surefoot-weights.json"
"""Beside weights that surefoot converted: what they were made from."""
FLOAT8_WEIGHTS = ("float8_e4m3fn", "float8_e5m2")
"""Types of weights that need a scale (float8_e8m0fnu is a type of scales)."""
TRUST = "pass trust_remote_code (--trust-remote-code) if you trust its author"
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_DRAFTER_NAMES = ("dspark", "dflash", "eagle", "medusa")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
           "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
           "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a safetensors file, without its data."""

    file: Path
    dtype: str  # torch's name
    shape: tuple[int, ...]


def read_json(path: Path, name: str, remedy: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelError` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"target '{name}': {path} cannot be read ({first_line(error)}); {remedy}") from error
    if not isinstance(content, dict):
        raise ModelError(f"target '{name}': {path} holds a {type(content).__name__}, not a JSON object; {remedy}")
    return content


def drafter_architecture(config: Any) -> str | None:
    """The drafter that the content of a `config.json` describes, None if it describes none."""
    if not isinstance(config, dict):
        return None
    listed = config.get("architectures")
    names = [config.get("speculators_model_type"), *(listed if isinstance(listed, list) else ())]
    return next((str(name) for name in names if any(word in str(name).lower() for word in _DRAFTER_NAMES)), None)


def check_checkpoint(directory: Path, name: str, *, remedy: str = "copy or download it again") -> None:
    """Refuse a directory that is no target, or whose files are missing, cut off or of the wrong shape; reads headers only.

    Raises:
        ModelError: one line with the file, what is wrong with it, and `remedy`.
    """
    config = read_json(directory / "config.json", name, remedy)
    if drafter := drafter_architecture(config):
        raise ModelError(
            f"target '{name}' is a drafter ({drafter}), not a target: give it as the drafter (--drafter {name}), and the "
            "model it was trained for as the target"
        )
    files = weight_files(directory, name, remedy)
    if not files:
        raise ModelError(f"target '{name}': {directory} holds no .safetensors or .bin weights; {remedy}")
    for file in files:
        if not file.is_file():
            raise ModelError(f"target '{name}': {file} is missing; {remedy}")
        if not os.access(file, os.R_OK):
            raise ModelError(f"target '{name}': this user may not read {file}; ask its owner for read permission")
        if file.suffix == ".safetensors":
            _check_safetensors(file, name, remedy)


def _check_safetensors(file: Path, name: str, remedy: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"target '{name}': {file} is truncated or corrupt ({first_line(error)}); {remedy}") from error


def weight_files(directory: Path, name: str, remedy: str = "copy or download it again") -> Sequence[Path]:
    """The weight files a checkpoint consists of, whether or not they are there. Raises `ModelError` for a damaged index."""
    for index in _INDICES:
        if (directory / index).is_file():
            shards = read_json(directory / index, name, remedy).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ModelError(f"target '{name}': {directory / index} has no weight_map; {remedy}")
            for tensor, shard in shards.items():
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise ModelError(
                        f"target '{name}': {directory / index} puts {tensor} into {shard!r}, which is no file name; {remedy}"
                    )
            return [directory / shard for shard in sorted(set(shards.values()))]
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))


def tensor_headers(directory: Path, name: str) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint's safetensors files by its name; empty for other formats."""
    found: dict[str, TensorHeader] = {}
    for file in weight_files(directory, name):
        if file.suffix == ".safetensors":
            found.update(_headers(file))
    return found


def _headers(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        for tensor, entry in json.loads(stream.read(length)).items():
            if tensor != "__metadata__":
                yield tensor, TensorHeader(file, _DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))


def describe_weights(directory: Path, name: str) -> str:
    """The format of a checkpoint's weights as one phrase: `bfloat16 safetensors`, or what a conversion noted.

    Float8 is named where any matrix has it, the most frequent type otherwise.
    """
    try:
        return str(json.loads((directory / PROVENANCE_FILE).read_text(encoding="utf-8"))["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not made by a conversion, or by one that noted nothing
    matrices = [header.dtype for header in tensor_headers(directory, name).values() if len(header.shape) >= 2]
    if not matrices:
        return "PyTorch pickle"
    common = max(dict.fromkeys(matrices), key=matrices.count)
    if float8 := next((dtype for dtype in matrices if dtype in FLOAT8_WEIGHTS), None):
        return f"{float8} safetensors, de-quantised"
    return f"{common} safetensors"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
