"""`surefoot simulate`: would speculation pay, and which rule would choose best? No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.progress import progress_bar
from surefoot.cli.report import note, print_json
from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    from surefoot.speculation.simulation import Example, ExampleWorkload, SimulationReport

WORKLOAD = "chat"
GAMMA = 7
PLOT = Path("surefoot-simulate.png")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(simulate)


def simulate(
    synthetic: Annotated[bool, typer.Option("--synthetic", help="A made-up text on a made-up accelerator.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Replay steps recorded with 'surefoot generate --trace FILE'.")
    ] = None,
    example: Annotated[
        str | None, typer.Option("--example", help="A published machine with its workloads; 'list' names them.")
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", help="Of --synthetic: structured code, chat or fast-moving.")
    ] = WORKLOAD,
    gamma: Annotated[int, typer.Option("--gamma", "-g", min=1, help="Of --synthetic.")] = GAMMA,
    cost_table: Annotated[
        Path | None,
        typer.Option(
            "--cost-table",
            help="A table of 'surefoot profile'.",
            show_default="that of the trace; an invented accelerator with --synthetic",
        ),
    ] = None,
    context: Annotated[float, typer.Option("--context", min=0.0, help="Mean cached tokens per request.")] = 0.0,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Blocks played per concurrency.")] = 4096,
    seed: Annotated[int, typer.Option("--seed", help="Of the blocks that are drawn.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Draw the speedups here (PNG, PDF, SVG).", show_default=f"{PLOT}; none with --example"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Replay blocks against a cost table under every policy: does speculation pay, from 1 to 512 requests at once?"""
    if sum((synthetic, trace is not None, example is not None)) != 1:
        raise ConfigurationError("choose what to simulate: one of --synthetic, --trace FILE and --example NAME")
    if example is not None:
        _examples(example, blocks, seed, plot, json)
        return
    plot = plot or PLOT
    from surefoot.speculation import simulation
    from surefoot.speculation.cost import CostTable

    table = None if cost_table is None else CostTable.load(cost_table)
    source: Any
    if trace is not None:
        try:
            with trace.open(encoding="utf-8") as lines:
                source = simulation.Trace.read(lines)
        except OSError as problem:
            raise ConfigurationError(f"cannot read the trace {trace}: {problem.strerror or problem}") from problem
        gamma = source.gamma
        table = table or source.table
        if table is None:
            raise ConfigurationError(
                f"the trace {trace} was recorded without a cost table, so what its steps cost is not known: give the table "
                "of a machine (--cost-table FILE of 'surefoot profile'), or record again after 'surefoot profile'"
            )
        machine = "the machine of the trace" if cost_table is None else str(cost_table)
    else:
        if workload not in simulation.WORKLOADS:
            raise ConfigurationError(f"workload is {workload!r}; allowed: {', '.join(simulation.WORKLOADS)}")
        source = simulation.WORKLOADS[workload]
        machine = "an invented accelerator" if table is None else str(cost_table)
        table = table or simulation.synthetic_table()
    counts = simulation.CONCURRENCY
    with progress_bar("simulating") as show:
        report = simulation.simulate(
            table,
            source,
            gamma=gamma,
            blocks=blocks,
            context=context,
            seed=seed,
            progress=lambda done: show((counts.index(done) + 1) / len(counts)),
        )
    draw(report, plot)
    if json:
        print_json(
            {
                **report.to_dict(),
                "machine": machine,
                "comparison": comparison(report),
                "verdicts": verdicts(report),
                "plot": plot,
            }
        )
        return
    print_report(report, machine)
    note(f"speedups drawn in {plot}")


def comparison(report: SimulationReport) -> dict[str, dict[str, float]]:
    """Per adaptive policy and for the clairvoyant: least and greatest relative gain over the best fixed width."""
    from surefoot.speculation.simulation import ADAPTIVE

    gains = {policy: report.gains_over_fixed(policy) for policy in (*ADAPTIVE, "clairvoyant")}
    return {policy: {"least": min(values), "greatest": max(values)} for policy, values in gains.items()}


def verdicts(report: SimulationReport) -> dict[str, dict[str, Any]]:
    """Per adaptive policy: where it beats the target alone, and by how much."""
    from surefoot.speculation.simulation import ADAPTIVE

    return {
        policy: {
            "pays_at": report.pays_at(policy),
            "speedup": {str(count): report.speedup(policy, count) for count in report.concurrencies},
            "verdict": report.verdict(policy),
        }
        for policy in ADAPTIVE
    }


