"""`surefoot evaluate`: what a drafter is worth on prompts it never saw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.report import note, print_json
from surefoot.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(evaluate)


def evaluate(
    drafter: Annotated[
        str,
        typer.Argument(help="Directory of a DSpark / DFlash checkpoint, or one that is shipped.", metavar="DRAFTER"),
    ],
    prompts: Annotated[Path, typer.Option("--prompts", help="A JSON lines file, or a folder with one per workload.")],
    target: Annotated[
        str, typer.Option("--target", "-m", help="The drafter's target.", autocompletion=options.complete_model)
    ] = options.DEFAULT_MODEL,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where the report goes.",
            show_default="DRAFTER/evaluation; NAME-evaluation if shipped",
        ),
    ] = None,
    temperatures: Annotated[str, typer.Option("--temperatures", help="Sampling temperatures.")] = "0,1",
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts per workload.", show_default="all")] = None,
    max_tokens: options.MaxTokens = 128,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests at once.")] = 16,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="Temperatures.", show_default="DRAFTER/calibration.json")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Decode PROMPTS speculatively, blocks verified whole: accepted length, acceptance by position, calibration.

    Writes evaluation.json, card.md, acceptance.png and reliability.png. Prompts that were trained on are refused.
    """
    try:
        values = tuple(float(part) for part in temperatures.split(","))
    except ValueError:
        raise ConfigurationError(f"temperatures is {temperatures!r}; allowed: numbers separated by commas") from None
    directory, beside = _places(drafter)
    where = output or beside
    from surefoot.training.evaluate import card, check_unseen, load_workloads
    from surefoot.training.evaluate import evaluate as measure
    from surefoot.training.measure import serving_target, set_threads
    from surefoot.training.progress import StageProgress

    set_threads(threads)
    workloads = load_workloads(prompts, limit)
    check_unseen(directory, workloads)  # before seconds go into weights
    loaded = serving_target(target, device=device, dtype=dtype, trust_remote_code=trust_remote_code, quiet=json)
    with StageProgress("evaluate", not json) as progress:
        report = measure(
            loaded, directory, workloads, where, progress,
            temperatures=values, max_tokens=max_tokens, batch=batch, calibration=calibration,
        )  # fmt: skip
    if json:
        print_json(report)
        return
    typer.echo(card(report))
    note(f"report, card and plots in {where}")


def _places(drafter: str) -> tuple[Path, Path]:
    """Directories of a checkpoint, or of a drafter that the package ships, and of its report: never in the package."""
    if Path(drafter).is_dir():
        return Path(drafter), Path(drafter) / "evaluation"
    from surefoot.drafters.locations import shipped_drafters, shipped_named

    if shipped := shipped_named(drafter):
        return shipped.path, Path(f"{drafter}-evaluation")
    names = ", ".join(found.name for found in shipped_drafters())
    raise ConfigurationError(
        f"drafter {drafter} is no directory: give the directory of a checkpoint, or one of {names}"
    )
