"""`surefoot bench serve`: workloads × load × arms on a server, over HTTP."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.process import EXIT_FAILED
from surefoot.cli.progress import progress_bar
from surefoot.cli.report import alarm, json_ready, note, print_json
from surefoot.errors import ConfigurationError, SurefootError

if TYPE_CHECKING:
    from surefoot.bench.load import Arm, Load, Run
    from surefoot.bench.load_report import Change, Figures

SEED = 20261201
START_SECONDS = 900.0
"""How long a server of our own may take until it is ready: it may have to convert its model first."""
WARM_REQUESTS = 2
"""Requests of every arm before anything counts."""


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="A server that runs already (OpenAI-compatible).", show_default="a new surefoot server"
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Its key, in the first line; else SUREFOOT_API_KEY.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="What it calls the model.", show_default="its first one")
    ] = None,
    drafter: options.Drafter = "auto",
    gamma: options.Gamma = None,
    width: options.Width = "auto",
    cost_table: options.CostTable = "auto",
    guard: options.Guard = True,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Answers at once, of a new server.")] = 16,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            help="Separated by commas: code, edit, maths, chat, prose, structured, long, agent, shared-prefix, or files of JSON "
            "lines with 'turns' or 'prompt' (and 'arrival_s' in a recorded trace).",
        ),
    ] = "code,chat",
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", "-c", help="Users that are always busy.", show_default="1,4, without --rate"),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Requests per second that come whether or not it keeps up (Poisson).")
    ] = None,
    burst: Annotated[int, typer.Option("--burst", min=1, help="Of --rate: so many come at once.")] = 1,
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="served (as it is), and of surefoot: none (without drafts), adaptive, gamma:K (at most K drafts).",
            show_default="none,adaptive; served for other servers",
        ),
    ] = "",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Of every run, about.")] = 16,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Runs of every arm, in turns; figures are medians.")
    ] = 3,
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    max_tokens: options.MaxTokens = 96,
    slo_first_ms: Annotated[
        float | None, typer.Option("--slo-first-ms", min=0, help="Bound on the time to the first token, p95.")
    ] = None,
    slo_gap_ms: Annotated[
        float | None, typer.Option("--slo-gap-ms", min=0, help="Bound on the time between two pieces of text, p95.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="An older report: regressions beyond noise end with exit code 1.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the figures as JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a report as Markdown, and plots beside it.")
    ] = None,
    json: options.Json = False,
) -> None:
    """What users of a server see: tokens per second, time to the first token, and how evenly text comes.

    Arms take turns; of every arm the first requests do not count. Times begin when a request should have been sent.
    """
    from surefoot.bench.load import Arm
    from surefoot.bench.load_report import changes, environment, plots, read_report, within
    from surefoot.bench.load_report import markdown as as_markdown
    from surefoot.bench.load_report import report as as_report
    from surefoot.bench.workloads import conversations

    _needs_httpx()
    names = [name.strip() for name in workload.split(",") if name.strip()]
    workloads = {name: conversations(name) for name in names}
    loads = _loads(concurrency, rate, burst, traced=any(one[0].arrival_s is not None for one in workloads.values()))
    old = None if against is None else read_report(against)
    wanted = arms or ("served" if url else "none,adaptive")
    chosen = [Arm.parse(name.strip()) for name in wanted.split(",")]
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    key = _key(api_key_file)

    def measure(address: str) -> tuple[list[Figures], dict[str, Any]]:
        with progress_bar("benchmark") as show:
            return asyncio.run(
                _measure(
                    *(address, served_model, key, workloads, loads, chosen),
                    requests=requests,
                    repeats=repeats,
                    params=params,
                    progress=show,
                )
            )

    if url is not None:
        rows, served = measure(url)
    else:
        given = {"drafter": drafter, "gamma": gamma, "width": width, "cost_table": cost_table, "dtype": dtype}
        given |= {"threads": threads, "quantize": quantize, "max_num_seqs": max_num_seqs}
        with _server(model, given, guard) as address:
            rows, served = measure(address)
    settings = {"requests": requests, "repeats": repeats, **params, "workloads": ",".join(names)}
    bounds = slo_first_ms is not None or slo_gap_ms is not None
    facts = {
        "command": shlex.join(["surefoot", *sys.argv[1:]]),
        "environment": {**environment(), **served},
        "settings": settings,
        "slo": within(rows, slo_first_ms, slo_gap_ms) if bounds else None,
    }
    data = json_ready(as_report(rows, facts))
    if output is not None:
        from surefoot.speculation.json_files import write_object

        write_object(output, data)
        note(f"saved to {output}")
    if report is not None:
        drawn = plots(rows, report.parent)
        report.write_text(as_markdown(data, rows, drawn), encoding="utf-8")
        note(f"report in {report}, with {', '.join(drawn) or 'no plots'}")
    if json:
        print_json(data)
    else:
        _print(rows, data["slo"])
    found = [] if old is None else changes(old, rows)
    _tell_changes(found, old is not None)
    differing = [f"{row.workload}, {row.load}, {row.arm}" for row in rows if row.identical is False]
    if differing:
        alarm(f"TEXTS DIFFER between arms at temperature 0, which must never happen: {'; '.join(differing)}")
    if differing or any(change.regressed for change in found):
        raise typer.Exit(EXIT_FAILED)


async def _measure(
    url: str,
    model: str | None,
    key: str | None,
    workloads: dict[str, Any],
    loads: list[Load],
    arms: list[Arm],
    *,
    requests: int,
    repeats: int,
    params: dict[str, Any],
    progress: Callable[[float], None],
) -> tuple[list[Figures], dict[str, Any]]:
    from surefoot.bench.load import Load, Server, run
    from surefoot.bench.load_report import Figures

    server = Server(url, model, key)
    try:
        await server.look()
        if not server.is_surefoot and any(arm.fields for arm in arms):
            raise ConfigurationError(f"{url} is no surefoot server: the only arm of others is served")
        rows: list[Figures] = []
        cells = [
            (name, load) for name in workloads for load in loads if load.users or load.rate or _traced(workloads[name])
        ]
        total, done = len(cells) * len(arms) * repeats, 0
        for name, load in cells:
            jobs = workloads[name]
            for arm in arms:
                await run(server, jobs, Load(users=1), arm, requests=WARM_REQUESTS, params=params, seed=SEED)
            runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
            for repeat in range(repeats):
                for arm in [*arms[repeat % len(arms) :], *arms[: repeat % len(arms)]]:

                    def show(share: float, before: int = done) -> None:
                        progress((before + share) / total)

                    runs[arm.name].append(
                        await run(
                            *(server, jobs, load, arm),
                            requests=requests,
                            params=params,
                            seed=SEED + 1000 * repeat,
                            progress=show,
                        )
                    )
                    done += 1
            same = server.is_surefoot and params["temperature"] == 0
            first = runs[arms[0].name] if same else None
            rows += [Figures.of(name, load, arm.name, runs[arm.name], first) for arm in arms]
        return rows, {"server": url, "model": server.model, "surefoot_server": server.is_surefoot}
    finally:
        await server.http.aclose()


def _traced(jobs: list[Any]) -> bool:
    return jobs[0].arrival_s is not None


def _loads(concurrency: str | None, rate: str | None, burst: int, *, traced: bool) -> list[Load]:
    """Closed loops, then open ones.

    Raises:
        ConfigurationError: numbers that cannot be.
    """
    from surefoot.bench.load import Load

    def numbers(name: str, text: str, kind: Callable[[str], float]) -> list[Any]:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 < number < 1e6 for number in found):
            raise ConfigurationError(f"{name} is {text!r}; allowed: numbers above 0, such as 1,4,16")
        return list(dict.fromkeys(found))

    if burst > 1 and rate is None:
        raise ConfigurationError(f"burst is {burst}, but nothing arrives at a rate: give --rate, too")
    loads = [Load(rate=number, burst=burst) for number in numbers("rate", rate, float)] if rate is not None else []
    if concurrency is not None or not (loads or traced):
        loads = [Load(users=number) for number in numbers("concurrency", concurrency or "1,4", int)] + loads
    return [*loads, Load()] if traced else loads


def _key(file: Path | None) -> str | None:
    if file is None:
        return (os.environ.get("SUREFOOT_API_KEY") or "").partition(",")[0].strip() or None
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"cannot read the key in {file}: {problem}") from problem
    if not lines:
        raise ConfigurationError(f"{file} holds no key: put one into its first line")
    return lines[0]


def _needs_httpx() -> None:
    from importlib.util import find_spec

    if find_spec("httpx") is None or find_spec("prometheus_client") is None:
        raise ConfigurationError('bench serve needs the extra serve: pip install "surefoot[serve]"')


@contextmanager
def _server(model: str, given: dict[str, Any], guard: bool) -> Iterator[str]:
    """A surefoot server of our own on a free port, until the block ends; its address."""
    command = [sys.executable, "-m", "surefoot", "serve", model, "--host", "127.0.0.1", "--port", "0"]
    for name, value in given.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += [] if guard else ["--no-guard"]
    environment = {name: value for name, value in os.environ.items() if name != "SUREFOOT_API_KEY"}
    note(f"starting a server of {model} …")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Any) -> str:
    """Wait until the server says where it serves."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        for line in log.read().splitlines():
            if "http://" in line and line.split()[0] == "serving":
                return "http://" + line.partition("http://")[2].split()[0]
        time.sleep(0.2)
    log.seek(0)
    told = log.read().strip().splitlines()[-3:]
    raise SurefootError(f"the server has not started: {' / '.join(told) or 'it said nothing'}")


def _print(rows: list[Figures], slo: list[dict[str, Any]] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from surefoot.bench.load_report import COLUMNS, cells

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("workload", "load", "arm"):
        table.add_column(heading, no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console = Console(width=180)
    console.print(table, highlight=False)
    for row in rows:
        if row.failed:
            alarm(f"{row.failed} requests failed: {row.workload}, {row.load}, {row.arm}")
    for found in slo or ():
        held = (
            "no load keeps the bounds"
            if found["load"] is None
            else f"{found['load']}, {found['tokens_per_s']:.1f} tok/s"
        )
        console.print(
            f"within the bounds: {found['workload']}, {found['arm']}, {found['loop']} loop: {held}", highlight=False
        )


def _tell_changes(found: list[Change], asked: bool) -> None:
    if asked and not found:
        note("the older report has no row in common with this one")
    for change in found:
        if change.regressed:
            alarm(f"SLOWER {change}")
        else:
            note(f"{change}")
