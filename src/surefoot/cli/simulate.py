"""`surefoot simulate`: would speculation pay, and which rule would choose best? No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.progress import progress_bar
from surefoot.cli.report import note, print_json
from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    from surefoot.speculation.cost import CostTable
    from surefoot.speculation.simulation import Example, SimulationReport

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
        typer.Option("--cost-table", help="A table of 'surefoot profile'.", show_default="a made-up accelerator"),
    ] = None,
    context: Annotated[float, typer.Option("--context", min=0.0, help="Mean cached tokens per request.")] = 0.0,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Blocks played per concurrency.")] = 4096,
    seed: Annotated[int, typer.Option("--seed", help="Of the blocks that are drawn.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the curves here (PNG, PDF, SVG).")] = PLOT,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Play blocks against a cost table under every policy: expected tokens per ms from 1 to 512 requests at once."""
    if sum((synthetic, trace is not None, example is not None)) != 1:
        raise ConfigurationError("choose what to simulate: one of --synthetic, --trace FILE and --example NAME")
    if example is not None:
        _examples(example, blocks, seed, json)
        return
    from surefoot.speculation import simulation

    table = _table(cost_table)
    source: Any
    if trace is not None:
        try:
            with trace.open(encoding="utf-8") as lines:
                source = simulation.Trace.read(lines)
        except OSError as problem:
            raise ConfigurationError(f"cannot read the trace {trace}: {problem.strerror or problem}") from problem
        gamma = source.gamma
    else:
        if workload not in simulation.WORKLOADS:
            raise ConfigurationError(f"workload is {workload!r}; allowed: {', '.join(simulation.WORKLOADS)}")
        source = simulation.WORKLOADS[workload]
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
    if plot is not None:
        draw(report, plot)
    if json:
        print_json({**report.to_dict(), "comparison": comparison(report), "plot": plot})
        return
    print_report(report)
    if plot is not None:
        note(f"curves drawn in {plot}")


def _table(path: Path | None) -> CostTable:
    from surefoot.speculation.cost import CostTable
    from surefoot.speculation.simulation import synthetic_table

    return synthetic_table() if path is None else CostTable.load(path)


def comparison(report: SimulationReport) -> dict[str, dict[str, float]]:
    """Per adaptive policy and for the clairvoyant: least and greatest relative gain over the best fixed width."""
    from surefoot.speculation.simulation import ADAPTIVE

    fixed = [policy for policy in report.policies if policy.startswith("fixed-")]
    gains = {
        policy: [
            report.rate(policy, count) / max(report.rate(other, count) for other in fixed) - 1
            for count in report.concurrencies
        ]
        for policy in (*ADAPTIVE, "clairvoyant")
    }
    return {policy: {"least": min(values), "greatest": max(values)} for policy, values in gains.items()}


def print_report(report: SimulationReport) -> None:
    """Tokens per ms by policy and concurrency, and how the adaptive policies compare with the best fixed width."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"expected tokens per ms: {report.workload}, gamma {report.gamma}",
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
    for policy, gain in comparison(report).items():
        text = f"{policy}: {100 * gain['least']:+.1f} % to {100 * gain['greatest']:+.1f} % against the best fixed width"
        console.print(text, highlight=False)


def draw(report: SimulationReport, path: Path) -> None:
    """Tokens per ms against concurrency, one line per policy.

    Raises:
        ConfigurationError: a file that cannot be written, or a format matplotlib does not know.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for policy in report.policies:
        counts, rates = zip(*report.curve(policy), strict=True)
        if policy.startswith("fixed-"):
            axes.plot(counts, rates, color="0.75", linewidth=0.8)
        else:
            axes.plot(counts, rates, label=policy, linestyle="--" if policy == "clairvoyant" else "-")
    axes.plot([], [], color="0.75", linewidth=0.8, label="each fixed width")
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="expected tokens per ms")
    axes.set_xticks(report.concurrencies, [str(count) for count in report.concurrencies])
    axes.minorticks_off()
    axes.set_title(f"{report.workload}, γ = {report.gamma}")
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"cannot write the plot {path}: {problem}") from problem
    finally:
        pyplot.close(figure)


# --- the published machines -------------------------------------------------------------------------------------------


def _examples(name: str, blocks: int, seed: int, json: bool) -> None:
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
    rows = [_advice(example, index, blocks, seed) for index in range(len(example.workloads))]
    if json:
        facts = {"example": name, "description": example.description, "gamma": example.gamma}
        limits = {"break_even": example.break_even, "reported_break_even": example.reported_break_even}
        print_json({**facts, **limits, "workloads": rows})
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


def _advice(example: Example, index: int, blocks: int, seed: int) -> dict[str, Any]:
    """What the simulation says about one workload beside what its owner measured."""
    from surefoot.speculation.simulation import verdict_of

    workload = example.workloads[index]
    report = example.report(workload, blocks=blocks, seed=seed)
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
