"""`surefoot profile`: measure what a step of this engine costs, and save it where the other commands find it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.progress import progress_bar
from surefoot.cli.report import note, print_json
from surefoot.errors import ConfigurationError, SurefootError

if TYPE_CHECKING:
    from surefoot.llm import LLM
    from surefoot.profiling.profile import Profile

QUICK_SECONDS, LONGER_SECONDS = 6.0, 18.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(profile)


def profile(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.Drafter = "auto",
    gamma: options.Gamma = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Measure up to so many requests at once; it serves fewer, too.")
    ] = 16,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Time for measured steps.")] = 14.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Save here.", show_default="where generate, demo and serve look"),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--import", help="Save this file of another engine as the cost table, without measuring."),
    ] = None,
    destination: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Write the saved cost table here for another engine; measure it if there is none."
        ),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="Of the imported or exported file: sglang or tensorrt-llm.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=0, help="Cached tokens per request of exported times.", show_default="shortest"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure the cost table of an engine in its real step loop and save it under the engine's fingerprint."""
    _check_exchange(source, destination, form, context)
    llm = options.load_llm(
        model,
        drafter=drafter,
        gamma=gamma,
        width="auto",
        cost_table="none" if destination is None else "auto",
        device=device,
        dtype=dtype,
        threads=threads,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        max_num_seqs=max_num_seqs,
    )
    if source is not None and form is not None:
        _import(llm, source, form, output, json)
        return
    if destination is not None and form is not None:
        measure_missing(llm, "auto")
        _export(llm, destination, form, context, json)
        return
    from surefoot.engine.fingerprint import table_path

    with progress_bar("profiling") as show:
        found = llm.profile(seconds, show, output, partial(note_duration, seconds))
    path = output or table_path(found.table.fingerprint)
    if json:
        print_json(
            {
                "table": found.table.to_dict(),
                "path": path,
                "seconds": found.seconds,
                "steps": found.steps,
                "repeats": found.repeats,
                "unsteady": found.unsteady,
                "saved": found.kept is None,
                "break_even": {width: found.break_even(width) for width in range(1, found.gamma + 1)},
                "verdict": found.verdict,
            }
        )
        return
    print_profile(found)
    note(f"{found.steps} steps in {found.seconds:.1f} s, each point {found.repeats[0]} to {found.repeats[1]} times")
    if found.kept is None:
        note(f"{found.table.steadiness}; saved to {path}")
    note_unsteady(found)
    note_kept(found, path)


def _check_exchange(source: Path | None, destination: Path | None, form: str | None, context: int | None) -> None:
    """Refuse options of --import and --export that do not go together, before a model is loaded."""
    if source is destination is form is context is None:
        return
    from surefoot.speculation.cost_formats import FOREIGN_FORMATS

    known = " or ".join(FOREIGN_FORMATS)
    if source is not None and destination is not None:
        raise ConfigurationError("--import and --export exclude each other: run the command twice")
    if source is None and destination is None:
        if form is not None:
            raise ConfigurationError("--format is of a file of another engine: give --import FILE or --export FILE")
    elif form is None:
        raise ConfigurationError(f"--import and --export need the format of the file: add --format {known}")
    elif form not in FOREIGN_FORMATS:
        raise ConfigurationError(f"--format is {form!r}; allowed: {known}")
    if context is not None and destination is None:
        raise ConfigurationError("--context is of --export: the other forms of the command take none")


def _import(llm: LLM, source: Path, form: str, output: Path | None, json: bool) -> None:
    """Take a table of another engine as the one of this engine, replacing a saved one."""
    from dataclasses import replace

    from surefoot.engine.fingerprint import table_path
    from surefoot.errors import CostTableError
    from surefoot.profiling.profile import engine_fingerprint
    from surefoot.speculation.cost_formats import import_table
    from surefoot.speculation.json_files import read_object

    try:
        foreign = import_table(read_object(source, CostTableError), form)
    except CostTableError as problem:
        raise CostTableError(f"{source} as {form}: {problem}") from problem
    table = replace(foreign, fingerprint=engine_fingerprint(llm.engine))
    path = output or table_path(table.fingerprint)
    table.save(path)
    if json:
        print_json({"table": table.to_dict(), "path": path, "imported": source, "format": form})
    note(f"{source} saved as the cost table of this engine to {path}: its times are taken as they are")


