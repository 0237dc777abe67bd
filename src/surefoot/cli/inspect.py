"""`surefoot inspect`: what a checkpoint is, whether it fits a target and why not, and what the machine can do."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.report import print_json
from surefoot.errors import ConfigurationError, DrafterError, ModelError

EXIT_DOES_NOT_FIT = 1

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")  # owner/name


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect)


def inspect(
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="A target (name, id, directory, GGUF file) or a drafter.", metavar="MODEL_OR_DRAFTER"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", help="Check that the drafter fits this target.", autocompletion=options.complete_model
        ),
    ] = None,
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Cores, vector units, native kernels, measured stream rate.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Say what MODEL_OR_DRAFTER is, without loading its weights; exit code 1 if it cannot be served or does not fit."""
    if checkpoint is None and not hardware:
        raise ConfigurationError("nothing to inspect: name a model or a drafter, or ask for --hardware")
    report: dict[str, Any] = {}
    problems: list[str] = []
    if checkpoint is not None:
        report["checkpoint"], problems = describe(checkpoint, target, trust_remote_code)
    if hardware:
        from surefoot.profiling.hardware import inspect_hardware

        report["hardware"] = inspect_hardware().as_dict()
    if json:
        print_json(report)
    else:
        _show(report)
    if problems:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def describe(
    checkpoint: str, target: str | None = None, trust_remote_code: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Facts about a checkpoint, JSON-ready, and the reasons why it cannot be used.

    Raises:
        ModelError, DrafterError: neither a model nor a drafter, or unreadable.
        ConfigurationError: `target` was given for something that is no drafter.
    """
    if checkpoint == "prompt-lookup":
        facts: dict[str, Any] = {"role": "drafter", "kind": "prompt-lookup", "weights": "none", "fits": True}
        return facts, []
    on_hub = _HUB_ID.fullmatch(checkpoint) is not None and not Path(checkpoint).exists()
    if is_drafter(checkpoint) or (on_hub and target is not None):
        return _describe_drafter(checkpoint, target, trust_remote_code)
    if target is not None:
        raise ConfigurationError(
            f"--target checks a drafter, and {checkpoint!r} is none: give a drafter's directory, or leave --target out"
        )
    from surefoot.targets.loading import describe_target

    try:
        described = describe_target(checkpoint, trust_remote_code=trust_remote_code)
    except ModelError:
        if not on_hub:
            raise
        with contextlib.suppress(DrafterError):  # a hub id that is no target may be a drafter
            return _describe_drafter(checkpoint, None)
        raise
    facts = {"role": "target", **dataclasses.asdict(described), "cost_tables": _cost_tables(checkpoint)}
    return facts, [] if described.servable else [str(described.reason)]


def _cost_tables(checkpoint: str) -> list[str]:
    """What `surefoot profile` has saved for engines of this target, and how steady it was."""
    from surefoot.engine.fingerprint import tables_of_model

    return [
        "drafter {drafter}, gamma {gamma}, {max_num_seqs} requests, {threads} threads".format_map(
            defaultdict(lambda: "?", table.fingerprint)
        )
        + f": {table.steadiness}"
        for table in tables_of_model((checkpoint, Path(checkpoint).name))
    ]


def is_drafter(checkpoint: str) -> bool:
    """Whether a directory says that it holds a block drafter."""
    config = Path(checkpoint).expanduser() / "config.json"
    if not config.is_file():
        return False
    try:
        raw = json_module.loads(config.read_text())
    except (OSError, ValueError, RecursionError):
        return False  # the reader of targets says what is wrong with it
    from surefoot.targets.checkpoint import drafter_architecture

    return drafter_architecture(raw) is not None


def _describe_drafter(
    checkpoint: str, target: str | None, trust_remote_code: bool = False
) -> tuple[dict[str, Any], list[str]]:
    from surefoot.drafters.checkpoint import describe_checkpoint, resolve_checkpoint
    from surefoot.drafters.config import fit_problems

    described = describe_checkpoint(checkpoint)
    facts = {"role": "drafter", **described.as_dict()}
    problems: list[str] = []
    if described.config.enable_confidence_head:
        facts["calibration"], problems = _describe_calibration(resolve_checkpoint(checkpoint), described.config.gamma)
    if target is None:
        return facts, problems
    from surefoot.targets.loading import describe_target

    against = describe_target(target, trust_remote_code=trust_remote_code)
    shape = SimpleNamespace(
        hidden_size=against.hidden_size, vocab_size=against.vocab_size, num_hidden_layers=against.num_layers
    )
    problems += fit_problems(described.config, shape)
    if not against.servable:
        problems.append(f"the target itself cannot be served: {against.reason}")
    return {**facts, "target": target, "fits": not problems, "problems": problems}, problems


def _describe_calibration(directory: Path, gamma: int) -> tuple[str, list[str]]:
    """What a drafter's calibration was fitted on, and why it cannot be used."""
    from surefoot.drafters.locations import find_calibration
    from surefoot.errors import CalibrationError
    from surefoot.speculation.calibration import Calibration

    path = find_calibration(directory)
    if path is None:
        return f"none beside it; make one with 'surefoot calibrate -d {directory}'", []
    try:
        fitted = Calibration.load(path, gamma)
    except CalibrationError as problem:
        return f"cannot be used: {problem}", [str(problem)]
    parts = [f"made from {fitted.provenance.dataset or 'unnamed'} prompts ({fitted.provenance.num_samples} blocks)"]
    if fitted.copying is not None:
        parts.append(f"copies get up to {float(fitted.copying.max()):.0%} of a draft distribution")
    if fitted.sharpness is not None:
        parts.append(f"drafts above temperature 0 are drawn {float(fitted.sharpness[0]):g} times as sharply")
    return "; ".join(parts), []


def _show(report: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, facts in report.items():
        table = Table(title=title if len(report) > 1 else None, show_header=False, box=None, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            if name not in ("fits", "problems"):
                table.add_row(label(name), readable(name, value))
        console.print(table, markup=False, highlight=False)
        if "target" in facts:
            fits = facts["fits"]
            verdict = f"fits {facts['target']}" if fits else f"does not fit {facts['target']}:"
            console.print(verdict, style="green" if fits else "red", markup=False, highlight=False)
            for problem in facts["problems"]:
                console.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)


_UNITS = {"_gb_s": "GB/s", "_gib": "GiB"}  # at the end of a name


def label(name: str) -> str:
    """A fact's name without its unit: `stream_gb_s` → `stream`."""
    for ending in _UNITS:
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def readable(name: str, value: Any) -> str:
    """A fact as a person reads it: sizes with their unit, lists in one line, absent things as a dash."""
    if value is None or value == "" or value == () or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "windows":
        counts = Counter(value)
        return ", ".join(
            f"{count} full" if window is None else f"{count} sliding over {window} tokens"
            for window, count in counts.items()
        )
    if isinstance(value, int) and "bytes" in name:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size:
                return f"{value / size:.1f} {unit}"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    if isinstance(value, float):
        return " ".join([f"{value:.1f}", *(unit for ending, unit in _UNITS.items() if name.endswith(ending))])
    if isinstance(value, (list, tuple)):
        return ("\n" if name == "cost_tables" else ", ").join(map(str, value))
    return str(value)
