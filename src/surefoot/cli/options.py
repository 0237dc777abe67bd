"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.process import importing
from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    from surefoot.llm import LLM

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
MODELS = (DEFAULT_MODEL, "gemma3-270m")
DRAFTERS = ("auto", "none", "prompt-lookup")


def _starting_with(names: tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Shell completion of the built-in model names."""
    return _starting_with(MODELS, incomplete)


def complete_drafter(incomplete: str) -> list[str]:
    """Shell completion of the drafter names."""
    return _starting_with(DRAFTERS, incomplete)


DEFAULT_TEMPERATURE = 0.0
"""The rule for temperatures that are not given: commands are greedy, so that what they print can be repeated; in a batch,
lines take the temperature of the command; in Python `SamplingParams()` is the target's own distribution, temperature 1."""

_MODEL, _SPECULATION, _SAMPLING, _OUTPUT = "Model", "Speculation", "Sampling", "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=f"Target: {' or '.join(MODELS)}, a Hugging Face id, a directory, or a GGUF file.",
        autocompletion=complete_model,
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, cuda, cuda:1 …", show_default="CUDA where there is one", rich_help_panel=_MODEL
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Of the target's weights: bfloat16, float16 or float32.",
        show_default="the checkpoint's",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="CPU threads.", show_default="physical cores", rich_help_panel=_MODEL)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that the checkpoint brings. Without it, none runs.",
        rich_help_panel=_MODEL,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", help="int8 stores the target's weights in 8 bits.", rich_help_panel=_MODEL),
]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="auto (the one shipped for the target and prompt lookup in one, or prompt lookup alone), none, prompt-lookup, a "
        "DSpark / DFlash checkpoint (directory or Hugging Face id), or prompt-lookup+CHECKPOINT for both.",
        autocompletion=complete_drafter,
        rich_help_panel=_SPECULATION,
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--gamma", "-g", help="Draft tokens per block.", show_default="the drafter's own", rich_help_panel=_SPECULATION
    ),
]
Width = Annotated[
    str,
    typer.Option(
        "--width",
        "-w",
        help="Draft tokens verified per step: auto (the planner), a number, or a rotating pattern such as 0,3,1.",
        rich_help_panel=_SPECULATION,
    ),
]
CostTable = Annotated[
    str,
    typer.Option(
        "--cost-table",
        help="Measured costs the planner works from: auto (what 'surefoot profile' saved), none, or a file.",
        rich_help_panel=_SPECULATION,
    ),
]
Guard = Annotated[
    bool,
    typer.Option(
        "--guard/--no-guard",
        help="Compare a few steps without drafts with the others, and switch drafts off where they do not pay.",
        rich_help_panel=_SPECULATION,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Longest prompt and answer together, in tokens.",
        show_default="what the model can, at most 8192",
        rich_help_panel=_OUTPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write every step as a line of JSON to this file; 'surefoot simulate --trace FILE' replays it.",
        rich_help_panel=_OUTPUT,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        help="0 is greedy (the default of every command), 1 the model's own distribution.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option("--top-p", help="Keep the likeliest tokens up to this mass.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Drop tokens below this share of the likeliest; 0 is off.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Against all tokens seen so far; 1 is off.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="Against tokens in the output; 0 is off.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", help="The same, per occurrence; 0 is off.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Makes sampling repeatable.", show_default="a fresh one", rich_help_panel=_SAMPLING),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to emit.", rich_help_panel=_OUTPUT)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help=r"End at this text; may be given several times; \n is a line end.", rich_help_panel=_OUTPUT
    ),
]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        help="""Further variables of the chat template, as JSON: '{"enable_thinking": false}'.""",
        metavar="JSON",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.", rich_help_panel=_OUTPUT)]
ShowStatistics = Annotated[
    bool,
    typer.Option("--stats/--no-stats", help="A line of statistics on standard error.", rich_help_panel=_OUTPUT),
]


def parse_width(width: str) -> int | str | None:
    """`auto` → None, a number → int, a pattern such as `0,3,1` as it is.

    Raises:
        ConfigurationError: anything else.
    """
    if width == "auto":
        return None
    parts = [part.strip() for part in width.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigurationError(
            f"width is {width!r}; allowed: auto, a number, or a rotating pattern such as 0,3,1; "
            "leave it out to let the planner choose"
        )
    return int(parts[0]) if len(parts) == 1 else ",".join(parts)


def parse_stop(stop: list[str] | None) -> tuple[str, ...]:
    r"""Stop strings as typed in a shell, where a line end is hard to type: `\n` and `\t` stand for themselves."""
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ())


def parse_template_arguments(text: str | None) -> dict[str, Any] | None:
    """`--chat-template-kwargs` as a mapping.

    Raises:
        ConfigurationError: no JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"chat-template-kwargs is {text!r}; allowed: a JSON object such as '{{\"enable_thinking\": false}}'"
        )
    return value


def load_llm(
    model: str,
    *,
    drafter: str,
    gamma: int | None,
    width: str,
    cost_table: str,
    device: str | None,
    dtype: str | None,
    threads: int | None,
    quantize: str | None,
    trust_remote_code: bool = False,
    seed: int | None = None,
    max_num_seqs: int = 1,
    trace: Path | None = None,
    max_model_len: int | None = None,
    guard: bool = True,
) -> LLM:
    """The engine these options describe.

    Raises:
        SurefootError: the options do not fit together, or model or drafter cannot be loaded.
    """
    planned = parse_width(width)  # before seconds go into imports and weights
    if gamma is not None and gamma < 1:
        raise ConfigurationError(f"gamma is {gamma}; allowed: 1 or more; use --drafter none to switch speculation off")
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True).print(f"loading {model} …", style="dim", markup=False, highlight=False)
    else:  # nobody sees the bars of transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
    with importing():
        from surefoot.llm import LLM

    llm = LLM(
        model=model,
        drafter=drafter,
        gamma=gamma,
        width=planned,
        cost_table=cost_table,
        device=device,
        dtype=dtype,
        threads=threads,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        seed=seed,
        max_num_seqs=max_num_seqs,
        trace=trace,
        max_model_len=max_model_len,
        guard=guard,
    )
    llm.mentions_missing_table = False  # the commands say it beside their figures, or measure one
    return llm


def command_line(*words: str | None, **given: object) -> str:
    """A command to copy: `words`, and the options that were given, quoted for a shell.

    An option that is None is left out; the model where it is the default one.
    """
    parts = ["surefoot", *(word for word in words if word is not None)]
    for name, value in given.items():
        if value is not None and (name, value) != ("model", DEFAULT_MODEL):
            parts += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(parts)
