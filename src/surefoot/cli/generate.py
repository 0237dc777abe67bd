"""`surefoot generate`: one prompt, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.report import note, output_as_dict, planner_note, print_json, statistics_line
from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads standard input.", metavar="PROMPT")],
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
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Wrap the prompt in the model's chat template, or continue it as it is."),
    ] = False,
    max_model_len: options.MaxModelLen = None,
    trace: options.Trace = None,
    json: options.Json = False,
    stats: options.ShowStatistics = True,
) -> None:
    """Continue PROMPT as it stands, streaming the text to standard output and one line of statistics to standard error.

    For questions to an assistant, use `surefoot chat`: it applies the model's chat template.
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
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty: give a text, or - to read standard input")
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
        seed=seed,
        trace=trace,
        max_model_len=max_model_len,
    )
    try:
        stream = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
        for event in stream:
            if not json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
        output = stream.result
        if json:
            print_json({**output_as_dict(output), "engine": llm.describe()})
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        if stats:
            note("; ".join(filter(None, [statistics_line(output), planner_note(llm)])))
    finally:
        llm.close()
