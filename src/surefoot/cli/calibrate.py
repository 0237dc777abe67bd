"""`surefoot calibrate`: fit the temperatures of a drafter's confidence head on prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.progress import progress_bar
from surefoot.cli.report import note, print_json
from surefoot.errors import CalibrationError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.speculation.calibration import PositionQuality


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(calibrate)


def calibrate(
    drafter: options.Drafter,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    gamma: options.Gamma = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="JSON lines with 'turns', or text with a prompt a line.",
            show_default="a small built-in set",
        ),
    ] = None,
    temperature: options.Temperature = 0.0,
    max_tokens: options.MaxTokens = 128,
    seed: options.Seed = 0,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Prompts that run at once.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save here.", show_default="beside the drafter")
    ] = None,
    json: options.Json = False,
) -> None:
    """Run prompts with every draft verified, fit one temperature per position, and save them beside the drafter."""
    from surefoot.bench.prompts import read_prompts

    asked = read_prompts(prompts)
    path = output or _beside(drafter)
    llm = options.load_llm(
        model,
        drafter=drafter,
        gamma=gamma,
        width="auto",
        cost_table="none",
        device=device,
        dtype=dtype,
        threads=threads,
        quantize=quantize,
        seed=seed,
        max_num_seqs=max_num_seqs,
    )
    from surefoot.profiling.calibrate import collect, quality
    from surefoot.speculation.calibration import Calibration, fit_temperatures

    try:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        with progress_bar("collecting") as show:
            blocks = collect(llm, asked, params, show)
    finally:
        llm.close()
    logits, outcomes = blocks.logits, blocks.outcomes
    fitted = fit_temperatures(logits, outcomes, dataset=str(prompts or "built-in"), drafter=drafter)
    before = quality(logits, outcomes, Calibration.identity(fitted.gamma))
    after = quality(logits, outcomes, fitted)
    fitted.save(path)
    if json:
        print_json({**fitted.to_dict(), "path": path, "before": _plain(before), "after": _plain(after)})
        return
    _print(fitted.temperatures.tolist(), before, after)
    note(f"{len(logits)} blocks of {len(asked)} prompts; saved to {path}")


def _beside(drafter: str) -> Path:
    from surefoot.engine.assembly import CALIBRATION_FILE

    if drafter in options.DRAFTERS:
        raise CalibrationError(
            f"the drafter {drafter} has no confidence head to calibrate, and needs no file: the online estimator learns its "
            "confidences while it serves"
        )
    if not Path(drafter).is_dir():
        raise CalibrationError(
            f"{drafter} is no local directory to save a calibration in: say where with --output FILE"
        )
    return Path(drafter) / CALIBRATION_FILE


def _plain(positions: list[PositionQuality]) -> list[dict[str, object]]:
    def finite(value: float) -> float | None:  # an AUC needs accepted and rejected blocks
        return None if value != value else value

    return [
        {"position": p.position, "count": p.count, "ece": p.ece, "brier": finite(p.brier), "auc": finite(p.auc)}
        for p in positions
    ]


def _print(temperatures: list[float], before: list[PositionQuality], after: list[PositionQuality]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    headings = ("position", "blocks", "temperature", "ECE %\nbefore", "ECE %\nafter", "AUC\nbefore", "AUC\nafter")
    for heading in headings:
        table.add_column(heading, justify="right")
    for temperature, old, new in zip(temperatures, before, after, strict=True):
        figures = (f"{100 * old.ece:.1f}", f"{100 * new.ece:.1f}", f"{old.auc:.3f}", f"{new.auc:.3f}")
        table.add_row(str(old.position), str(old.count), f"{temperature:.2f}", *figures)
    Console().print(table, highlight=False)
