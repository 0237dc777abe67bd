"""GGUF -> bf16 safetensors, once, atomically.

Everything is written into a temporary directory beside the final one and renamed at the end. An interrupt leaves
nothing half-written, and of two processes converting at once both succeed: the second finds the first one's result.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from surefoot.errors import ModelError
from surefoot.targets.checkpoint import PROVENANCE_FILE, first_line
from surefoot.targets.rope_scaling import FREQUENCY_TENSORS, apply_rope_scaling

# Tokens that end a text by their name. A GGUF states one end token; a model that was trained on several emits any.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_CHUNK_BYTES = 8 << 20
_LOCK = "lock"
"""In a working directory, held by the process that works there: without a holder it is a leftover."""
_UNLOCKED_S = 3600.0  # a working directory without a lock is being made right now, unless it is this old


def convert_gguf(
    parts: Sequence[Path],
    directory: Path,
    *,
    name: str,
    num_bytes: int | None = None,
    sha256: str | None = None,
    tied: bool = False,
    remedy: str = "copy or download the file again",
    quiet: bool = False,
) -> Path:
    """De-quantise the GGUF that `parts` form into `directory`, with tokenizer and end tokens, unless it is there.

    Args:
        parts: files whose concatenation is the GGUF.
        directory: final place; it appears complete or not at all.
        name: what the user calls the target, for messages.
        num_bytes, sha256: expected size and digest of the concatenation (None: not checked).
        tied: the model has one weight for embedding and head. A GGUF may store it twice at different precision; the
            head's, which quantisers keep finer, is used for both.
        remedy: what to do about damaged parts.
        quiet: no progress bar on stderr.

    Returns:
        `directory`.

    Raises:
        ModelError: wrong size or digest, not a readable GGUF, or an architecture transformers cannot read from GGUF.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory.parent)
        with _workplace(directory.parent) as work, _progress(name, quiet) as (bar, task):
            bar.update(task, description=f"{name}: checking")
            gguf = _join(parts, work / "weights.gguf", num_bytes, sha256, name, remedy)
            result = work / "model"
            _dequantise(gguf, result, name, tied, remedy, bar, task)
            result.chmod(0o755)  # mkdtemp and safetensors make them private; a cache may be shared
            for file in result.iterdir():
                file.chmod(0o644)
            with contextlib.suppress(OSError):  # another process was faster: its result is as good
                os.rename(result, directory)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ModelError(
            f"target '{name}': de-quantising into {directory.parent} failed ({reason}); free some space there, or set "
            "SUREFOOT_CACHE to a directory that is writable and has room for the bf16 weights"
        ) from error
    if not directory.is_dir():
        raise ModelError(f"target '{name}': {directory} could not be created; set SUREFOOT_CACHE to another directory")
    return directory


