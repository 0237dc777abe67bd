"""`surefoot chat`: a conversation, at the terminal or from standard input."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options, process
from surefoot.cli.profile import measure_missing
from surefoot.cli.report import (
    complain,
    error_of,
    note,
    output_as_dict,
    planner_note,
    print_json,
    statistics_line,
)
from surefoot.errors import SurefootError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM, RequestOutput

HELP = (
    "/reset forgets the conversation, /stats shows figures, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer or clears the "
    "line; Alt-Enter begins another line; // at the start of a message is one slash"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)


def chat(
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
    max_tokens: options.MaxTokens = 512,
    stop: options.Stop = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole/--lines", help="Piped input is one message, or one message per line.")
    ] = False,
    chat_template_kwargs: options.TemplateArguments = None,
    max_model_len: options.MaxModelLen = None,
    json: options.Json = False,
    stats: options.ShowStatistics = True,
) -> None:
    """Talk with a model that has a chat template; with piped input, answer every line and leave.

    At a terminal a pasted block of lines is one message, Ctrl-C stops the answer (or clears the line) and keeps the
    conversation, and Ctrl-D ends it.
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
    variables = options.parse_template_arguments(chat_template_kwargs)
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
        max_model_len=max_model_len,
    )
    try:
        conversation = Conversation(llm, params, system, variables)
        conversation.check()
        measure_missing(llm, cost_table)
        if sys.stdin.isatty():
            _talk(conversation, stats)
        else:
            failed = _answer_piped(conversation, whole=whole, json=json, stats=stats)
            if failed:
                raise typer.Exit(process.EXIT_FAILED)
    finally:
        llm.close()


class Conversation:
    """Messages so far, and what answering them cost."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None = None, variables: dict[str, Any] | None = None
    ) -> None:
        self.llm, self.params, self.variables = llm, params, variables
        self.start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)
        self.last: RequestOutput | None = None

    def check(self) -> None:
        """Raise now, not after the first question, if the model has no chat template."""
        self.llm.chat_tokens([*self.start, {"role": "user", "content": "?"}], self.variables)

    def reset(self) -> None:
        self.messages = list(self.start)

    def ask(self, question: str) -> Generator[str, None, None]:
        """Stream the answer; it becomes part of the conversation as far as it came. A refused question does not."""
        messages = [*self.messages, {"role": "user", "content": question}]
        stream = self.llm.stream_chat(messages, self.params, chat_template_kwargs=self.variables)
        events = iter(stream)
        shown: list[str] = []
        try:
            for event in events:
                shown.append(event.text)
                yield event.text
        finally:
            if isinstance(events, Generator):
                events.close()  # cancels a request that is still running
            if shown:  # the engine may be further than what was shown
                self.last = stream.result
                self.messages = [*messages, {"role": "assistant", "content": "".join(shown)}]


def _answer_piped(conversation: Conversation, *, whole: bool, json: bool, stats: bool) -> bool:
    """Answer what standard input holds; whether an answer failed."""
    questions = [sys.stdin.read()] if whole else (line.rstrip("\n") for line in sys.stdin)
    turns, failed = [], False
    for question in filter(str.strip, questions):
        for text in conversation.ask(question):
            if not json:
                sys.stdout.write(text)
                sys.stdout.flush()
        assert conversation.last is not None
        turns.append(output_as_dict(conversation.last))
        if error := error_of(conversation.last):
            failed = True
            complain(error)
        if not json:
            sys.stdout.write("\n")
            sys.stdout.flush()
            if stats:
                note(statistics_line(conversation.last))
    if json:
        print_json({"messages": conversation.messages, "turns": turns, "engine": conversation.llm.describe()})
    return failed


def _talk(conversation: Conversation, stats: bool) -> None:
    """Read, answer, repeat. Ctrl-C never ends the conversation: it clears the line, or stops the answer."""
    from surefoot.cli.input_line import InputLine

    line = InputLine()
    note(HELP)
    while True:
        try:
            if (typed := line.read()) is None or not _respond(conversation, typed.strip(), stats):
                return
        except KeyboardInterrupt:
            process.stay()


def _respond(conversation: Conversation, typed: str, stats: bool) -> bool:
    """Do what was typed, a command or a message; False to leave."""
    command = typed if "\n" not in typed else ""  # a pasted block is a message, whatever it begins with
    if command in ("/exit", "/quit"):
        return False
    if command == "/reset":
        conversation.reset()
        note("the conversation is forgotten")
    elif command == "/stats":
        _show_figures(conversation)
    elif command.startswith("/") and not command.startswith("//"):
        note(f"{command.split()[0]} is no command. {HELP}")
    elif typed:
        _answer(conversation, typed[1:] if command.startswith("//") else typed, stats)
    return True


def _answer(conversation: Conversation, question: str, stats: bool) -> None:
    answer = conversation.ask(question)
    try:
        for text in answer:
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        process.stay()
        answer.close()
        sys.stdout.write("\n")
        note("stopped")
        return
    except SurefootError as problem:
        complain(f"{problem} (or start over with /reset)")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    if conversation.last is None:
        return
    if error := error_of(conversation.last):
        complain(error)
    elif stats:
        note(statistics_line(conversation.last))


def _show_figures(conversation: Conversation) -> None:
    if conversation.last is None:
        note("nothing has been answered yet")
        return
    note(f"last answer: {statistics_line(conversation.last)}")
    if remark := planner_note(conversation.llm):
        note(remark)
    for name, value in conversation.llm.stats().items():
        if isinstance(value, (int, float, str)):
            note(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
