"""What a cost table was measured on, and where the tables of this machine lie.

A table is found by everything that changes what a step costs. `max_num_seqs` only says how far it was measured: a table of
16 requests serves an engine of 4, not the other way round.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from surefoot.errors import CostTableError
from surefoot.kernels import native
from surefoot.kernels.linear import PackedLinear
from surefoot.machine import cpu_name, read_cpuinfo
from surefoot.paths import cache_directory, set_aside
from surefoot.speculation.cost import FORMAT, VERSION, CostTable
from surefoot.speculation.json_files import read_object
from surefoot.version import __version__

if TYPE_CHECKING:
    from surefoot.drafters.base import Drafter
    from surefoot.targets.target import Target

Fingerprint = dict[str, Any]


def fingerprint(
    target: Target, drafter: Drafter | None, *, max_num_seqs: int, block_size: int, graphs: str = "auto"
) -> Fingerprint:
    """Everything that decides what a step of this engine costs, in plain JSON data."""
    device = target.device
    return {
        "model": Path(target.name).name if os.path.exists(target.name) else target.name,
        "config": _digest(target.config.to_dict()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "packed": any(True for _ in packed_layers(target)),
        "quantize": next((layer.quantize for layer in packed_layers(target) if layer.quantize), None),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(read_cpuinfo()),
        "threads": torch.get_num_threads(),
        "native_kernels": native.kernel().isa if device.type == "cpu" and native.available() else None,
        "drafter": drafter.name if drafter else "none",
        "drafter_config": _digest(drafter.identity) if drafter and drafter.identity else None,
        "gamma": drafter.gamma if drafter else 0,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
        "graphs": graphs,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "surefoot": __version__,
    }


def _digest(config: Mapping[str, Any]) -> str:
    """Of a model's configuration, whatever directory or library version wrote it."""
    kept = {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def packed_layers(target: Target) -> Iterator[PackedLinear]:
    """The packed products of a target: what every pass reads."""
    return (module for module in target.model.modules() if isinstance(module, PackedLinear))


def tables_directory() -> Path:
    """Where `surefoot profile` saves."""
    return cache_directory() / "cost-tables"


def table_path(wanted: Mapping[str, Any]) -> Path:
    """The file of an engine's table; of another `max_num_seqs` or engine it is another file."""
    text = json.dumps(dict(wanted), sort_keys=True, default=str)
    return tables_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def find_table(wanted: Mapping[str, Any]) -> CostTable | None:
    """The saved table of this engine, or the smallest one that was measured for more requests; None if there is none."""
    exact = table_path(wanted)
    paths = [exact] if os.path.exists(exact) else sorted(tables_directory().glob("*.json"))
    tables = [table for path in paths if (table := _read_cached(path)) is not None]
    fitting = [table for table in tables if table.fingerprint == serving(table, wanted)]
    return min(fitting, key=lambda table: table.fingerprint["max_num_seqs"], default=None)


def tables_of_model(names: Iterable[str]) -> list[CostTable]:
    """All saved tables of a target, under any of its names."""
    wanted = set(names)
    tables = map(_read_cached, sorted(tables_directory().glob("*.json")))
    return [table for table in tables if table is not None and table.fingerprint.get("model") in wanted]


def saved_table(path: Path, wanted: Mapping[str, Any]) -> CostTable | None:
    """The table in `path`, if there is a readable one of this very engine."""
    table = _read_cached(path) if os.path.exists(path) else None
    return table if table is not None and table.fingerprint == wanted else None


def _read_cached(path: Path) -> CostTable | None:
    """A table of the cache. One that is damaged is set aside, and measured anew; one of another version is left alone."""
    try:
        data = read_object(path, CostTableError)
        if data.get("format") == FORMAT and data.get("version") != VERSION:
            return None
        return CostTable.from_dict(data)
    except CostTableError as problem:
        aside = None if isinstance(problem.__cause__, OSError) else set_aside(path)
        then = "is left out" if aside is None else f"was set aside as {aside.name}"
        warnings.warn(f"cost table {path} {then}: {problem}", RuntimeWarning, stacklevel=3)
        return None


def load_table(path: str | Path, wanted: Mapping[str, Any]) -> CostTable:
    """A table the user chose.

    Raises:
        CostTableError: malformed, or measured on another engine; the message names every field that differs.
    """
    table = CostTable.load(path)
    table.require(serving(table, wanted))
    return table


def serving(table: CostTable, wanted: Mapping[str, Any]) -> Fingerprint:
    """`wanted`, with the `max_num_seqs` of a table that was measured for at least as many requests."""
    measured = table.fingerprint.get("max_num_seqs")
    enough = isinstance(measured, int) and measured >= wanted["max_num_seqs"]
    return {**wanted, "max_num_seqs": measured if enough else wanted["max_num_seqs"]}
