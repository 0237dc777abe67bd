"""`surefoot demo`: the same prompts with and without speculation, interleaved, compared token for token.

Both arms run in the same engine on the same kernels (drafting is switched off per request), one after the other on each
prompt and in turns first, so that a machine that grows warm or busy slows both alike.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from surefoot.cli import options
from surefoot.cli.profile import measure_missing
from surefoot.cli.prompts import DEMO_PROMPTS, DemoPrompt
from surefoot.cli.report import accepted_length, histogram_text, note, planner_note, print_json, width_histogram
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM, RequestOutput, Stream
    from surefoot.speculation.statistics import RequestStatistics

EXIT_TEXTS_DIFFER = 1

TARGET_ONLY, SPECULATIVE = "target-only", "speculative"

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
    temperature: options.Temperature = 0.0,
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
        for prompt in DEMO_PROMPTS[:1]:  # compiles kernels, touches every weight; not measured
            for arm in (TARGET_ONLY, SPECULATIVE):
                _drain(start(llm, prompt, SamplingParams(temperature=temperature, max_tokens=WARM_UP_TOKENS), arm))
        comparisons = [Comparison(prompt) for prompt in DEMO_PROMPTS]
        try:
            with screen(json) as show:
                compare(llm, comparisons, params, repeats, show)
        except KeyboardInterrupt:
            done = [whole for comparison in comparisons if (whole := comparison.whole_rounds()).runs[TARGET_ONLY]]
            if done and not json:
                Report(done, params.greedy, peak_memory()).print()
                rounds = sum(len(comparison.runs[TARGET_ONLY]) for comparison in done)
                note(f"interrupted: {rounds} of {repeats * len(comparisons)} comparisons were done")
            raise
        report = Report(comparisons, params.greedy, peak_memory())
        if json:
            print_json({**report.as_dict(), "engine": llm.describe()})
        else:
            report.print()
            if remark := planner_note(llm):
                note(remark)
        for complaint in report.complaints:
            typer.secho(complaint, err=True, fg="red", bold=True)
        if report.complaints:
            raise typer.Exit(EXIT_TEXTS_DIFFER)
    finally:
        llm.close()


# --- the experiment ---------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """All runs of one prompt."""

    prompt: DemoPrompt
    runs: dict[str, list[RequestOutput]] = field(default_factory=lambda: {TARGET_ONLY: [], SPECULATIVE: []})

    def whole_rounds(self) -> Comparison:
        """As far as both arms have run."""
        count = min(map(len, self.runs.values()))
        return Comparison(self.prompt, {arm: runs[:count] for arm, runs in self.runs.items()})

    def tokens_per_s(self, arm: str) -> float:
        """Median decode speed of an arm."""
        return median(run.timing.tokens_per_s for run in self.runs[arm])

    @property
    def speedup(self) -> float:
        plain = self.tokens_per_s(TARGET_ONLY)
        return self.tokens_per_s(SPECULATIVE) / plain if plain > 0 else float("nan")

    @property
    def statistics(self) -> RequestStatistics:
        """Of the speculative runs together."""
        from surefoot.speculation.statistics import RequestStatistics

        total = RequestStatistics()
        for run in self.runs[SPECULATIVE]:
            total.merge(run.statistics)
        return total

    @property
    def difference(self) -> str | None:
        """Where two of the runs part, or None if all are the same token for token."""
        runs = [run for arm in self.runs.values() for run in arm]
        first = runs[0]
        for other in runs[1:]:
            if other.token_ids == first.token_ids and other.text == first.text:
                continue
            pairs = enumerate(zip(first.token_ids, other.token_ids, strict=False))
            at = next((index for index, (a, b) in pairs if a != b), min(len(first.token_ids), len(other.token_ids)))
            return f"{self.prompt.name}: token {at} is {_at(first, at)} in one run and {_at(other, at)} in another"
        return None


def _at(output: RequestOutput, index: int) -> str:
    return str(output.token_ids[index]) if index < len(output.token_ids) else "missing"


class Progress(NamedTuple):
    """What is running, for whoever shows it."""

    prompt: DemoPrompt
    arm: str
    text: str  # so far
    finished: RequestOutput | None


Show = Callable[[Progress], None]


def compare(llm: LLM, comparisons: list[Comparison], params: SamplingParams, repeats: int, show: Show) -> None:
    """Run every prompt in both arms `repeats` times; the arm that goes first alternates."""
    for repeat in range(repeats):
        for index, comparison in enumerate(comparisons):
            arms = (TARGET_ONLY, SPECULATIVE) if (repeat + index) % 2 == 0 else (SPECULATIVE, TARGET_ONLY)
            for arm in arms:
                stream, text = start(llm, comparison.prompt, params, arm), ""
                for event in stream:
                    text += event.text
                    show(Progress(comparison.prompt, arm, text, None))
                comparison.runs[arm].append(stream.result)
                show(Progress(comparison.prompt, arm, text, stream.result))


def start(llm: LLM, prompt: DemoPrompt, params: SamplingParams, arm: str) -> Stream:
    """A stream of one arm; models without a chat template continue the question as text."""
    params = replace(params, speculative=arm == SPECULATIVE)
    if prompt.chat and getattr(llm.tokenizer, "chat_template", None):
        return llm.stream_chat([{"role": "user", "content": prompt.text}], params)
    return llm.stream(prompt.text, params)


def _drain(stream: Stream) -> None:
    for _ in stream:
        pass


def peak_memory() -> int | None:
    """Most memory this process ever had resident, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- the screen -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def screen(json: bool) -> Iterator[Show]:
    """Live text and speeds on a terminal; one line per finished run elsewhere (on standard error beside JSON)."""
    if json or not sys.stdout.isatty():

        def line(progress: Progress) -> None:
            if progress.finished is not None:
                typer.echo(_line(progress, progress.finished), err=json)

        yield line
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    done: list[Text] = []
    with Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="crop") as live:

        def draw(progress: Progress) -> None:
            if progress.finished is not None:
                done.append(Text(_line(progress, progress.finished), style="dim"))
            room = max(6, console.height - len(done) - 4)
            tail = "\n".join(progress.text.splitlines()[-room:])
            style = "green" if progress.arm == SPECULATIVE else "blue"
            title = f"{progress.prompt.name} · {progress.arm}"
            live.update(Group(*done, Panel(Text(tail), title=title, border_style=style, title_align="left")))

        yield draw


