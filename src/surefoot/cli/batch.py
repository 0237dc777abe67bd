"""JSON lines in, JSON lines out: many prompts with one start, answered side by side, written in order.

A line is an object with one of `prompt` (a text), `prompt_token_ids` and `messages`; besides, any of

* `id`: any JSON value, repeated in the answer; the number of the line where there is none;
* every field of `SamplingParams`, in place of what the command line says;
* `chat_template_kwargs`, with `messages`.

A line that cannot be understood or served is answered by an object with `id` and `error`; the others are not affected.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from surefoot.cli.progress import progress_bar
from surefoot.cli.report import error_of, json_line, output_as_dict
from surefoot.errors import ConfigurationError, RequestError, SurefootError
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM, Stream

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
SAMPLING_KEYS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class BatchLine:
    """One line of the input, or why it cannot be used."""

    id: Any
    number: int  # in the file, from 1
    prompt: Any = None  # a text or token ids
    messages: list[Any] | None = None
    variables: dict[str, Any] | None = None  # of the chat template
    params: SamplingParams | None = None
    error: str | None = None


def opened(path: Path | None) -> TextIO:
    """Where a batch is written; None is standard output. Opened before a model is loaded, so that a refusal comes early;
    what an existing file holds goes when the first answer comes.

    Raises:
        ConfigurationError: there is no writing there.
    """
    if path is None:
        return sys.stdout
    try:
        return path.open("a", encoding="utf-8")
    except OSError as problem:
        raise ConfigurationError(f"cannot write {path}: {problem.strerror or problem}") from problem


def read_lines(
    path: Path, params: SamplingParams, *, chat: bool = False, variables: dict[str, Any] | None = None
) -> list[BatchLine]:
    """The lines of a file, `-` for standard input; empty ones are left out.

    Args:
        params: for whatever a line does not say.
        chat: whether a `prompt` is a question for the chat template.
        variables: of the chat template, for lines that bring none.

    Raises:
        ConfigurationError: the file cannot be read, or holds no line.
    """
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as problem:
        raise ConfigurationError(f"cannot read {path}: {problem.strerror or problem}") from problem
    rows = enumerate(raw.split(b"\n"), 1)
    lines = [_line(number, row, params, chat, variables) for number, row in rows if row.strip()]
    if not lines:
        raise ConfigurationError(f'{path} holds no line: give JSON lines such as {{"prompt": "Once"}}')
    return lines


def _line(number: int, row: bytes, params: SamplingParams, chat: bool, variables: dict[str, Any] | None) -> BatchLine:
    identity: Any = number
    try:
        data = json.loads(row.decode("utf-8-sig"))
        if not isinstance(data, dict):
            raise RequestError(f"the line holds a JSON {type(data).__name__}; allowed: an object")
        identity = data.pop("id", number)
        given = [key for key in PROMPT_KEYS if key in data]
        if len(given) != 1:
            raise RequestError(
                f"the line has {' and '.join(given) or 'no prompt'}; allowed: one of {', '.join(PROMPT_KEYS)}"
            )
        prompt, own = data.pop(given[0]), data.pop("chat_template_kwargs", None)
        if unknown := sorted(set(data) - set(SAMPLING_KEYS)):
            raise RequestError(
                f"the line has {unknown[0]!r}; allowed: id, chat_template_kwargs, {', '.join((*PROMPT_KEYS, *SAMPLING_KEYS))}"
            )
        messages = prompt if given[0] == "messages" else None
        if chat and given[0] == "prompt":
            messages = [{"role": "user", "content": prompt}]
        if own is not None and messages is None:
            raise RequestError("the line has chat_template_kwargs without messages: give messages, or use --chat")
        if given[0] == "prompt" and not isinstance(prompt, str):
            raise RequestError(
                f"prompt is a JSON {type(prompt).__name__}; allowed: a text (token ids: prompt_token_ids)"
            )
        if given[0] == "prompt_token_ids" and not isinstance(prompt, list):
            raise RequestError(f"prompt_token_ids is a JSON {type(prompt).__name__}; allowed: a list of token ids")
        settings = replace(params, **data)
    except UnicodeDecodeError as problem:
        return BatchLine(identity, number, error=f"the line is not UTF-8: {problem.reason} at byte {problem.start}")
    except json.JSONDecodeError as problem:
        return BatchLine(identity, number, error=f"the line is not JSON: {problem.msg} at character {problem.pos}")
    except (SurefootError, TypeError, ValueError, RecursionError) as problem:
        return BatchLine(identity, number, error=" ".join(str(problem).split()))
    return BatchLine(identity, number, None if messages is not None else prompt, messages, own or variables, settings)


def answer_lines(llm: LLM, lines: list[BatchLine], sink: TextIO, *, show: bool = True) -> list[int]:
    """Answer all lines and write each answer when it and all before it are there.

    Returns:
        The numbers of the lines that failed.
    """
    failed = []
    if sink is not sys.stdout:
        with contextlib.suppress(OSError):  # a device or a pipe
            sink.truncate(0)
    streams = [_started(llm, line) for line in lines]
    with progress_bar("answering") if show else contextlib.nullcontext(lambda share: None) as advance:
        for index, (line, stream) in enumerate(zip(lines, streams, strict=True)):
            answer = _answer(llm, stream)
            if "error" in answer:
                failed.append(line.number)
            sink.write(json_line({"id": line.id, **answer}) + "\n")
            sink.flush()
            advance((index + 1) / len(lines))
    return failed


def _started(llm: LLM, line: BatchLine) -> Stream | str:
    """The running request, or why there is none."""
    if line.error is not None:
        return line.error
    assert line.params is not None
    try:
        if line.messages is None:
            return llm.stream(line.prompt, line.params)
        return llm.stream_chat(line.messages, line.params, chat_template_kwargs=line.variables)
    except SurefootError as problem:
        return " ".join(str(problem).split())


def _answer(llm: LLM, stream: Stream | str) -> dict[str, Any]:
    if isinstance(stream, str):
        return {"error": stream}
    try:
        for _ in stream:
            pass
    except SurefootError as problem:
        return {"error": " ".join(str(problem).split())}
    result = stream.result
    found = output_as_dict(result, llm.tokenizer)
    return found if error_of(result) is None else {"error": error_of(result), **found}
