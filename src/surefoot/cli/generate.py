"""`surefoot generate`: one prompt, streamed, or many as JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from surefoot.cli import options
from surefoot.cli.batch import BatchLine, answer_lines, opened, read_lines
from surefoot.cli.process import EXIT_FAILED
from surefoot.cli.report import (
    complain,
    error_of,
    logprobs_lines,
    note,
    output_as_dict,
    planner_note,
    print_json,
    statistics_line,
)
from surefoot.errors import ConfigurationError, RequestError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM, Stream


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue; - reads standard input.", metavar="PROMPT")
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
    guard: options.Guard = True,
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    n: Annotated[
        int, typer.Option("--n", help="Answers to the prompt, each a draw of its own.", rich_help_panel="Sampling")
    ] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            help="Log-probability of every token and of so many of the likeliest (0: the token's only).",
            rich_help_panel="Output",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Wrap the prompt in the model's chat template, or continue it as it is."),
    ] = False,
    chat_template_kwargs: options.TemplateArguments = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            "--batch",
            help="Many prompts instead of one: JSON lines with prompt, prompt_token_ids or messages, and any id and "
            "sampling parameters of their own; - reads standard input. One JSON line each comes back, in order.",
            metavar="FILE",
            rich_help_panel="Batch",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the batch here.", show_default="standard output", rich_help_panel="Batch"
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Prompts of a batch that run at once.", rich_help_panel="Batch")
    ] = 16,
    max_model_len: options.MaxModelLen = None,
    trace: options.Trace = None,
    json: options.Json = False,
    stats: options.ShowStatistics = True,
) -> None:
    """Continue PROMPT as it stands, streaming the text to standard output and one line of statistics to standard error.

    For questions to an assistant, use `surefoot chat`, or `--chat`: they apply the model's chat template.
    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=options.parse_stop(stop),
        n=n,
        logprobs=logprobs,
    )
    variables = options.parse_template_arguments(chat_template_kwargs)
    if variables is not None and not chat and batch is None:
        raise ConfigurationError("--chat-template-kwargs is for a chat template: add --chat")
    if (prompt is None) == (batch is None):
        raise ConfigurationError("give one of PROMPT and --batch FILE: a text to continue, or JSON lines of many")
    if output is not None and batch is None:
        raise ConfigurationError("--output is for --batch; redirect the text of one prompt with '> FILE'")
    if output is not None and output == batch:
        raise ConfigurationError(f"--output and --batch are both {output}: write the answers to another file")
    text = "" if batch is not None else _read(prompt)
    lines = [] if batch is None else read_lines(batch, params, chat=chat, variables=variables)
    sink = opened(output)
    llm = options.load_llm(
        model,
        drafter=drafter,
        gamma=gamma,
        width=width,
        cost_table=cost_table,
        guard=guard,
        device=device,
        dtype=dtype,
        threads=threads,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        seed=seed,
        max_num_seqs=max_num_seqs if batch is not None else 1,
        trace=trace,
        max_model_len=max_model_len,
    )
    profile_command = None
    if cost_table == "auto":
        profile_command = options.command_line(
            "profile",
            "--trust-remote-code" if trust_remote_code else None,
            model=model,
            drafter=None if drafter == "auto" else drafter,
            gamma=gamma,
            device=device,
            dtype=dtype,
            threads=threads,
            quantize=quantize,
        )
    try:
        if batch is not None:
            failed = _answer_batch(llm, lines, sink)
        elif chat:
            messages = [{"role": "user", "content": text}]
            stream = llm.stream_chat(messages, params, chat_template_kwargs=variables)
            failed = _answer_one(llm, stream, json=json, stats=stats)
        else:
            failed = _answer_one(llm, llm.stream(text, params), json=json, stats=stats)
        if stats and not (json and batch is None):
            note(planner_note(llm, profile_command))
        if failed is not None:
            complain(failed)
            raise typer.Exit(EXIT_FAILED)
    finally:
        llm.close()
        if output is not None:
            sink.close()


def _read(prompt: str | None) -> str:
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty: give a text, or - to read standard input")
    return text


def _answer_one(llm: LLM, stream: Stream, *, json: bool, stats: bool) -> str | None:
    """Stream the first answer, show others after it; why one of them failed, if one did."""
    for event in stream:
        if not json and event.index == 0:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    result = stream.result
    if json:
        print_json({**output_as_dict(result, llm.tokenizer), "engine": llm.describe()})
        return error_of(result)
    for answer in result.completions:
        sys.stdout.write("\n" if answer.index == 0 else f"{answer.text}\n")
        sys.stdout.flush()
        for line in logprobs_lines(answer, llm.tokenizer):
            note(line)
        if stats:
            note(statistics_line(answer))
    return error_of(result)


def _answer_batch(llm: LLM, lines: list[BatchLine], sink: TextIO) -> str | None:
    failed = answer_lines(llm, lines, sink, show=sink is not sys.stdout or not sys.stdout.isatty())
    note(f"{len(lines) - len(failed)} of {len(lines)} lines answered")
    if not failed:
        return None
    some = ", ".join(map(str, failed[:10])) + (", …" if len(failed) > 10 else "")
    return f"{len(failed)} of {len(lines)} lines failed, the reason is in their answers: line {some}"