def _line(progress: Progress, output: RequestOutput) -> str:
    text = f"{progress.prompt.name:13s} {progress.arm:11s} {len(output.token_ids):4d} tokens"
    text += f" {output.timing.tokens_per_s:7.1f} tok/s"
    if progress.arm == SPECULATIVE:
        text += f"  accepted length {accepted_length(output.statistics):.2f}"
    return text


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What the comparison showed."""

    comparisons: list[Comparison]
    greedy: bool
    peak_bytes: int | None

    @property
    def complaints(self) -> list[str]:
        """Everything that must not be; empty when all is well."""
        complaints = []
        if self.greedy:
            differences = [c.difference for c in self.comparisons if c.difference]
            complaints += [f"TEXTS DIFFER at temperature 0, which must never happen: {text}" for text in differences]
        if not any(comparison.statistics.drafted for comparison in self.comparisons):
            complaints.append("NOTHING WAS DRAFTED on any prompt: the speculative arm did not speculate")
        return complaints

    @property
    def verdict(self) -> str:
        if not self.greedy:
            return "temperature above 0: texts are different draws from the same law, only speeds are compared"
        count = len(self.comparisons)
        same = sum(comparison.difference is None for comparison in self.comparisons)
        return f"texts identical on {same} of {count} prompts, token for token"

    def total_tokens_per_s(self, arm: str) -> float:
        """Decoded tokens of all prompts by the time they took."""
        runs = [run for comparison in self.comparisons for run in comparison.runs[arm]]
        seconds = sum(run.timing.decode_s for run in runs)
        decoded = sum(run.timing.tokens_per_s * run.timing.decode_s for run in runs)
        return decoded / seconds if seconds > 0 else 0.0

    @property
    def total_speedup(self) -> float:
        plain = self.total_tokens_per_s(TARGET_ONLY)
        return self.total_tokens_per_s(SPECULATIVE) / plain if plain > 0 else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "prompts": [
                {
                    "name": comparison.prompt.name,
                    "tokens": len(comparison.runs[SPECULATIVE][0].token_ids),
                    "target_only_tokens_per_s": comparison.tokens_per_s(TARGET_ONLY),
                    "speculative_tokens_per_s": comparison.tokens_per_s(SPECULATIVE),
                    "speedup": comparison.speedup,
                    "accepted_length": accepted_length(comparison.statistics),
                    "width_histogram": width_histogram(comparison.statistics),
                    "identical": comparison.difference is None if self.greedy else None,
                    "text": comparison.runs[SPECULATIVE][0].text,
                }
                for comparison in self.comparisons
            ],
            "target_only_tokens_per_s": self.total_tokens_per_s(TARGET_ONLY),
            "speculative_tokens_per_s": self.total_tokens_per_s(SPECULATIVE),
            "speedup": self.total_speedup,
            "identical": all(c.difference is None for c in self.comparisons) if self.greedy else None,
            "verdict": self.verdict,
            "complaints": self.complaints,
            "peak_bytes": self.peak_bytes,
        }

    def print(self) -> None:
        """The speedup table, the verdict, the memory."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("prompt", no_wrap=True)
        for heading in ("tokens", "target-only\ntok/s", "speculative\ntok/s", "speedup", "accepted\nlength"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("width\n×steps")
        for comparison in self.comparisons:
            table.add_row(
                comparison.prompt.name,
                str(len(comparison.runs[SPECULATIVE][0].token_ids)),
                f"{comparison.tokens_per_s(TARGET_ONLY):.1f}",
                f"{comparison.tokens_per_s(SPECULATIVE):.1f}",
                f"{comparison.speedup:.2f}×",
                f"{accepted_length(comparison.statistics):.2f}",
                histogram_text(width_histogram(comparison.statistics)),
            )
        table.add_section()
        table.add_row(
            "all",
            str(sum(len(c.runs[SPECULATIVE][0].token_ids) for c in self.comparisons)),
            f"{self.total_tokens_per_s(TARGET_ONLY):.1f}",
            f"{self.total_tokens_per_s(SPECULATIVE):.1f}",
            f"{self.total_speedup:.2f}×",
            "",
            "",
            style="bold",
        )
        console = Console()
        console.print(table, highlight=False)
        console.print(self.verdict, highlight=False)
        if self.peak_bytes is not None:
            console.print(f"peak memory {self.peak_bytes / 2**30:.2f} GiB", highlight=False)
