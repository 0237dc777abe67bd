"""`surefoot train`: a drafter for a target, from prompts to calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.report import note, print_json
from surefoot.errors import ConfigurationError

_DATA, _SHAPE, _TRAINING, _RUN = "Data", "Drafter", "Training", "Run"
DEFAULT_MINUTES = 30.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(train)


def _data(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_DATA, **settings)


def _shape(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_SHAPE, **settings)


def _training(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_TRAINING, **settings)


def _run(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_RUN, **settings)


def train(
    output: Annotated[Path, _run("--output", "-o", help="Directory of the drafter; work is kept beside it.")],
    target: Annotated[
        str,
        _run(
            "--target",
            "-m",
            help="Alias, Hugging Face id, directory or GGUF file.",
            autocompletion=options.complete_model,
        ),
    ] = options.DEFAULT_MODEL,
    stage: Annotated[
        list[str] | None,
        _run(
            "--stage",
            help="Run only this one (may be repeated): prompts, regenerate, features, train, calibrate, evaluate.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, _run("--minutes", help="For the whole command.", show_default="30, unless --anchors")
    ] = None,
    anchors: Annotated[int | None, _run("--anchors", help="Blocks to train on, exactly repeatable.")] = None,
    init: Annotated[
        str | None, _run("--init", help="Drafter to fine-tune; its shape is kept.", metavar="DRAFTER")
    ] = None,
    seed: Annotated[int, _run("--seed", help="Same seed, same options, same drafter.")] = 0,
    layout: Annotated[str, _run("--layout", help="Of the checkpoint: deepspec or speculators.")] = "deepspec",
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    threads: options.Threads = None,
    json: options.Json = False,
    prompts: Annotated[
        list[str] | None,
        _data(
            "--prompts",
            help="JSON lines, text files, source trees; or builtin, library, documentation, problems, questions; or "
            "self: the target makes them up. May be repeated.",
            show_default="builtin",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        _data("--exclude", help="Evaluation prompts: drop whatever shares 13 words in a row with them."),
    ] = None,
    evaluate_on: Annotated[
        str | None, _data("--evaluate-on", help="Prompts of the last stage.", show_default="some held-out ones")
    ] = None,
    max_prompts: Annotated[int, _data("--max-prompts", help="Most prompts to regenerate.")] = 20_000,
    own_prompts: Annotated[int, _data("--own-prompts", help="Tries of the source self.")] = 8_000,
    held_out: Annotated[float, _data("--held-out", help="Share of the prompts kept for calibration.")] = 0.03,
    temperatures: Annotated[str, _data("--temperatures", help="Of the regenerated text, in turn.")] = "0,1",
    max_new: Annotated[int, _data("--max-new", help="Tokens regenerated per prompt.")] = 192,
    read_tokens: Annotated[
        int, _data("--read-tokens", help="Tokens of existing text to train on as it is, without generation.")
    ] = 0,
    batch: Annotated[int, _data("--batch", help="Requests that are regenerated at once.")] = 64,
    layers: Annotated[int, _shape("--layers", help="Draft layers, 1 to 5.")] = 2,
    gamma: Annotated[int, _shape("--gamma", "-g", help="Draft tokens per block, 1 to 15.")] = 5,
    head: Annotated[str, _shape("--head", help="Sequential head: vanilla, gated, rnn, or none (DFlash).")] = "vanilla",
    rank: Annotated[int, _shape("--rank", help="Of the sequential head.")] = 128,
    vocab: Annotated[int, _shape("--vocab", help="Tokens the drafter can propose, the most frequent ones.")] = 16_384,
    hidden_size: Annotated[
        int | None, _shape("--hidden-size", help="Width of the drafter.", show_default="the target's")
    ] = None,
    inner: Annotated[
        int | None,
        _shape("--inner", help="Feed-forward width; the target's strongest neurons stay.", show_default="the target's"),
    ] = None,
    features: Annotated[
        str | None,
        _shape("--features", help="Target layers it reads, such as 1,11,22.", show_default="low, middle, high"),
    ] = None,
    storage: Annotated[str, _shape("--storage", help="native (the target's dtype) or int8.")] = "native",
    lr: Annotated[float, _training("--lr", help="Largest learning rate; a cosine follows the warm-up.")] = 6e-4,
    optimizer: Annotated[str, _training("--optimizer", help="adamw or muon.")] = "adamw",
    weight_decay: Annotated[float, _training("--weight-decay")] = 0.01,
    position_decay: Annotated[float, _training("--position-decay", help="Position k weighs exp(-(k-1)/this).")] = 4.0,
    row_tokens: Annotated[int, _training("--row-tokens", help="Tokens per packed row.")] = 512,
    row_anchors: Annotated[int, _training("--row-anchors", help="Random anchors per row.")] = 192,
    batch_rows: Annotated[int, _training("--batch-rows", help="Rows per step, over all ranks.")] = 4,
    accumulate: Annotated[int, _training("--accumulate", help="Micro-batches per step.")] = 1,
    reuse: Annotated[int, _training("--reuse", help="Times a row is used, with fresh anchors, per target pass.")] = 4,
    held_batches: Annotated[int, _training("--held-batches", help="Batches whose features are in memory.")] = 8,
    average: Annotated[float, _training("--average", help="Decay of a running average of the weights; 0: off.")] = 0.0,
    precision: Annotated[str, _training("--precision", help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Train, calibrate and evaluate a drafter. Run it again with the same options to go on where it stopped.

    `surefoot generate --drafter OUTPUT` uses the result. Several GPUs: `torchrun --nproc-per-node N
    --no-python surefoot train …`.
    """
    from surefoot.drafters.layouts import LAYOUTS
    from surefoot.training.measure import set_threads
    from surefoot.training.options import Budget, DataOptions, DrafterShape, TrainingOptions
    from surefoot.training.pipeline import STAGES, TrainingRun, prepare

    if minutes is None and anchors is None:
        minutes = DEFAULT_MINUTES
    if layout not in LAYOUTS:
        raise ConfigurationError(f"layout is {layout!r}; allowed: {', '.join(LAYOUTS)}")
    run = TrainingRun(
        DrafterShape(
            layers, gamma, head, rank, vocab, hidden_size, inner, _numbers("features", features, int), storage
        ),
        DataOptions(
            sources=tuple(prompts or ("builtin",)),
            exclude=tuple(exclude or ()),
            max_prompts=max_prompts,
            own_prompts=own_prompts,
            held_out=held_out,
            temperatures=_numbers("temperatures", temperatures, float),
            max_new=max_new,
            read_tokens=read_tokens,
            batch=batch,
            seed=seed,
        ),
        TrainingOptions(
            lr=lr,
            optimizer=optimizer,
            weight_decay=weight_decay,
            position_decay=position_decay,
            row_tokens=row_tokens,
            row_anchors=row_anchors,
            batch_rows=batch_rows,
            accumulate=accumulate,
            reuse=reuse,
            held_batches=held_batches,
            average=average,
            precision=precision,
            seed=seed,
        ),
        Budget(minutes, anchors),
        init=init,
        evaluate_on=evaluate_on,
        layout=layout,  # type: ignore[arg-type]
    )
    set_threads(threads)
    stages = tuple(stage or STAGES)
    if unknown := [name for name in stages if name not in STAGES]:
        raise ConfigurationError(f"stage is {unknown[0]!r}; allowed: {', '.join(STAGES)}")
    pipeline = prepare(
        target, run, output, device=device, dtype=dtype, trust_remote_code=trust_remote_code, show=not json
    )
    record = pipeline.run(stages)
    pipeline.ranks.leave()
    if not pipeline.ranks.first:
        return
    if json:
        print_json({"output": str(output), "stages": record})
    else:
        _say(record, output, target, dtype)


def _numbers(name: str, text: str | None, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}; allowed: numbers separated by commas") from None


def _say(record: dict[str, Any], output: Path, target: str, dtype: str | None) -> None:
    """The result in a few lines."""
    if trained := record.get("train"):
        parts = trained["seconds_by_part"]
        total = sum(parts.values()) or 1.0
        shares = ", ".join(f"{name} {value / total:.0%}" for name, value in sorted(parts.items(), key=lambda p: -p[1]))
        note(f"trained on {trained['anchors']} anchors at {trained['anchors_per_s']}/s ({shares})")
        if trained["curve"]:
            last = trained["curve"][-1]
            lengths = f"{last['length_0']} at temperature 0, {last['length_1']} at 1"
            note(f"held-out accepted length with bonus, teacher forced: {lengths}")
    for name, lengths in record.get("evaluate", {}).get("accepted_length_with_bonus", {}).items():
        note(
            f"{name}: accepted length with bonus "
            + ", ".join(f"{value} at temperature {t}" for t, value in lengths.items())
        )
    command = options.command_line("generate", "def main(", model=target, drafter=output, dtype=dtype)
    note(f"drafter in {output}; try it with: {command}")