def print_report(report: SimulationReport, machine: str) -> None:
    """Tokens per ms by policy and concurrency, and where the adaptive policies pay."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"expected tokens per ms: {report.workload}, gamma {report.gamma}, {machine}",
        title_justify="left",
        box=None,
        header_style="bold",
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for count in report.concurrencies:
        table.add_column(f"{count}", justify="right", no_wrap=True)
    for policy in report.policies:
        cells = [f"{report.rate(policy, count):.3g}" for count in report.concurrencies]
        table.add_row(policy, *cells, style="bold" if not policy.startswith("fixed-") else None)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console = Console(width=160)
    console.print(table, highlight=False)
    gains = comparison(report)
    for policy, found in verdicts(report).items():
        gain = gains[policy]
        console.print(
            f"{policy} {found['verdict']} ({100 * gain['least']:+.1f} % to {100 * gain['greatest']:+.1f} % "
            "against the best fixed width)",
            highlight=False,
            soft_wrap=True,
        )


def draw(report: SimulationReport, path: Path) -> None:
    """Speedup over target-only decoding against concurrency, one line per policy.

    Raises:
        ConfigurationError: a file that cannot be written, or a format matplotlib does not know.
    """
    with _axes(path, f"{report.workload}, γ = {report.gamma}") as axes:
        counts = report.concurrencies
        for policy in report.policies:
            speedups = [report.speedup(policy, count) for count in counts]
            if policy.startswith("fixed-"):
                axes.plot(counts, speedups, color="0.75", linewidth=0.8)
            elif policy != "target-only":
                axes.plot(counts, speedups, label=policy, linestyle="--" if policy == "clairvoyant" else "-")
        axes.plot([], [], color="0.75", linewidth=0.8, label="each fixed width")
        axes.set(xscale="log", xlabel="requests at once")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()


def draw_example(example: Example, reports: Sequence[SimulationReport], path: Path) -> None:
    """Speedup of one request over target-only decoding against the fixed width; planned widths as a dashed line.

    Raises:
        ConfigurationError: a file that cannot be written, or a format matplotlib does not know.
    """
    with _axes(path, f"{example.name}, one request, γ = {example.gamma}") as axes:
        widths = range(example.gamma + 1)
        for report in reports:
            (line,) = axes.plot(widths, [report.speedup(f"fixed-{width}") for width in widths], label=report.workload)
            axes.axhline(report.speedup("stopping"), color=line.get_color(), linestyle="--", linewidth=0.8)
        axes.set(xlabel="drafts verified (dashed: planned)")


@contextmanager
def _axes(path: Path, title: str) -> Iterator[Any]:
    """Axes for speedups over target-only decoding, saved to `path` in the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    try:
        axes.axhline(1.0, color="black", linewidth=1.0, label="target-only")
        yield axes
        axes.set(title=title, ylabel="speedup over target-only", ylim=(0, None))
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"cannot write the plot {path}: {problem}") from problem
    finally:
        pyplot.close(figure)


# --- the published machines -------------------------------------------------------------------------------------------


def _examples(name: str, blocks: int, seed: int, plot: Path | None, json: bool) -> None:
    from surefoot.speculation.simulation import example_names, load_example

    if name == "list":
        found = {known: load_example(known).description for known in example_names()}
        if json:
            print_json({"examples": found})
        else:
            for known, description in found.items():
                typer.echo(f"{known}: {description}")
        return
    example = load_example(name)
    reports = [example.report(workload, blocks=blocks, seed=seed) for workload in example.workloads]
    rows = [_advice(*pair) for pair in zip(example.workloads, reports, strict=True)]
    if plot is not None:
        draw_example(example, reports, plot)
    if json:
        facts = {"example": name, "description": example.description, "gamma": example.gamma}
        limits = {"break_even": example.break_even, "reported_break_even": example.reported_break_even}
        print_json({**facts, **limits, "workloads": rows, "plot": plot})
        return
    typer.echo(example.description)
    even = f"break-even at full width: {example.break_even:.2f} emitted tokens per step"
    if example.reported_break_even:
        even += " (reported {:.1f} to {:.1f})".format(*example.reported_break_even)
    typer.echo(even)
    for row in rows:
        low, high = row["reported_tokens_per_second"]
        typer.echo(
            f"{row['workload']}: {row['verdict']}, {row['speedup']:.2f} times target-only with every draft verified at "
            f"{100 * row['acceptance']:.0f} % accepted, {row['tokens_per_second']:.1f} tok/s "
            f"(reported: {row['reported_verdict']}, {low:g} to {high:g} tok/s); with planned widths "
            f"{row['planned_speedup']:.2f} times"
        )
    if plot is not None:
        note(f"speedups drawn in {plot}")


def _advice(workload: ExampleWorkload, report: SimulationReport) -> dict[str, Any]:
    """What the simulation says about one workload beside what its owner measured."""
    from surefoot.speculation.simulation import verdict_of

    speedup = report.speedup("verify-all")
    return {
        "workload": workload.name,
        "acceptance": workload.acceptance,
        "speedup": speedup,
        "planned_speedup": report.speedup("stopping"),
        "tokens_per_second": 1000 * report.rate("verify-all", 1),
        "verdict": verdict_of(speedup),
        "reported_verdict": workload.reported_verdict,
        "reported_tokens_per_second": workload.reported_tokens_per_second,
    }
