"""`surefoot calibrate`: fit how a drafter copies, how sharply it draws, and its confidences, on prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.report import note, print_json
from surefoot.errors import CalibrationError, ConfigurationError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.speculation.calibration import Calibration
    from surefoot.speculation.calibration_quality import PositionQuality
    from surefoot.training.measure import VerifiedBlocks


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
    trust_remote_code: options.TrustRemoteCode = False,
    gamma: options.Gamma = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="JSON lines with 'turns', or text with a prompt a line.",
            show_default="131 built-in ones: code, mathematics, chat",
        ),
    ] = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", "--temperature", "-t", help="Sampling temperatures to calibrate for.")
    ] = "0,1",
    max_tokens: options.MaxTokens = 96,
    seed: options.Seed = 0,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Prompts that run at once.")] = 64,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Save here.", show_default="beside the drafter; in the cache for a shipped one"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a calibration that was made from many more blocks.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Let the target answer prompts, and fit to the answers how the drafter copies, how sharply it draws and what its
    confidences say.

    Saved beside the drafter; for a shipped drafter in the cache, whence later starts take it. Use prompts that the drafter was
    not trained on.
    """
    from surefoot.bench.prompts import read_prompts
    from surefoot.training.prompts import EVERYDAY

    try:
        levels = tuple(float(part) for part in temperatures.split(","))
    except ValueError:
        raise ConfigurationError(
            f"temperatures is {temperatures!r}; allowed: numbers of 0 or more separated by commas, such as 0,1"
        ) from None
    asked = read_prompts(prompts or EVERYDAY)
    from surefoot.cli.calibration import check_worth, choose_subject, subject_of, write_texts

    subject = choose_subject(drafter, model, gamma, output, trust_remote_code=trust_remote_code)
    if subject is not None and not force:  # before seconds go into loading and minutes into texts
        answers = sum(len(prompt.turns) for prompt in asked) * len(levels)
        check_worth(subject, answers * max(max_tokens - 1, 0), at_most=True)
    llm = options.load_llm(
        model,
        drafter="none",  # texts are written fastest without drafts, and their law is the same
        gamma=None,
        width="auto",
        cost_table="none",
        device=device,
        dtype=dtype,
        threads=threads,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        seed=seed,
        max_num_seqs=max_num_seqs,
    )
    from surefoot.drafters.checkpoint import load_drafter
    from surefoot.drafters.locations import WEIGHTS_FILE, weights_digest
    from surefoot.drafters.shipped import shipped_for
    from surefoot.training.measure import WRITING, fit_calibration
    from surefoot.training.progress import StageProgress

    try:
        if drafter == "auto":
            shipped = shipped_for(llm.target)
            if shipped is None:
                raise CalibrationError(
                    f"no drafter is shipped for the weights of {model}: name a checkpoint with --drafter"
                )
            subject = subject_of(shipped.path, gamma, output)
        assert subject is not None
        head = load_drafter(subject.checkpoint, gamma=gamma, dtype=llm.target.dtype, device=str(llm.target.device))
        head.bind(llm.target)
        head.pack()
        texts = []
        with StageProgress("calibrate", not json) as progress:
            for number, level in enumerate(levels):
                params = SamplingParams(temperature=level, max_tokens=max_tokens)
                span = (WRITING * number / len(levels), WRITING * (number + 1) / len(levels))
                texts += write_texts(llm, asked, params, progress, span)
            dataset = str(prompts or "built-in")
            has_weights = (subject.checkpoint / WEIGHTS_FILE).is_file()
            name = weights_digest(subject.checkpoint) if has_weights else drafter
            fitted, met = fit_calibration(llm.target, head, texts, progress, dataset=dataset, name=name)
    finally:
        llm.close()
    if not force:
        check_worth(subject, fitted.provenance.num_samples)
    path = subject.destination
    fitted.save(path)
    found = {level: _before_and_after(met.at(level), fitted) for level in dict.fromkeys(levels)}
    if json:
        both = _before_and_after(met, fitted)
        print_json(
            {
                **fitted.to_dict(),
                "path": path,
                **{arm: _plain(quality) for arm, quality in both.items()},
                "by_temperature": {
                    f"{level:g}": {arm: _plain(quality) for arm, quality in arms.items()}
                    for level, arms in found.items()
                },
            }
        )
        return
    for level, arms in found.items():
        _print(level, arms["before"], arms["after"])
    if fitted.sharpness is not None:
        note(
            "sharpness of the draws at temperatures above 0: " + ", ".join(f"{s:g}" for s in fitted.sharpness.tolist())
        )
    if fitted.copying is not None:
        note("share of copies by match length: " + ", ".join(f"{s:.2f}" for s in fitted.copying[1:].tolist()))
    used = "" if output else "; later starts use it"
    note(f"{len(met.accepted)} blocks of {len(asked)} prompts; saved to {path}{used}")


def _before_and_after(blocks: VerifiedBlocks, fitted: Calibration) -> dict[str, list[PositionQuality]]:
    from surefoot.training.measure import arms_of

    return {arm: blocks.quality(judge) for arm, judge in arms_of(blocks, fitted).items()}


def _plain(positions: list[PositionQuality]) -> list[dict[str, object]]:
    def finite(value: float) -> float | None:  # an AUC needs accepted and rejected blocks
        return None if value != value else value

    return [
        {
            "position": p.position,
            "count": p.count,
            "ece": p.ece,
            "ece_by_chance": p.chance,
            "brier": finite(p.brier),
            "auc": finite(p.auc),
        }
        for p in positions
    ]


def _print(temperature: float, before: list[PositionQuality], after: list[PositionQuality]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None, header_style="bold", padding=(0, 2, 0, 0), title=f"temperature {temperature:g}", title_justify="left"
    )
    for heading in (
        "position",
        "blocks",
        "ECE %\nbefore",
        "ECE %\nafter",
        "ECE %\nby chance",
        "AUC\nbefore",
        "AUC\nafter",
    ):
        table.add_column(heading, justify="right")
    for old, new in zip(before, after, strict=True):
        errors = (f"{100 * error:.1f}" for error in (old.ece, new.ece, new.chance))
        figures = (*errors, f"{old.auc:.3f}", f"{new.auc:.3f}")
        table.add_row(str(old.position), str(old.count), *figures)
    Console().print(table, highlight=False)
