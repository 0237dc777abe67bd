"""`surefoot bench`: `decode` compares with transformers, `throughput` arms with each other, `serve` puts load on a server,
`accuracy` asks questions with and without drafts, `planner` times decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.bench_serve import serve
from surefoot.cli.process import EXIT_FAILED
from surefoot.cli.profile import measure_missing, measure_now
from surefoot.cli.progress import progress_bar
from surefoot.cli.report import alarm, json_ready, note, print_json
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.bench.accuracy import Accuracy
    from surefoot.bench.decode import Decode
    from surefoot.bench.throughput import Throughput
    from surefoot.profiling.profile import Profile

SEED = 20260711


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Measure this engine against itself and against transformers.", no_args_is_help=True)
    group.command()(decode)
    group.command()(throughput)
    group.command()(serve)
    group.command()(accuracy)
    group.command()(planner)
    app.add_typer(group, name="bench")


def decode(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.Drafter = "auto",
    cost_table: options.CostTable = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSON lines with 'turns', or text.", show_default="code, edits, maths and chat"),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="First prompts only.", show_default="all")] = None,
    int8: Annotated[bool, typer.Option("--int8/--no-int8", help="Also an arm on int8 weights.")] = True,
    max_tokens: options.MaxTokens = 64,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the figures as JSON.")] = None,
    json: options.Json = False,
) -> None:
    """One request at a time on the CPU, greedy: transformers, target-only, speculative and int8 in turn, same prompts.

    Says what share of the memory's speed is reached, and compares the texts. Loads the model up to three times.
    """
    from surefoot.bench.prompts import read_prompts

    if drafter == "none":
        raise ConfigurationError(
            "decode compares with and without a drafter: use --drafter auto, prompt-lookup or a path"
        )
    asked = read_prompts(prompts)[:count]
    common: dict[str, Any] = {
        "gamma": None,
        "width": "auto",
        "cost_table": cost_table,
        "device": "cpu",
        "dtype": dtype,
        "threads": threads,
        "trust_remote_code": trust_remote_code,
    }
    llm = options.load_llm(model, drafter=drafter, quantize=None, **common)
    if (tokenizer := llm.target.tokenizer) is None:
        raise ConfigurationError(f"{llm.target.name} has no tokenizer: it cannot read prompts")
    measure_missing(llm, cost_table)
    quantized = options.load_llm(model, drafter="none", quantize="int8", **common) if int8 else None
    from surefoot.bench.decode import measure_decode
    from surefoot.targets.loading import load_untouched

    note("loading the same weights in transformers' own model …")
    plain = load_untouched(model, dtype=dtype, trust_remote_code=trust_remote_code)
    with progress_bar("benchmark") as show:
        found = measure_decode(plain, llm, quantized, [prompt.tokens(tokenizer) for prompt in asked], max_tokens, show)
    facts = {
        **found.to_dict(),
        "model": model,
        "engine": llm.describe(),
        "prompts": str(prompts or "built-in"),
        "max_tokens": max_tokens,
    }
    _deliver(facts, output, json, lambda: _print_decode(found))
    if not found.identical:
        alarm("TEXTS DIFFER with and without speculation, which must never happen")
    if not found.drafted:
        alarm("NOTHING WAS DRAFTED: the speculative arm did not speculate")
    if not (found.identical and found.drafted):
        raise typer.Exit(EXIT_FAILED)


def _deliver(facts: dict[str, Any], output: Path | None, json: bool, show: Callable[[], None]) -> None:
    """Save the figures where that is asked for, and print them as JSON or by `show`."""
    if output is not None:
        from surefoot.speculation.json_files import write_object

        write_object(output, json_ready(facts))
    print_json(facts) if json else show()
    if output is not None:
        note(f"saved to {output}")


def _print_decode(found: Decode) -> None:
    from rich.console import Console
    from rich.table import Table

    from surefoot.bench.decode import TARGET_ONLY, TRANSFORMERS

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("arm", no_wrap=True)
    for heading in ("tok/s", "× transformers", "× target-only", "of the\nmemory's speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        share = found.floor_share(row.arm)
        table.add_row(
            row.arm,
            f"{row.tokens_per_s:.1f}",
            f"{found.ratio(row.arm, TRANSFORMERS):.2f}",
            f"{found.ratio(row.arm, TARGET_ONLY):.2f}",
            "–" if share is None else f"{100 * share:.0f} %",
        )
    console = Console()
    console.print(table, highlight=False)
    answers = len(found.rows[0].texts)
    if found.stream_gb_s is not None:
        console.print(f"memory is read at {found.stream_gb_s:.1f} GB/s", highlight=False)
    console.print(
        f"greedy texts equal transformers' on {answers - len(found.differences)} of {answers} prompts; with and without "
        f"speculation they are {'the same' if found.identical else 'DIFFERENT'} on all",
        highlight=False,
    )
    for place in found.differences:
        console.print(
            f"  prompt {place.prompt}: they part at token {place.token}, where the candidates' logits are {place.gap:.3g} apart "
            f"({place.ulps:.1f} units in the last place)",
            highlight=False,
        )


def throughput(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.Drafter = "auto",
    gamma: options.Gamma = None,
    cost_table: options.CostTable = "auto",
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="Requests at once.")] = "1,2,4,8,16",
    arms: Annotated[
        str, typer.Option("--arms", help="none, fixed:K (every window K wide), adaptive (the planner).")
    ] = "none,fixed:2,fixed:4,adaptive",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSON lines with 'turns', or text.", show_default="code, edits, maths and chat"),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, help="Per run.", show_default="every prompt, and three times as many as run at once"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of every arm; speeds are medians.")] = 3,
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    max_tokens: options.MaxTokens = 64,
    trace: options.Trace = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the figures as JSON.")] = None,
    json: options.Json = False,
) -> None:
    """Aggregate tok/s of several arms at several concurrencies, interleaved in one process over one target.

    Answers are half to one and a half times --max-tokens long, whatever they say. The trace is of the arm adaptive.
    """
    counts, names = _counts(concurrency), list(dict.fromkeys(name.strip() for name in arms.split(",")))
    from surefoot.bench.prompts import read_prompts

    asked = read_prompts(prompts)
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
        trust_remote_code=trust_remote_code,
        seed=SEED,
    )
    from surefoot.bench.throughput import build_arms, measure_throughput
    from surefoot.engine.trace import TraceWriter
    from surefoot.profiling.profile import profile_and_save

    target = llm.target
    if target.tokenizer is None:
        raise ConfigurationError(f"{target.name} has no tokenizer: it cannot read prompts")
    texts = [prompt.tokens(target.tokenizer) for prompt in asked]
    built = build_arms(
        names,
        target,
        llm.engine.drafter,
        max_num_seqs=max(counts),
        max_model_len=max(map(len, texts)) + 2 * max_tokens,
        cost_table=cost_table,
        seed=SEED,
    )
    planned = next((arm.engine for arm in built if arm.name == "adaptive"), None)
    if trace is not None and planned is None:
        raise ConfigurationError("--trace records the arm adaptive: add it to --arms")
    if planned is not None and cost_table == "auto" and planned.policy.lacks_table:
        adaptive = planned

        def profile_arm(
            seconds: float, progress: Callable[[float], None], announce: Callable[[float], None] | None = None
        ) -> Profile:
            return llm.loop.measure(
                lambda _, show: profile_and_save(adaptive, seconds, show, announce=announce), progress
            )

        measure_now(profile_arm)
        for arm in built:  # arms of fixed widths may choose their sources by it; what they see of drift stays with them
            if arm.name.startswith("fixed"):
                arm.engine.policy.costs.use(planned.policy.costs.table)
    writer = None
    if trace is not None and planned is not None:
        writer = TraceWriter(trace, planned.describe(), planned.policy.costs)
    if writer is not None and planned is not None:
        planned.add_observer(writer)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=SEED)
    try:
        with progress_bar("benchmark") as show:
            # On the thread that has loaded the target: a second team of OpenMP threads would slow the first one down.
            found = llm.loop.measure(
                lambda _, show: measure_throughput(
                    built, texts, params, concurrency=counts, repeats=repeats, requests=requests, progress=show
                ),
                show,
            )
    finally:
        if writer is not None:
            writer.close()
    facts = {
        **found.to_dict(),
        "arms": {arm.name: arm.engine.describe() for arm in built},
        "prompts": str(prompts or "built-in"),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "repeats": repeats,
    }
    _deliver(facts, output, json, lambda: _print_throughput(found))
    if planned is not None and not json:
        note(f"adaptive: {planned.policy.describe()}")
    differing = [f"{row.arm} at {row.concurrency}" for row in found.rows if row.identical is False]
    if differing:
        alarm(f"TEXTS DIFFER from target-only at temperature 0, which must never happen: {', '.join(differing)}")
        raise typer.Exit(EXIT_FAILED)


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigurationError(f"concurrency is {text!r}; allowed: numbers of 1 or more, such as 1,2,4,8,16")
    return list(dict.fromkeys(map(int, parts)))


def _print_throughput(found: Throughput) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("requests\nat once", justify="right")
    table.add_column("arm", no_wrap=True)
    for heading in (
        "tok/s",
        "× none",
        "accepted\nlength",
        "host\nms/step",
        "target\nms",
        "draft\nms",
        "predicted/\nmeasured",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("width ×steps")
    for row in found.rows:
        table.add_row(
            str(row.concurrency),
            row.arm,
            f"{row.tokens_per_s:.1f}",
            "–" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.accepted_length:.2f}",
            f"{row.host_ms_per_step:.2f}",
            f"{row.target_ms:.1f}",
            f"{row.draft_ms:.2f}",
            "–" if row.predicted_ratio is None else f"{row.predicted_ratio:.2f}",
            " ".join(f"{width}×{steps}" for width, steps in row.width_histogram.items()),
            style="bold" if row.arm == "adaptive" else None,
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console = Console(width=160)
    console.print(table, highlight=False)
    for line in found.summary():
        share = (
            "" if line["adaptive_share"] is None else f", adaptive reaches {100 * line['adaptive_share']:.1f} % of it"
        )
        console.print(f"{line['concurrency']} at once: best is {line['best']}{share}", highlight=False)


def accuracy(
    questions: Annotated[
        Path | None,
        typer.Argument(
            help="JSON lines in the format of gsm8k (question, answer) or humaneval (prompt, test, entry_point).",
            show_default="sixteen small sums",
        ),
    ] = None,
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
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="First questions only.", show_default="all")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, max=1024, help="Sampled answers to each question; 0: greedy ones only.")
    ] = 4,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the sampled answers.")] = 0.7,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Answers at once.")] = 8,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run the programs that the model writes, to check them. Limits keep mistakes small, but it is no sandbox.",
        ),
    ] = False,
    seed: options.Seed = SEED,
    max_tokens: options.MaxTokens = 256,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the figures as JSON.")] = None,
    json: options.Json = False,
) -> None:
    """Whether speculation changes what the model gets right: greedy answers must be the same, sampled ones equally often right.

    Exit code 1 where they are not, and where nothing was drafted.
    """
    from surefoot.bench.accuracy import read_questions

    if drafter == "none":
        raise ConfigurationError(
            "accuracy compares with and without a drafter: use --drafter auto, prompt-lookup or a path"
        )
    if samples and not temperature > 0:
        raise ConfigurationError(
            f"temperature is {temperature}; allowed for sampled answers: above 0; --samples 0 asks for greedy ones only"
        )
    asked = read_questions(questions, run_code=run_code)[:count]
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
        max_num_seqs=concurrency,
        guard=False,  # what is compared must have drafts
    )
    if llm.tokenizer is None:
        raise ConfigurationError(f"{llm.target.name} has no tokenizer: it cannot read questions")
    from surefoot.bench.accuracy import measure_accuracy

    found = measure_accuracy(
        llm,
        asked,
        max_tokens=max_tokens,
        samples=samples,
        temperature=temperature,
        seed=SEED if seed is None else seed,
        announce=note,
    )
    facts = {
        **found.to_dict(),
        "model": model,
        "engine": llm.describe(),
        "file": str(questions or "built-in"),
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    _deliver(facts, output, json, lambda: _print_accuracy(found))
    if found.partings:
        alarm("GREEDY ANSWERS DIFFER with and without speculation, which must never happen")
    if found.failed:
        alarm(f"{len(found.failed)} ANSWERS FAILED: {found.failed[0]}")
    if not found.accepted:
        alarm("NO DRAFT WAS ACCEPTED: speculation did not take part")
    if found.sampled is not None and found.sampled.differs:
        alarm(
            "SAMPLED ANSWERS ARE RIGHT MORE OFTEN IN ONE ARM: ask again with another --seed; twice in a row is no chance"
        )
    if not found.passed:
        raise typer.Exit(EXIT_FAILED)


def _print_accuracy(found: Accuracy) -> None:
    same = found.questions - len(found.partings)
    shares = f"{found.greedy_right:.1%}, target-only {found.greedy_right_target_only:.1%}"
    typer.echo(f"greedy   right with drafts {shares}; the same text for {same} of {found.questions} questions")
    for place in found.partings:
        typer.echo(f"         question {place.question + 1}: they part at token {place.token}")
    if (sampled := found.sampled) is not None:
        bounds = f"between {100 * sampled.low:+.1f} and {100 * sampled.high:+.1f} points at 95 %"
        shares = f"{sampled.speculative:.1%}, target-only {sampled.target_only:.1%} ({found.samples} answers each)"
        verdict = "significant" if sampled.differs else "not significant"
        typer.echo(f"sampled  right with drafts {shares}; difference {bounds}: {verdict}")
    typer.echo(f"drafts   {found.drafted} drafted, {found.accepted} accepted in the greedy answers")


def planner(json: options.Json = False) -> None:
    """Plan and allocate for 1 and for 256 requests, on one core: the host's share of a decision, in microseconds."""
    from surefoot.bench.planner import measure_planner

    timings = [measure_planner(requests) for requests in (1, 256)]
    if json:
        rows = [{**asdict(timing), "plan_and_allocate_us": timing.plan_and_allocate_us} for timing in timings]
        print_json({"rows": rows})
        return
    for timing in timings:
        typer.echo(
            f"{timing.requests:3d} requests, gamma {timing.gamma}: plan and allocate {timing.plan_and_allocate_us:.0f} us "
            f"(stale {timing.stale_us:.0f}, allocate {timing.allocate_us:.0f}, read {timing.read_us:.0f}, publish "
            f"{timing.publish_us:.0f}; causal {timing.causal_us:.0f}, stopping {timing.stopping_us:.0f})"
        )