@contextlib.contextmanager
def _workplace(parent: Path) -> Iterator[Path]:
    """A directory under `parent` that is locked while this process lives, and removed at the end."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=parent))
        lock = FileLock(work / _LOCK)
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:  # another start took it for a leftover between the two lines above, and removes it
            continue
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.release()


def _remove_leftovers(parent: Path) -> None:
    """Clear away what killed conversions left (an interrupted one cleans up after itself)."""
    for left in parent.glob(".converting-*"):
        with contextlib.suppress(OSError, Timeout):
            if not (left / _LOCK).is_file():
                if time.time() - left.stat().st_mtime > _UNLOCKED_S:
                    shutil.rmtree(left, ignore_errors=True)
                continue
            with FileLock(left / _LOCK).acquire(timeout=0):
                shutil.rmtree(left, ignore_errors=True)


def _join(
    parts: Sequence[Path], joined: Path, num_bytes: int | None, sha256: str | None, name: str, remedy: str
) -> Path:
    """One file from the parts, checked while it is written; a single unchecked part is used where it lies."""
    if len(parts) == 1 and sha256 is None:
        return parts[0]
    digest, size = hashlib.sha256(), 0
    with joined.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
    if num_bytes is not None and size != num_bytes:
        raise ModelError(f"target '{name}': the parts have {size:,} bytes instead of {num_bytes:,}; {remedy}")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ModelError(
            f"target '{name}': the parts have SHA-256 {digest.hexdigest()[:12]}..., expected {sha256[:12]}...; {remedy}"
        )
    return joined


def _dequantise(gguf: Path, result: Path, name: str, tied: bool, remedy: str, bar: Progress, task: TaskID) -> None:
    """Weights first and written out at once, then the vocabulary: the two are never in memory together."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"target '{name}' is not a GGUF file; {remedy}")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "trust_remote_code": False,
    }  # fmt: skip
    try:
        bar.update(task, advance=1, description=f"{name}: de-quantising to bfloat16")
        with _silenced():
            model, info = AutoModelForCausalLM.from_pretrained(
                **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, output_loading_info=True
            )
            weights = _check_tensors(gguf, model, info["missing_keys"], name)
            apply_rope_scaling(model.config, gguf, name)
            if tied and not model.config.tie_word_embeddings:
                model.get_input_embeddings().weight = model.get_output_embeddings().weight
                model.config.tie_word_embeddings = True
            bar.update(task, advance=1, description=f"{name}: writing {result.parent.parent}")
            _write(model, result)
            generation = model.generation_config
            del model
            bar.update(task, advance=1, description=f"{name}: reading the vocabulary")
            tokenizer = AutoTokenizer.from_pretrained(**place)
    except (ModelError, OSError):
        raise
    except Exception as error:  # whatever a damaged file, or an architecture transformers half knows, makes of it
        raise ModelError(
            f"target '{name}' is truncated, or not a GGUF that transformers reads ({first_line(error)}); {remedy}"
        ) from error
    _write(tokenizer, result)
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[token] for token in _END_TOKENS if token in vocabulary} | {tokenizer.eos_token_id}
    generation.eos_token_id = sorted(end for end in ends if end is not None) or None
    _write(generation, result)
    provenance = {"weights": f"{weights}, de-quantised to bfloat16"}
    (result / PROVENANCE_FILE).write_text(json.dumps(provenance), encoding="utf-8")
    bar.update(task, advance=1)


def _write(part: Any, result: Path) -> None:
    """`save_pretrained`, with a full disk as the `OSError` it is (safetensors has an error of its own)."""
    from safetensors import SafetensorError

    try:
        part.save_pretrained(result)
    except SafetensorError as error:
        raise OSError(first_line(error)) from error


def describe_gguf(path: Path) -> str:
    """The kind of a GGUF: `Q4_K_M GGUF`, or its most frequent type where the file does not say."""
    import gguf

    reader = gguf.GGUFReader(path)
    stated = reader.get_field("general.file_type")
    with contextlib.suppress(ValueError, TypeError):
        if stated is not None:
            return f"{gguf.LlamaFileType(stated.contents()).name.removeprefix('MOSTLY_').removeprefix('ALL_')} GGUF"
    types = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) >= 2]
    return f"{max(set(types), key=types.count)} GGUF" if types else "GGUF"


def _check_tensors(gguf_path: Path, model: Any, missing: Collection[str], name: str) -> str:
    """Refuse a file without all of the model's weights, or with weights the model has no place for; returns its kind."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    if missing:
        raise ModelError(
            f"target '{name}': the GGUF lacks {len(missing)} weights of {type(model).__name__} (first: {min(missing)}); copy or "
            "download it again"
        )
    reader = gguf.GGUFReader(gguf_path)
    architecture = str(reader.get_field("general.architecture").contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        if tensor.name in known or stem in known or tensor.name in FREQUENCY_TENSORS or "_exps" in stem:
            continue
        raise ModelError(
            f"target '{name}': {type(model).__name__} has no place for {tensor.name}, which the GGUF holds, and would compute "
            "something else without it; choose the checkpoint in Hugging Face layout"
        )
    return describe_gguf(gguf_path)


@contextlib.contextmanager
def _progress(name: str, quiet: bool) -> Iterator[tuple[Progress, TaskID]]:
    """Four stages on stderr: check, read the vocabulary, de-quantise, write."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/4"), TimeElapsedColumn())
    # The console keeps today's stderr: transformers' own bars are silenced by replacing sys.stderr meanwhile.
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=quiet, redirect_stderr=False, redirect_stdout=False) as bar:
        yield bar, bar.add_task(name, total=4)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Without transformers' own bars (no switch reaches all of them), and one tensor at a time, for the peak memory."""
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before
