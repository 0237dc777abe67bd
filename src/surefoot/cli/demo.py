"""`surefoot demo`: the same prompts with and without speculation, in turns, compared token for token."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.comparison import (
    SPECULATIVE,
    TARGET_ONLY,
    Comparison,
    ComparisonReport,
    RunUpdate,
    compare,
    peak_memory,
    stream_of,
)
from surefoot.cli.demo_prompts import DEMO_PROMPTS
from surefoot.cli.process import EXIT_FAILED
from surefoot.cli.profile import measure_missing
from surefoot.cli.report import (
    accepted_length,
    alarm,
    histogram_text,
    note,
    planner_note,
    print_json,
    width_histogram,
)
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM, RequestOutput

SEED = 20260711
"""Of both arms when the temperature is above 0; the texts differ all the same, only their law agrees."""

WARM_UP_TOKENS = 8


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.Drafter = "auto",
    gamma: options.Gamma = None,
    width: options.Width = "auto",
    cost_table: options.CostTable = "auto",
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    max_tokens: options.MaxTokens = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Runs of every prompt and arm; speeds are medians.")
    ] = 1,
    json: options.Json = False,
) -> None:
    """Run real prompts target-only and with speculation, check that the texts agree, and show the speedup.

    At temperature 0 both texts must be identical, token for token; if they are not, the exit code is 1.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED)
    if drafter == "none":
        raise ConfigurationError(
            "demo compares with and without a drafter: use --drafter auto, prompt-lookup or a path"
        )
    llm = options.load_llm(
        model,
        drafter=drafter,
        gamma=gamma,
        width=width,
        cost_table=cost_table,
        device=device,
        dtype=dtype,
        threads=threads,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
    )
    try:
        measure_missing(llm, cost_table)
        _warm_up(llm, temperature)
        comparisons = [Comparison(prompt) for prompt in DEMO_PROMPTS]
        try:
            with screen(json) as show:
                compare(llm, comparisons, params, repeats, show)
        except KeyboardInterrupt:
            done = [whole for comparison in comparisons if (whole := comparison.whole_rounds()).runs[TARGET_ONLY]]
            if done and not json:
                print_report(ComparisonReport(done, params.greedy, peak_memory()))
                rounds = sum(len(comparison.runs[TARGET_ONLY]) for comparison in done)
                note(f"interrupted: {rounds} of {repeats * len(comparisons)} comparisons were done")
            raise
        report = ComparisonReport(comparisons, params.greedy, peak_memory())
        if json:
            print_json({**report.as_dict(), "engine": llm.describe()})
        else:
            print_report(report)
            if remark := planner_note(llm):
                note(remark)
        for complaint in report.complaints:
            alarm(complaint)
        if report.complaints:
            raise typer.Exit(EXIT_FAILED)
    finally:
        llm.close()


def _warm_up(llm: LLM, temperature: float) -> None:
    """Compile kernels and touch every weight, in both arms; not measured."""
    for arm in (TARGET_ONLY, SPECULATIVE):
        params = SamplingParams(temperature=temperature, max_tokens=WARM_UP_TOKENS)
        for _ in stream_of(llm, DEMO_PROMPTS[0], params, arm):
            pass


@contextlib.contextmanager
def screen(json: bool) -> Iterator[Callable[[RunUpdate], None]]:
    """Live text and speeds on a terminal; one line per finished run elsewhere (on standard error beside JSON)."""
    if json or not sys.stdout.isatty():

        def line(update: RunUpdate) -> None:
            if update.finished is not None:
                finished = _line(update, update.finished)
                note(finished) if json else typer.echo(finished)

        yield line
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    done: list[Text] = []
    with Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="crop") as live:

        def draw(update: RunUpdate) -> None:
            if update.finished is not None:
                done.append(Text(_line(update, update.finished), style="dim"))
            room = max(6, console.height - len(done) - 4)
            tail = "\n".join(update.text.splitlines()[-room:])
            style = "green" if update.arm == SPECULATIVE else "blue"
            title = f"{update.prompt.name} · {update.arm}"
            live.update(Group(*done, Panel(Text(tail), title=title, border_style=style, title_align="left")))

        yield draw


def _line(update: RunUpdate, output: RequestOutput) -> str:
    text = f"{update.prompt.name:13s} {update.arm:11s} {len(output.token_ids):4d} tokens"
    text += f" {output.timing.tokens_per_s:7.1f} tok/s"
    if update.arm == SPECULATIVE:
        text += f"  accepted length {accepted_length(output.statistics):.2f}"
    return text


def print_report(report: ComparisonReport) -> None:
    """The speedup table, the verdict, the memory."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "target-only\ntok/s", "speculative\ntok/s", "speedup", "accepted\nlength"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("width\n×steps")
    for comparison in report.comparisons:
        table.add_row(
            comparison.prompt.name,
            str(comparison.tokens),
            f"{comparison.tokens_per_s(TARGET_ONLY):.1f}",
            f"{comparison.tokens_per_s(SPECULATIVE):.1f}",
            _times(comparison.speedup),
            f"{accepted_length(comparison.statistics):.2f}",
            histogram_text(width_histogram(comparison.statistics)),
        )
    table.add_section()
    table.add_row(
        "all",
        str(sum(comparison.tokens for comparison in report.comparisons)),
        f"{report.total_tokens_per_s(TARGET_ONLY):.1f}",
        f"{report.total_tokens_per_s(SPECULATIVE):.1f}",
        _times(report.total_speedup),
        "",
        "",
        style="bold",
    )
    console = Console()
    console.print(table, highlight=False)
    console.print(report.verdict, highlight=False)
    if report.peak_bytes is not None:
        console.print(f"peak memory {report.peak_bytes / 2**30:.2f} GiB", highlight=False)


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