def _export(llm: LLM, destination: Path, form: str, context: int | None, json: bool) -> None:
    from surefoot.speculation.cost_formats import export_table
    from surefoot.speculation.json_files import write_object

    engine = llm.engine
    table = engine.policy.costs.table
    if table is None:
        raise ConfigurationError(
            "there is no cost table to export: without a drafter nothing is planned; choose one with --drafter"
        )
    at = table.context_lengths[0] if context is None else context
    requests = engine.options.max_num_seqs
    rows = requests * (engine.gamma + 1)
    data = export_table(table, form, max_requests=requests, max_batch_tokens=rows, context=at)
    write_object(destination, data)
    if json:
        print_json({"exported": destination, "format": form, "context": at, "data": data})
    note(
        f"{table.steadiness}; up to {requests} requests and {rows} rows at {at} cached tokens written to {destination}"
    )


def measure_missing(llm: LLM, cost_table: str) -> None:
    """Where `auto` has found no cost table, measure one now: once per machine and engine, a few seconds."""
    if cost_table == "auto" and llm.lacks_cost_table:
        measure_now(llm.profile)


def measure_now(profile: Callable[..., Profile]) -> None:
    """Measure and save by `profile` (`LLM.profile`, or `profile_and_save` of an engine), once more where it was unsteady."""
    from surefoot.speculation.cost import UNSTEADY

    note("no cost table for this engine: measuring this machine, once")
    try:
        with progress_bar("measuring") as show:
            found = profile(QUICK_SECONDS, progress=show, announce=partial(note_duration, QUICK_SECONDS))
        if found.unsteady > UNSTEADY:
            note("something else was running: measuring again, longer")
            with progress_bar("measuring") as show:
                found = profile(LONGER_SECONDS, progress=show)
    except SurefootError as problem:
        note(f"measured, but not for the next start: {problem}")
    else:
        note(
            f"cost table measured in {found.seconds:.0f} s and saved; "
            "'surefoot profile' with the same engine options measures longer"
        )
        note_unsteady(found)


def note_duration(asked: float, needed: float) -> None:
    """Say how long a measurement takes, where that is longer than was asked for."""
    if needed > 1.2 * asked:
        note(f"one pass over all points takes about {needed:.0f} s here")


def note_kept(found: Profile, path: Path) -> None:
    """Say so where a steadier table of before was not replaced."""
    if found.kept is not None:
        note(
            f"the table of before stays in use, because it was steadier ({found.kept.steadiness}): "
            f"delete {path} to replace it"
        )


def note_unsteady(found: Profile) -> None:
    """Say so where the machine was too busy for its figures to be trusted."""
    from surefoot.speculation.cost import UNSTEADY

    if found.unsteady > UNSTEADY:
        note(
            f"the repeats of {found.unsteady:.0%} of the points lie far apart: something else was running. "
            "Measure again on an idle machine, with 'surefoot profile' and the same engine options"
        )


def print_profile(found: Profile) -> None:
    """V over rows, D over requests, the break-even of every width, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(), found.table
    curves = Table(title="target pass", title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    curves.add_column("rows", justify="right")
    for context in table.context_lengths:
        curves.add_column(f"V ms\n{context} cached", justify="right")
        curves.add_column("V(k)/V(1)", justify="right")
    curves.add_column("break-even\nemitted tokens", justify="right")
    for index, rows in enumerate(table.token_buckets):
        cells = [
            cell for curve in table.verify_ms for cell in (f"{curve[index]:.1f}", f"{curve[index] / curve[0]:.2f}")
        ]
        even = f"{found.break_even(rows - 1):.2f}" if 1 < rows <= found.gamma + 1 else ""
        curves.add_row(str(rows), *cells, even)
    console.print(curves, highlight=False)
    rest = Table(title="beside it", title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("requests", "draft pass D ms", "overhead ms"):
        rest.add_column(heading, justify="right")
    for requests in table.batch_sizes:
        draft = f"{table.draft_ms_at(requests):.2f}" if found.gamma else "–"
        rest.add_row(str(requests), draft, f"{table.overhead_ms_at(requests):.2f}")
    console.print(rest, highlight=False)
    if table.draft_depths:
        depths = ", ".join(f"{depth}: {table.draft_ms_at(1, depth):.2f}" for depth in table.draft_depths)
        console.print(f"draft pass of one request, ms by tokens drafted: {depths}", highlight=False, soft_wrap=True)
    console.print(found.verdict, highlight=False, soft_wrap=True)
